/*
 * The truth workload's libllama.so on a GPU: the same calls, with weights, KV cache
 * and kernels on the fake libcuda beside it, in the order in which llama.cpp does it.
 *
 * A plan beside the weights ("FILE.plan", lines NAME=VALUE that go into the
 * environment) says what is given to the GPU and how long libcuda takes for it:
 * GPU_WEIGHTS_MB, GPU_KV_MB (asked for twice), GPU_LAYERS ("20/33"), GPU_KERNEL (a
 * file of a kernel cache to write), GPU_TOKENIZER (a file to read), GPU_GRAPH (any
 * value: graphs are captured), FAKE_CUDA_MS.
 */
#define PLAIN_NAMES
#include "../workloads/native/weights.c"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { COPY_BYTES = 8 << 20, RETRY_NS = 300000000, RETRIES = 50, STAGE_NS = 20000000 };
enum { SUCCESS = 0 };

static void *driver;

/* Any call of the driver's: its arguments are numbers and addresses, four at most. */
static int cuda(const char *name, uintptr_t a, uintptr_t b, uintptr_t c)
{
	int (*call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t) = dlsym(driver, name);

	return call(a, b, c, 0);
}

static size_t megabytes(const char *name)
{
	const char *text = getenv(name);

	return text ? (size_t)atol(text) << 20 : 0;
}

static void say(const char *text)
{
	if (write(2, text, strlen(text)) < 0)
		abort();
}

/* Strings given to putenv() stay. */
static void take_plan(const char *weights)
{
	char path[4096];
	char *line = NULL;
	size_t room = 0;

	snprintf(path, sizeof path, "%s.plan", weights);
	FILE *plan = fopen(path, "re");
	while (plan && getline(&line, &room, plan) > 0) {
		line[strcspn(line, "\n")] = 0;
		putenv(line);
		line = NULL;
	}
	if (plan)
		fclose(plan);
}

/* Device discovery, once a process. */
static void begin(const char *weights)
{
	void *context;

	if (driver)
		return;
	take_plan(weights);
	driver = dlopen(getenv("GPU_DRIVER"), RTLD_NOW);
	if (!driver)
		abort();
	cuda("cuInit", 0, 0, 0);
	cuda("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0, 0);
}

/* As servers do that were started before the old model's memory was back. */
static void allocate(size_t bytes)
{
	void *at;

	for (int i = 0; i < RETRIES; i++) {
		if (cuda("cuMemAlloc_v2", (uintptr_t)&at, bytes, 0) == SUCCESS)
			return;
		spend_asleep(RETRY_NS);
	}
	abort();
}

static void offload(struct model *m)
{
	char line[64];

	allocate(megabytes("GPU_WEIGHTS_MB"));
	for (size_t at = 0; at < m->size_bytes; at += COPY_BYTES) {
		size_t left = m->size_bytes - at;

		cuda("cuMemcpyHtoD_v2", 0, (uintptr_t)m->base + at, left < COPY_BYTES ? left : COPY_BYTES);
	}
	m->untouched = false;
	snprintf(line, sizeof line, "load_tensors: offloaded %s layers to GPU\n", getenv("GPU_LAYERS"));
	say(line);
}

EXPORT struct model *llama_model_load_from_file(const char *path, struct model_params params)
{
	begin(path);
	params.load_mode = LOAD_LAZY;
	struct model *m = plain_model_load_from_file(path, params);
	if (m && params.header_only)
		say("common_fit_params: fitting params to free memory took 0.05 seconds\n");
	else if (m)
		offload(m);
	return m;
}

/* The driver compiles what it has no code for, and keeps it. */
static void compile(void)
{
	const char *kernel = getenv("GPU_KERNEL");
	void *module;

	cuda("cuModuleLoadData", (uintptr_t)&module, 0, 0);
	int fd = kernel ? open(kernel, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
	if (fd >= 0) {
		if (write(fd, kernel, strlen(kernel)) < 0)
			abort();
		close(fd);
	}
}

static void read_tokenizer(const char *path)
{
	static char half[2 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	while (fd >= 0 && read(fd, half, sizeof half) > 0)
		spend_asleep(STAGE_NS);
	close(fd);
}

static void capture(void)
{
	void *graph, *exec;

	cuda("cuStreamBeginCapture_v2", 0, 0, 0);
	spend_asleep(STAGE_NS);
	cuda("cuStreamEndCapture", 0, (uintptr_t)&graph, 0);
	cuda("cuGraphInstantiateWithFlags", (uintptr_t)&exec, 0, 0);
}

EXPORT struct context *llama_init_from_model(struct model *m, struct context_params params)
{
	size_t kv_bytes = megabytes("GPU_KV_MB");
	void *at;

	compile();
	if (getenv("GPU_TOKENIZER"))
		read_tokenizer(getenv("GPU_TOKENIZER"));
	if (getenv("GPU_GRAPH"))
		capture();
	for (int i = 0; kv_bytes && i < 2; i++)
		cuda("cuMemAlloc_v2", (uintptr_t)&at, kv_bytes, 0);
	return plain_init_from_model(m, params);
}

EXPORT int32_t llama_decode(struct context *c, struct batch batch)
{
	plain_decode(c, batch);
	return cuda("cuStreamSynchronize", 0, 0, 0);
}

EXPORT void llama_free(struct context *c) { plain_free(c); }
EXPORT void llama_model_free(struct model *m) { plain_model_free(m); }
