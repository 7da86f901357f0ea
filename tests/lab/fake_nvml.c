/*
 * A libnvidia-ml.so.1 of the tests' own: NVML's ABI, and what it says in a file.
 *
 * FAKE_GPU_STATE names a file of 80 words that is mapped and read at every call, so
 * that a test, or libcuda's stand-in beside it, moves the numbers while they are
 * sampled. FAKE_GPU_REFUSES lists calls that this device does not support. Calls
 * take the time that word 49 says, in microseconds, by sleeping it.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Words of the state; per device where an index is added. */
enum {
	USED = 0,
	BUSY = 8,
	LOST = 16,
	PID = 24, /* whose memory all of it is, where libcuda's stand-in does not tell */
	TOTAL = 32,
	COUNT = 40,	 /* devices, 0 = 1 */
	PERSISTENCE = 41,
	LINK = 42,	 /* generation now, max, width now, max: a byte each */
	RX = 43,	 /* KB/s */
	COUNTS = 44,	 /* whether the link's bytes are counted; how many came, how many went */
	RECEIVED = 45,
	SENT = 46,
	DRAWS = 47, /* whose memory is that of a process that draws, not of one that computes */
	HANG_MS = 48,	 /* the next call for memory takes this long, once */
	DELAY_US = 49,
	CALLS = 50,
	INSTANCES = 51,	 /* of device 0 when partitioned */
	INIT_ERROR = 52,
	REFUSED = 53,	 /* allocations, by libcuda's stand-in */
	INIT_MS = 54,	 /* to start */
	UNTOLD = 55,	 /* bit by device: the memory of its processes is not told */
	INSTANCE_USED = 56, /* of each instance; its process is that of device 0 */
	OWNERS = 64,	 /* of device 0's memory: pid and bytes, of eight processes */
	OWNERS_MOST = 8,
	WORDS = 80,
};

enum { INSTANCES_MOST = 7, NOT_AVAILABLE = -1 };
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, LOST_ERROR = 15 };

static volatile uint64_t *state;
static uint64_t zeros[WORDS];

static void sleep_us(uint64_t us)
{
	struct timespec left = {us / 1000000, us % 1000000 * 1000};

	while (nanosleep(&left, &left))
		;
}

static int refused(const char *call)
{
	const char *list = getenv("FAKE_GPU_REFUSES");
	const char *at = list;
	size_t length = strlen(call);

	while (at && (at = strstr(at, call))) {
		if ((at == list || at[-1] == ' ') && (!at[length] || at[length] == ' '))
			return 1;
		at += length;
	}
	return 0;
}

/* What an instance answers; all else is asked of its GPU. */
static int of_instances(const char *call)
{
	return strstr(call, "GetName") || strstr(call, "GetMemoryInfo") || strstr(call, "RunningProcesses");
}

static int began(const char *call, uintptr_t handle)
{
	if (!state)
		return 1; /* NVML_ERROR_UNINITIALIZED */
	__sync_fetch_and_add(&state[CALLS], 1);
	if (state[DELAY_US])
		sleep_us(state[DELAY_US]);
	if (refused(call) || (handle > 8 && !of_instances(call)))
		return NOT_SUPPORTED;
	if (handle && state[LOST + (handle - 1) % 8])
		return LOST_ERROR;
	return SUCCESS;
}

#define BEGIN(handle)                                       \
	do {                                                \
		int failed = began(__func__, (uintptr_t)(handle)); \
		if (failed)                                 \
			return failed;                      \
	} while (0)

