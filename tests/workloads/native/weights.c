/* The native half of the truth workload: real loads, real memory, measured compute.
 *
 * Built twice: as libllama.so, whose exported names are llama.cpp's, so that uprobes on them work as they do on
 * the real library (struct arguments go by value and llama_batch has the real layout, so that a probe finds
 * n_tokens where it finds it there); and as libplain.so, the same code under names no profiler knows.
 * Stamps are CLOCK_MONOTONIC ns, kept per thread, taken inside the calls so that Python's own locks are not in them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef PLAIN_NAMES
#define API(name) plain_##name
#else
#define API(name) llama_##name
#endif
#define EXPORT __attribute__((visibility("default"), noinline, noclone, used))

enum { PAGE_BYTES = 4096, CHUNK_BYTES = 1 << 20, HEADER_BYTES = 64 << 10 };
enum load_mode { LOAD_MMAP, LOAD_POPULATE, LOAD_RANDOM, LOAD_READ, LOAD_PREAD, LOAD_DIRECT, LOAD_LAZY };

struct work_stamps {
    int64_t first_touch_ns, last_weight_ns; /* of this thread's last load */
    int64_t decode_begin_ns, decode_end_ns; /* of this thread's last decode */
};

/* More than 16 bytes, so that it goes on the stack and the path stays the first register argument. */
struct model_params {
    int32_t load_mode;
    int32_t header_only;
    int64_t reserved[4];
};

struct context_params {
    int64_t kv_bytes, init_ns, ns_per_token;
    int32_t busy;
    int32_t reserved;
};

/* llama.cpp's llama_batch. */
struct batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

struct model {
    unsigned char *base;
    size_t mapped_bytes, size_bytes;
    bool untouched;
};

struct context {
    struct model *model;
    void *kv;
    struct context_params params;
};

static __thread struct work_stamps stamps;
static volatile uint64_t sink;

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Busy time is counted on the thread's own CPU clock: under contention work takes longer, as work does. */
static void spend_busy(int64_t ns)
{
    int64_t end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + ns;
    uint64_t x = 88172645463325252u;

    while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
        for (int i = 0; i < 5000; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
    sink += x;
}

static void spend_asleep(int64_t ns)
{
    int64_t end_ns = clock_ns(CLOCK_MONOTONIC) + ns;
    struct timespec t = {end_ns / 1000000000, end_ns % 1000000000};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

EXPORT void work_spend(int64_t ns, int32_t busy)
{
    if (ns <= 0)
        return;
    if (busy)
        spend_busy(ns);
    else
        spend_asleep(ns);
}

EXPORT void work_stamps(struct work_stamps *out)
{
    *out = stamps;
}

static void touch_pages(const unsigned char *base, size_t bytes)
{
    uint64_t sum = 0;

    for (size_t at = 0; at < bytes; at += PAGE_BYTES)
        sum += *(const volatile unsigned char *)(base + at);
    sink += sum;
}

static void *anonymous(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return at == MAP_FAILED ? NULL : at;
}

static int load_mapped(struct model *m, int fd, enum load_mode mode)
{
    int flags = MAP_SHARED | (mode == LOAD_POPULATE ? MAP_POPULATE : 0);

    m->mapped_bytes = m->size_bytes;
    m->base = mmap(NULL, m->mapped_bytes, PROT_READ, flags, fd, 0);
    if (m->base == MAP_FAILED)
        return -1;
    if (mode == LOAD_RANDOM)
        madvise(m->base, m->mapped_bytes, MADV_RANDOM);
    m->untouched = mode == LOAD_LAZY;
    if (!m->untouched)
        touch_pages(m->base, m->size_bytes);
    return 0;
}

static int load_copied(struct model *m, int fd, enum load_mode mode)
{
    size_t done = 0;

    /* Whole chunks: O_DIRECT asks for aligned lengths, and the end of the file makes the last read short. */
    m->mapped_bytes = (m->size_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
    m->base = anonymous(m->mapped_bytes);
    if (!m->base)
        return -1;
    while (done < m->size_bytes) {
        ssize_t n = mode == LOAD_PREAD ? pread(fd, m->base + done, CHUNK_BYTES, (off_t)done)
                                       : read(fd, m->base + done, CHUNK_BYTES);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

static int load_header(int fd)
{
    static unsigned char header[HEADER_BYTES];

    return pread(fd, header, sizeof header, 0) > 0 ? 0 : -1;
}

static int load_weights(struct model *m, int fd, enum load_mode mode)
{
    int rc;

    stamps.first_touch_ns = clock_ns(CLOCK_MONOTONIC);
    rc = mode == LOAD_READ || mode == LOAD_PREAD || mode == LOAD_DIRECT ? load_copied(m, fd, mode)
                                                                        : load_mapped(m, fd, mode);
    stamps.last_weight_ns = clock_ns(CLOCK_MONOTONIC);
    return rc;
}

static int load_open(struct model *m, const char *path, const struct model_params *params)
{
    int direct = params->load_mode == LOAD_DIRECT && !params->header_only ? O_DIRECT : 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | direct);
    struct stat st;
    int rc = -1;

    if (fd < 0)
        return -1;
    if (fstat(fd, &st) == 0) {
        m->size_bytes = (size_t)st.st_size;
        rc = params->header_only ? load_header(fd) : load_weights(m, fd, params->load_mode);
    }
    close(fd);
    return rc;
}

EXPORT void API(model_free)(struct model *m)
{
    if (m->base && m->base != MAP_FAILED)
        munmap(m->base, m->mapped_bytes);
    free(m);
}

EXPORT struct model *API(model_load_from_file)(const char *path, struct model_params params)
{
    struct model *m = calloc(1, sizeof *m);

    if (!m || load_open(m, path, &params) == 0)
        return m;
    API(model_free)(m);
    return NULL;
}

EXPORT struct context *API(init_from_model)(struct model *m, struct context_params params)
{
    struct context *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->model = m;
    c->params = params;
    c->kv = params.kv_bytes > 0 ? anonymous((size_t)params.kv_bytes) : NULL;
    for (int64_t at = 0; c->kv && at < params.kv_bytes; at += PAGE_BYTES)
        ((volatile unsigned char *)c->kv)[at] = 1;
    work_spend(params.init_ns, params.busy);
    return c;
}

EXPORT void API(free)(struct context *c)
{
    if (c->kv)
        munmap(c->kv, (size_t)c->params.kv_bytes);
    free(c);
}

EXPORT int32_t API(decode)(struct context *c, struct batch batch)
{
    stamps.decode_begin_ns = clock_ns(CLOCK_MONOTONIC);
    if (c->model->untouched) {
        c->model->untouched = false;
        touch_pages(c->model->base, c->model->size_bytes);
    }
    work_spend(batch.n_tokens * c->params.ns_per_token, c->params.busy);
    stamps.decode_end_ns = clock_ns(CLOCK_MONOTONIC);
    return 0;
}
