/* What is recorded in the VM: reads files as told and says when, with the kernel's counters around it.
 *
 *   reader steps OUT STEP...     a STEP is NAME,PATH,MODE,READAHEAD_KIB; MODE: read, small, mmap, serve, map,
 *                                or some (every 32nd page, advised as random)
 *   reader serve PATH PORT       loads PATH as a server would, then listens
 *   reader map PATH PORT         the same by a map
 *   reader patch PATH PORT       the same by a private map, of which every page is written to
 *   reader hang PATH             reads a bit every 20 ms, for ever
 *
 * A step waits until its file is there. Before it the file's pages are dropped and the mount's readahead
 * is set. OUT/NAME.before and .after hold /proc/self/mountstats, .shares.before and .shares.after
 * /proc/fs/cifs/Stats; a line of JSON goes to OUT/steps.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20, SMALL_BYTES = 16 << 10, PAGE_BYTES = 4096 };

static char buffer[CHUNK_BYTES];
static volatile char sink;

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

static int open_model(const char *path)
{
    int fd = open(path, O_RDONLY);

    if (fd < 0)
        die(path);
    return fd;
}

static void copy(const char *from, const char *out, const char *name, const char *end)
{
    char path[512];
    int in, to;
    ssize_t n;

    snprintf(path, sizeof(path), "%s/%s.%s", out, name, end);
    in = open(from, O_RDONLY);
    to = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (to < 0)
        die(path);
    while (in >= 0 && (n = read(in, buffer, sizeof(buffer))) > 0)
        if (write(to, buffer, n) != n)
            die(path);
    close(in);
    close(to);
}

static void read_all(const char *path, size_t chunk_bytes)
{
    int fd = open_model(path);
    ssize_t n;

    while ((n = read(fd, buffer, chunk_bytes)) > 0)
        sink += buffer[n - 1];
    if (n < 0)
        die("read");
    close(fd);
}

static void map_all(const char *path, int every_pages, int advice)
{
    int fd = open_model(path);
    struct stat st;
    char *base;

    fstat(fd, &st);
    base = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        die("mmap");
    madvise(base, st.st_size, advice);
    for (off_t at = 0; at < st.st_size; at += every_pages * PAGE_BYTES)
        sink += base[at];
    munmap(base, st.st_size);
    close(fd);
}

/* Each page is copied in a fault of its own, be it in the page cache or not. */
static void patch_all(const char *path)
{
    int fd = open_model(path);
    struct stat st;
    char *base;

    fstat(fd, &st);
    base = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (base == MAP_FAILED)
        die("mmap");
    madvise(base, st.st_size, MADV_NOHUGEPAGE);
    for (off_t at = 0; at < st.st_size; at += PAGE_BYTES)
        base[at]++;
    close(fd);
}

static void prepare(const char *path, const char *readahead_kib)
{
    int fd, to;
    char bdi[128];
    struct stat st;

    while (access(path, R_OK))
        usleep(100000);
    fd = open_model(path);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    fstat(fd, &st);
    snprintf(bdi, sizeof(bdi), "/sys/class/bdi/%u:%u/read_ahead_kb", major(st.st_dev), minor(st.st_dev));
    to = open(bdi, O_WRONLY);
    if (to < 0 || write(to, readahead_kib, strlen(readahead_kib)) < 0)
        perror(bdi); /* SMB's has another name; what counts is what the sizes show */
    close(to);
    close(fd);
}

static int serve(const char *how, const char *path, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    int s = socket(AF_INET, SOCK_STREAM, 0);

    usleep(100000);
    if (!strcmp(how, "patch"))
        patch_all(path);
    else if (!strcmp(how, "map"))
        map_all(path, 1, MADV_NORMAL);
    else
        read_all(path, CHUNK_BYTES);
    usleep(50000);
    if (bind(s, (void *)&at, sizeof(at)) || listen(s, 1))
        die("listen");
    usleep(300000);
    return 0;
}

static void serve_in_child(const char *self, const char *how, const char *path)
{
    pid_t child = fork();

    if (child == 0) {
        execl(self, self, how, path, "18080", NULL);
        die(self);
    }
    waitpid(child, NULL, 0);
}

static void step(const char *self, const char *out, char *text)
{
    char *name = strtok(text, ","), *path = strtok(NULL, ","), *mode = strtok(NULL, ",");
    char *readahead_kib = strtok(NULL, ","), lines[512];
    int64_t start_ns;
    int n, fd;

    prepare(path, readahead_kib);
    copy("/proc/self/mountstats", out, name, "before");
    copy("/proc/fs/cifs/Stats", out, name, "shares.before");
    start_ns = now_ns();
    if (!strcmp(mode, "mmap"))
        map_all(path, 1, MADV_NORMAL);
    else if (!strcmp(mode, "some"))
        map_all(path, 32, MADV_RANDOM);
    else if (!strcmp(mode, "serve") || !strcmp(mode, "map"))
        serve_in_child(self, mode, path);
    else
        read_all(path, !strcmp(mode, "small") ? SMALL_BYTES : CHUNK_BYTES);
    n = snprintf(lines, sizeof(lines),
                 "{\"name\": \"%s\", \"path\": \"%s\", \"mode\": \"%s\", \"readahead_kib\": %s, "
                 "\"start_ns\": %lld, \"end_ns\": %lld}\n",
                 name, path, mode, readahead_kib, (long long)start_ns, (long long)now_ns());
    copy("/proc/self/mountstats", out, name, "after");
    copy("/proc/fs/cifs/Stats", out, name, "shares.after");
    snprintf(buffer, sizeof(buffer), "%s/steps", out);
    fd = open(buffer, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0 || write(fd, lines, n) != n)
        die("steps");
    close(fd);
}

static void hang(const char *path)
{
    int fd = open_model(path);

    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* what was read ahead could be read on */
    for (;;) {
        if (read(fd, buffer, SMALL_BYTES) <= 0)
            lseek(fd, 0, SEEK_SET);
        usleep(20000);
    }
}

int main(int argc, char **argv)
{
    if (argc > 3 && (!strcmp(argv[1], "serve") || !strcmp(argv[1], "map") || !strcmp(argv[1], "patch")))
        return serve(argv[1], argv[2], atoi(argv[3]));
    if (argc > 2 && !strcmp(argv[1], "hang"))
        hang(argv[2]);
    for (int i = 3; i < argc; i++)
        step(argv[0], argv[2], argv[i]);
    sleep(2); /* what lies under the last file is looked up while somebody has it mounted */
    return 0;
}