int nvmlInitWithFlags(unsigned flags)
{
	const char *path = getenv("FAKE_GPU_STATE");
	int fd = path ? open(path, O_RDWR) : -1;

	(void)flags;
	state = zeros;
	if (fd >= 0) {
		state = mmap(0, WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
	}
	if (state == MAP_FAILED)
		return 999;
	sleep_us(state[INIT_MS] * 1000);
	return state[INIT_ERROR];
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int number)
{
	switch (number) {
	case NOT_SUPPORTED:
		return "Not Supported";
	case LOST_ERROR:
		return "GPU is lost";
	case 9:
		return "Driver Not Loaded";
	}
	return "Some Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
	BEGIN(0);
	snprintf(text, length, "999.88");
	return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	BEGIN(0);
	*count = state[COUNT] ? state[COUNT] : 1;
	return SUCCESS;
}

/* A handle is the device's number from 1; an instance's is 8 more than its own. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t *handle)
{
	BEGIN(0);
	*handle = index + 1;
	return SUCCESS;
}

int nvmlDeviceGetMigMode(uintptr_t handle, unsigned *now, unsigned *pending)
{
	BEGIN(handle);
	if (handle != 1 || !state[INSTANCES])
		return NOT_SUPPORTED;
	*now = *pending = 1;
	return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(uintptr_t handle, unsigned *count)
{
	BEGIN(handle);
	*count = INSTANCES_MOST;
	return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(uintptr_t handle, unsigned index, uintptr_t *instance)
{
	BEGIN(handle);
	if (index >= state[INSTANCES])
		return NOT_FOUND;
	*instance = 8 + index + 1;
	return SUCCESS;
}

int nvmlDeviceGetName(uintptr_t handle, char *text, unsigned length)
{
	BEGIN(handle);
	snprintf(text, length, handle > 8 ? "Fake GPU MIG 1g" : "Fake GPU");
	return SUCCESS;
}

struct memory {
	unsigned long long total, free, used;
};

struct memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};

static void maybe_hang(void)
{
	uint64_t ms = state[HANG_MS];

	if (ms && __sync_bool_compare_and_swap(&state[HANG_MS], ms, 0))
		sleep_us(ms * 1000);
}

int nvmlDeviceGetMemoryInfo(uintptr_t handle, struct memory *out)
{
	uintptr_t index = (handle - 1) % 8;

	BEGIN(handle);
	maybe_hang();
	out->total = state[TOTAL + index] / (handle > 8 ? INSTANCES_MOST : 1);
	out->used = state[(handle > 8 ? INSTANCE_USED : USED) + index];
	out->free = out->total - out->used;
	return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(uintptr_t handle, struct memory_v2 *out)
{
	struct memory plain;

	if (out->version != 0x02000028)
		return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
	BEGIN(handle);
	int failed = nvmlDeviceGetMemoryInfo(handle, &plain);
	out->total = plain.total;
	out->used = plain.used;
	out->free = plain.free;
	out->reserved = 0;
	return failed;
}

struct process {
	unsigned pid;
	unsigned long long used;
	unsigned gpu_instance, compute_instance;
};

static int running(uint64_t pid, uint64_t used, unsigned *count, struct process *out)
{
	unsigned room = *count;

	*count = pid && used ? 1 : 0;
	if (!*count)
		return SUCCESS;
	if (!out || room < 1)
		return SHORT;
	out[0] = (struct process){pid, used, ~0u, ~0u};
	return SUCCESS;
}

static int owners(unsigned *count, struct process *out)
{
	unsigned room = *count, found = 0;

	for (int i = 0; i < OWNERS_MOST; i++) {
		uint64_t pid = state[OWNERS + 2 * i], used = state[OWNERS + 2 * i + 1];

		if (pid && used && out && found < room)
			out[found] = (struct process){pid, used, ~0u, ~0u};
		found += pid && used;
	}
	*count = found;
	return found > room ? SHORT : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t handle, unsigned *count, struct process *out)
{
	uintptr_t index = (handle - 1) % 8;

	BEGIN(handle);
	if (handle > 8)
		return running(state[PID], state[INSTANCE_USED + index], count, out);
	if (!index && !state[PID])
		return owners(count, out);
	int failed = running(state[PID + index], state[USED + index], count, out);
	if (!failed && *count && state[UNTOLD] >> index & 1)
		out[0].used = NOT_AVAILABLE;
	return failed;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(uintptr_t handle, unsigned *count, struct process *out)
{
	BEGIN(handle);
	return running(state[DRAWS], 1 << 20, count, out);
}

struct field {
	unsigned id, scope;
	long long timestamp, latency_us;
	unsigned type, failed;
	unsigned long long value;
};

/* Running counts, renewed each 20 ms, with the wall time of that in microseconds. */
int nvmlDeviceGetFieldValues(uintptr_t handle, int count, struct field *fields)
{
	struct timespec now;

	BEGIN(handle);
	clock_gettime(CLOCK_REALTIME, &now);
	for (struct field *f = fields; f < fields + count; f++) {
		int told = f->id == 198 || (f->id == 197 && state[COUNTS] == 1); /* at 2 not what is sent */

		f->failed = !state[COUNTS] ? NOT_SUPPORTED : told ? SUCCESS : INVALID;
		f->type = 3; /* NVML_VALUE_TYPE_UNSIGNED_LONG_LONG */
		f->timestamp = (now.tv_sec * 1000000ll + now.tv_nsec / 1000) / 20000 * 20000;
		f->value = state[f->id == 198 ? RECEIVED : SENT];
	}
	return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(uintptr_t handle, unsigned *gpu_and_memory)
{
	BEGIN(handle);
	gpu_and_memory[0] = state[BUSY + (handle - 1) % 8];
	gpu_and_memory[1] = 0;
	return SUCCESS;
}

static int link_byte(uintptr_t handle, int at, unsigned *out)
{
	(void)handle;
	*out = state[LINK] >> 8 * at & 255;
	return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(uintptr_t h, unsigned *out) { BEGIN(h); return link_byte(h, 0, out); }
int nvmlDeviceGetMaxPcieLinkGeneration(uintptr_t h, unsigned *out) { BEGIN(h); return link_byte(h, 1, out); }
int nvmlDeviceGetCurrPcieLinkWidth(uintptr_t h, unsigned *out) { BEGIN(h); return link_byte(h, 2, out); }
int nvmlDeviceGetMaxPcieLinkWidth(uintptr_t h, unsigned *out) { BEGIN(h); return link_byte(h, 3, out); }

/* NVML measures for 20 ms. */
int nvmlDeviceGetPcieThroughput(uintptr_t handle, int counter, unsigned *out)
{
	BEGIN(handle);
	sleep_us(20000);
	*out = counter == 1 ? state[RX] : 0;
	return SUCCESS;
}

int nvmlDeviceGetClockInfo(uintptr_t handle, int type, unsigned *out)
{
	BEGIN(handle);
	*out = type == 1 ? 1500 : 9001;
	return SUCCESS;
}

int nvmlDeviceGetPerformanceState(uintptr_t handle, int *out) { BEGIN(handle); *out = 2; return SUCCESS; }

int nvmlDeviceGetCurrentClocksThrottleReasons(uintptr_t handle, unsigned long long *out)
{
	BEGIN(handle);
	*out = 4; /* software power cap */
	return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(uintptr_t handle, int *out)
{
	BEGIN(handle);
	*out = state[PERSISTENCE];
	return SUCCESS;
}

struct pci {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(uintptr_t handle, struct pci *out)
{
	BEGIN(handle);
	memset(out, 0, sizeof(*out));
	snprintf(out->bus_id, sizeof(out->bus_id), "00000000:%02X:00.0", (unsigned)handle);
	return SUCCESS;
}

struct sample {
	unsigned long long us;
	union {
		double d;
		unsigned u;
		unsigned long long ull;
	} value;
};

/* One sample each 50 ms of wall time, its value the second's tenth it fell into. */
int nvmlDeviceGetSamples(uintptr_t handle, int type, unsigned long long since_us, int *value_type,
			 unsigned *count, struct sample *out)
{
	struct timespec now;
	unsigned found = 0;

	BEGIN(handle);
	(void)type;
	clock_gettime(CLOCK_REALTIME, &now);
	unsigned long long now_us = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
	unsigned long long step = 50000, first = now_us / step * step - 9 * step;
	*value_type = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
	for (unsigned long long us = first; us <= now_us; us += step) {
		if (us <= since_us)
			continue;
		if (out && found < *count)
			out[found] = (struct sample){us, {.ull = us / 100000 % 10}};
		found++;
	}
	if (!found)
		return NOT_FOUND;
	*count = found;
	return SUCCESS;
}
