/*
 * A libamdhip64.so.6 of the tests' own: a part of the HIP runtime's ABI, with delays that
 * are slept and copies that are made. Copies to and from the device go through the same
 * functions, told apart by an argument; variants for streams of threads end in _spt.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };
static const size_t total = 1ull << 30;
static size_t held;
static char bounce[1 << 20]; /* the device's side */

static int takes(long ms)
{
	struct timespec left = {0, ms * 1000000};

	while (nanosleep(&left, &left))
		;
	return SUCCESS;
}

/* In two versions, as the runtime has of what it changed. */
int init_of_4_2(unsigned flags) { (void)flags; return takes(25); }
int init_of_6_0(unsigned flags) { (void)flags; return takes(20); }
__asm__(".symver init_of_4_2, hipInit@hip_4.2");
__asm__(".symver init_of_6_0, hipInit@@hip_6.0");
int hipGetDeviceCount(int *count) { *count = 1; return takes(15); }
int hipModuleLoadData(void **module, const void *image) { (void)image; *module = bounce; return takes(10); }

int hipMalloc(void **where, size_t bytes)
{
	if (held + bytes > total)
		return OUT_OF_MEMORY;
	held += bytes;
	*where = bounce;
	return SUCCESS;
}

int hipHostMalloc(void **where, size_t bytes, unsigned flags)
{
	(void)flags;
	*where = malloc(bytes);
	return SUCCESS;
}

static int copy(const void *from, size_t bytes, int kind)
{
	for (size_t done = 0; kind == 1 && done < bytes; done += sizeof(bounce)) {
		size_t left = bytes - done;
		memcpy(bounce, (const char *)from + done, left < sizeof(bounce) ? left : sizeof(bounce));
	}
	return SUCCESS;
}

int hipMemcpy(void *to, const void *from, size_t bytes, int kind) { (void)to; return copy(from, bytes, kind); }
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { (void)to; (void)stream; return copy(from, bytes, kind); }
int hipMemcpyAsync_spt(void *to, const void *from, size_t bytes, int kind, void *stream) { (void)to; (void)stream; return copy(from, bytes, kind); }
int hipMemcpyHtoD(void *to, void *from, size_t bytes) { (void)to; return copy(from, bytes, 1); }
int hipStreamSynchronize(void *stream) { (void)stream; return takes(5); }
