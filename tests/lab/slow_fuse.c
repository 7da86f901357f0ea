/* A FUSE file system of one file, `model` (or `model.` and anything), whose storage has the delay and
 * the rate it is told.
 *
 *   slow_fuse MOUNTPOINT SIZE_BYTES DELAY_US BYTES_PER_SECOND [ANSWERS [direct_io]]
 *
 * It speaks the protocol itself (linux/fuse.h), so that the numbers are its own: a read is answered
 * DELAY after a link of that rate has carried its bytes, one read after the other; the delays of
 * several overlap. After ANSWERS reads it answers none. With `direct_io` the kernel is told to cache
 * nothing of it. It prints "ready" when mounted, and when its stdin ends it unmounts and prints a line
 * "offset size" for every read it answered. Its file is a pattern that a reader can check: each 8 bytes
 * hold their own offset.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PAGES = 32, BUFFER = (MAX_PAGES << 12) + 65536, PENDING = 4096, SERVED = 1 << 20 };
enum { MODEL_NODE = 2 };

struct waiting {
    int64_t due_ns;
    uint64_t unique, offset;
    uint32_t size;
};

static struct waiting pending[PENDING]; /* in the order they fall due */
static unsigned first, last;
static struct {
    uint64_t offset;
    uint32_t size;
} served[SERVED];
static unsigned served_count, answers = UINT32_MAX;
static int64_t delay_ns, link_free_ns, size_bytes, bytes_per_second;
static int device;
static int unmounted; /* by somebody else */
static uint32_t open_flags = FOPEN_KEEP_CACHE;

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void reply(uint64_t unique, int error, const void *body, size_t length)
{
    struct fuse_out_header head = {.len = sizeof(head) + length, .error = -error, .unique = unique};
    struct iovec parts[2] = {{&head, sizeof(head)}, {(void *)body, length}};

    /* The reader may have been killed meanwhile: ENOENT. */
    if (writev(device, parts, length ? 2 : 1) < 0 && errno != ENOENT)
        die("reply");
}

static void fill_attributes(struct fuse_attr *attr, uint64_t node)
{
    memset(attr, 0, sizeof(*attr));
    attr->ino = node;
    attr->nlink = 1;
    attr->blksize = 4096;
    attr->mode = node == MODEL_NODE ? S_IFREG | 0444 : S_IFDIR | 0555;
    attr->size = node == MODEL_NODE ? size_bytes : 0;
    attr->blocks = attr->size / 512;
}

static void answer_init(uint64_t unique, const struct fuse_init_in *in)
{
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION,
        .minor = in->minor < FUSE_KERNEL_MINOR_VERSION ? in->minor : FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = 4 << 20,
        .flags = FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_BIG_WRITES,
        .max_background = 64,
        .congestion_threshold = 48,
        .max_write = MAX_PAGES << 12,
        .time_gran = 1,
        .max_pages = MAX_PAGES,
    };

    reply(unique, 0, &out, sizeof(out));
}

static void answer_lookup(uint64_t unique, const char *name)
{
    struct fuse_entry_out out = {.nodeid = MODEL_NODE, .entry_valid = 3600, .attr_valid = 3600};

    if (strncmp(name, "model", 5) || (name[5] && name[5] != '.')) {
        reply(unique, ENOENT, NULL, 0);
        return;
    }
    fill_attributes(&out.attr, MODEL_NODE);
    reply(unique, 0, &out, sizeof(out));
}

static void answer_attributes(uint64_t unique, uint64_t node)
{
    struct fuse_attr_out out = {.attr_valid = 3600};

    fill_attributes(&out.attr, node);
    reply(unique, 0, &out, sizeof(out));
}

static void take_read(uint64_t unique, const struct fuse_read_in *in)
{
    int64_t now = now_ns(), left = size_bytes - (int64_t)in->offset;
    uint32_t size = left <= 0 ? 0 : in->size < left ? in->size : left;

    if (answers == 0)
        return;
    answers--;
    link_free_ns = (link_free_ns > now ? link_free_ns : now) + size * INT64_C(1000000000) / bytes_per_second;
    pending[last++ % PENDING] =
        (struct waiting){.due_ns = link_free_ns + delay_ns, .unique = unique, .offset = in->offset, .size = size};
}

