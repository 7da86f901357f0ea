/*
 * A libcuda.so.1 of the tests' own: the driver API's ABI, with delays that are slept
 * (or spun, for what a CPU does) and copies that are made, so that a cold mapped
 * source is faulted in for real.
 *
 * FAKE_GPU_STATE: the words shared with libnvidia-ml's stand-in; memory that is
 * allocated shows there, as its process's too. A process that just ends keeps it:
 * the test gives it back, as a driver does a while later. FAKE_CUDA_MS sets how long
 * calls take, "cuInit=30 ...". FAKE_CUDA_STAMPS names a file to which each call adds
 * a line as it returns: its name, its pid, when it began and ended, in ns.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { USED = 0, PID = 24, TOTAL = 32, REFUSED = 53, OWNERS = 64, OWNERS_MOST = 8, WORDS = 80 };
enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

static volatile uint64_t *state;
static uint64_t own_words[WORDS] = {[TOTAL] = 8ull << 30};
static volatile uint64_t *owner = (uint64_t[2]){}; /* of memory: its pid, and how much */
static int stamps = -1;
static char bounce[1 << 20]; /* what a copy writes: the device's side is thrown away */

static void give_back(void)
{
	__sync_fetch_and_sub(&state[USED], owner[1]);
	owner[1] = 0;
}

static void leave(void)
{
	give_back();
	owner[0] = 0;
}

static void own(void)
{
	for (int i = 0; i < OWNERS_MOST; i++)
		if (__sync_bool_compare_and_swap(&state[OWNERS + 2 * i], 0, getpid())) {
			owner = &state[OWNERS + 2 * i];
			return;
		}
}

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("FAKE_GPU_STATE"), *log = getenv("FAKE_CUDA_STAMPS");
	int fd = path ? open(path, O_RDWR) : -1;

	state = own_words;
	if (fd >= 0) {
		state = mmap(0, WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		own();
	}
	if (log)
		stamps = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	atexit(leave);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

struct call {
	const char *name;
	uint64_t begin_ns;
};

static void returns(struct call *call)
{
	char line[128];

	if (stamps < 0)
		return;
	int length = snprintf(line, sizeof(line), "%s %d %llu %llu\n", call->name, getpid(),
			      (unsigned long long)call->begin_ns, (unsigned long long)now_ns());
	if (write(stamps, line, length) != length)
		abort();
}

static void take(const char *call)
{
	const char *list = getenv("FAKE_CUDA_MS");
	size_t length = strlen(call);
	const char *at = list;

	while (at && (at = strstr(at, call))) {
		if ((at == list || at[-1] == ' ') && at[length] == '=') {
			double ms = atof(at + length + 1);
			struct timespec left = {(time_t)(ms / 1000),
						(long)(ms * 1e6) % 1000000000};
			while (nanosleep(&left, &left))
				;
			return;
		}
		at += length;
	}
}

#define TAKE()                                                             \
	__attribute__((cleanup(returns), unused)) struct call call_ = {__func__, now_ns()}; \
	take(__func__)

int cuInit(unsigned flags) { (void)flags; TAKE(); return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **ctx, int device) { (void)device; TAKE(); *ctx = bounce; return SUCCESS; }
int cuCtxCreate_v2(void **ctx, unsigned flags, int device) { (void)flags; (void)device; TAKE(); *ctx = bounce; return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { (void)image; TAKE(); *module = bounce; return SUCCESS; }
int cuLinkComplete(void *link, void **cubin, size_t *size) { (void)link; *cubin = bounce; *size = 1; TAKE(); return SUCCESS; }

static int allocate(void **where, size_t bytes)
{
	if (state[USED] + bytes > state[TOTAL]) {
		__sync_fetch_and_add(&state[REFUSED], 1);
		return OUT_OF_MEMORY;
	}
	__sync_fetch_and_add(&state[USED], bytes);
	owner[1] += bytes;
	*where = (void *)0x700000000000;
	return SUCCESS;
}

int cuMemAlloc_v2(void **where, size_t bytes) { TAKE(); return allocate(where, bytes); }
/* The old name, at the same address: one export that two names have. */
int cuMemAlloc(void **where, size_t bytes) __attribute__((alias("cuMemAlloc_v2")));
int cuMemCreate(void **handle, size_t bytes, const void *properties, unsigned long long flags)
{
	(void)properties;
	(void)flags;
	TAKE();
	return allocate(handle, bytes);
}
int cuMemFree_v2(void *where) { (void)where; give_back(); return SUCCESS; }
int cuMemHostAlloc(void **where, size_t bytes, unsigned flags) { (void)flags; TAKE(); *where = malloc(bytes); return SUCCESS; }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) { (void)at; (void)bytes; (void)flags; TAKE(); return SUCCESS; }

/* Reads every byte of the source, as a pageable copy does. */
static int copy(const void *from, size_t bytes)
{
	for (size_t done = 0; done < bytes; done += sizeof(bounce)) {
		size_t left = bytes - done;
		memcpy(bounce, (const char *)from + done, left < sizeof(bounce) ? left : sizeof(bounce));
	}
	return SUCCESS;
}

int cuMemcpyHtoD_v2(void *to, const void *from, size_t bytes) { (void)to; TAKE(); return copy(from, bytes); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) { (void)to; (void)stream; TAKE(); return copy(from, bytes); }
int cuMemcpyHtoDAsync_v2_ptsz(void *to, const void *from, size_t bytes, void *stream) { (void)to; (void)stream; TAKE(); return copy(from, bytes); }

int cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream; (void)mode; TAKE(); return SUCCESS; }
int cuStreamEndCapture(void *stream, void **graph) { (void)stream; *graph = bounce; TAKE(); return SUCCESS; }
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { (void)graph; (void)flags; *exec = bounce; TAKE(); return SUCCESS; }
static void *own_handle(void)
{
	Dl_info own;

	return dladdr((void *)own_handle, &own) ? dlopen(own.dli_fname, RTLD_NOLOAD | RTLD_NOW) : 0;
}

/* As the driver does: the newest export of a name, or its variant for streams of threads. */
int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags, int *status)
{
	static const char *const variants[] = {"_v2_ptsz", "_ptsz", "_v2", ""};
	char symbol[99];

	(void)version;
	*address = 0;
	for (int i = flags & 2 ? 0 : 2; i < 4 && !*address; i++) {
		snprintf(symbol, sizeof(symbol), "%s%s", name, variants[i]);
		*address = dlsym(own_handle(), symbol);
	}
	*status = !*address;
	return SUCCESS;
}

int cuStreamSynchronize(void *stream) { (void)stream; TAKE(); return SUCCESS; }
int cuLaunchKernel(void) { TAKE(); return SUCCESS; }