static void answer_due(void)
{
    static uint64_t data[MAX_PAGES << 9];

    while (first != last && pending[first % PENDING].due_ns <= now_ns()) {
        struct waiting *w = &pending[first++ % PENDING];

        for (uint32_t i = 0; i < (w->size + 7) / 8; i++)
            data[i] = w->offset + i * 8;
        if (served_count < SERVED) {
            served[served_count].offset = w->offset;
            served[served_count++].size = w->size;
        }
        reply(w->unique, 0, data, w->size);
    }
}

static void take_request(void)
{
    static char buffer[BUFFER];
    struct fuse_in_header *in = (void *)buffer;
    void *body = in + 1;

    if (read(device, buffer, sizeof(buffer)) < 0) {
        unmounted = errno == ENODEV;
        if (!unmounted && errno != EAGAIN && errno != EINTR && errno != ENOENT)
            die("read");
        return;
    }
    switch (in->opcode) {
    case FUSE_INIT:
        answer_init(in->unique, body);
        break;
    case FUSE_LOOKUP:
        answer_lookup(in->unique, body);
        break;
    case FUSE_GETATTR:
        answer_attributes(in->unique, in->nodeid);
        break;
    case FUSE_OPEN:
    case FUSE_OPENDIR: {
        struct fuse_open_out out = {.fh = 1, .open_flags = open_flags};
        reply(in->unique, 0, &out, sizeof(out));
        break;
    }
    case FUSE_READ:
        take_read(in->unique, body);
        break;
    case FUSE_STATFS: { /* overlayfs asks how long names may be */
        struct fuse_statfs_out out = {.st = {.bsize = 4096, .namelen = 255}};
        reply(in->unique, 0, &out, sizeof(out));
        break;
    }
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_FLUSH:
    case FUSE_ACCESS:
        reply(in->unique, 0, NULL, 0);
        break;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        break; /* these want no answer */
    default:
        reply(in->unique, ENOSYS, NULL, 0);
    }
}

static void serve(void)
{
    struct pollfd polled[2] = {{.fd = device, .events = POLLIN}, {.fd = 0, .events = POLLIN}};

    while (!unmounted && !(polled[1].revents & (POLLHUP | POLLIN | POLLERR))) {
        int64_t left = first == last ? INT64_C(100000000) : pending[first % PENDING].due_ns - now_ns();
        struct timespec wait = {0, left > 0 ? left % INT64_C(1000000000) : 0};

        if (ppoll(polled, 2, &wait, NULL) < 0 && errno != EINTR)
            die("poll");
        answer_due();
        if (polled[0].revents)
            take_request();
        answer_due();
    }
}

int main(int argc, char **argv)
{
    char options[128];

    if (argc < 5)
        return 2;
    size_bytes = atoll(argv[2]);
    delay_ns = atoll(argv[3]) * 1000;
    bytes_per_second = atoll(argv[4]);
    if (argc > 5)
        answers = strtoul(argv[5], NULL, 10);
    if (argc > 6)
        open_flags = FOPEN_DIRECT_IO;
    prctl(PR_SET_TIMERSLACK, 1);
    /* Its delay is to be its own, not that of waiting for a core; where it may not, it does without. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (device < 0)
        die("/dev/fuse");
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%d",
             device, MAX_PAGES << 12);
    if (mount("slow", argv[1], "fuse.slow", MS_NOSUID | MS_NODEV | MS_RDONLY, options))
        die("mount");
    puts("ready");
    fflush(stdout);
    serve();
    umount2(argv[1], MNT_DETACH);
    for (unsigned i = 0; i < served_count; i++)
        printf("%llu %u\n", (unsigned long long)served[i].offset, served[i].size);
    return 0;
}
