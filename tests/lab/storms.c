/* Workloads a profiler could slow down, each timed by itself.
 *
 * storms FILE: for each line on stdin (a name below) does the work once and prints how long it took,
 * in nanoseconds of CLOCK_MONOTONIC. FILE is read and mapped; keep it in the page cache, or not. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define FAULT_PAGES 65536
#define SWITCHES 20000
#define FORKS 300
#define DIRECT_READS 2000

static const char *path;
static volatile long sink;

static long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void fault_storm(void)
{
	char *at = mmap(0, (long)FAULT_PAGES * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	madvise(at, (long)FAULT_PAGES * PAGE, MADV_NOHUGEPAGE);
	for (long i = 0; i < FAULT_PAGES; i++)
		at[i * PAGE] = 1;
	munmap(at, (long)FAULT_PAGES * PAGE);
}

static void map_load(void)
{
	struct stat st;
	int fd = open(path, O_RDONLY);

	fstat(fd, &st);
	char *at = mmap(0, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	for (long i = 0; i < st.st_size; i += PAGE)
		sink += at[i];
	munmap(at, st.st_size);
	close(fd);
}

static void read_load(void)
{
	static char buffer[1 << 20];
	int fd = open(path, O_RDONLY);

	while (read(fd, buffer, sizeof(buffer)) > 0)
		sink += buffer[0];
	close(fd);
}

static void *echo(void *end)
{
	int fd = *(int *)end;
	char c;

	while (read(fd, &c, 1) == 1 && c)
		if (write(fd, &c, 1) != 1)
			break;
	return 0;
}

/* Two threads that hand one byte to and fro: two context switches a round. On one CPU: on two, a
 * round takes one time or three times as long, by what the scheduler makes of it. */
static void switch_storm(void)
{
	cpu_set_t all, one;
	pthread_t other;
	int ends[2];
	char c = 1;

	sched_getaffinity(0, sizeof(all), &all);
	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	sched_setaffinity(0, sizeof(one), &one);
	socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
	pthread_create(&other, 0, echo, &ends[1]);
	for (int i = 0; i < SWITCHES; i++)
		if (write(ends[0], &c, 1) != 1 || read(ends[0], &c, 1) != 1)
			break;
	c = 0;
	if (write(ends[0], &c, 1) == 1)
		pthread_join(other, 0);
	close(ends[0]);
	close(ends[1]);
	sched_setaffinity(0, sizeof(all), &all);
}

static void fork_storm(void)
{
	for (int i = 0; i < FORKS; i++) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		waitpid(child, 0, 0);
	}
}

static void drop_cache(void)
{
	int fd = open(path, O_RDONLY);

	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

/* One read under way at a time, each a page of its own. */
static void direct_load(void)
{
	static char buffer[PAGE] __attribute__((aligned(PAGE)));
	int fd = open(path, O_RDONLY | O_DIRECT);

	for (long i = 0; i < DIRECT_READS; i++)
		if (pread(fd, buffer, PAGE, i * PAGE) != PAGE)
			abort();
	close(fd);
}

static const struct {
	const char *name;
	void (*prepare)(void); /* not timed */
	void (*run)(void);
} workloads[] = {
	{"fault_storm", 0, fault_storm},   {"cold_map_load", drop_cache, map_load},
	{"map_load", 0, map_load},	   {"read_load", 0, read_load},
	{"direct_load", 0, direct_load},   {"switch_storm", 0, switch_storm},
	{"fork_storm", 0, fork_storm},
};

int main(int argc, char **argv)
{
	char line[64];

	if (argc != 2)
		return 2;
	path = argv[1];
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		for (unsigned i = 0; i < sizeof(workloads) / sizeof(*workloads); i++) {
			if (strcmp(line, workloads[i].name))
				continue;
			if (workloads[i].prepare)
				workloads[i].prepare();
			long began = now_ns();
			workloads[i].run();
			printf("%ld\n", now_ns() - began);
			fflush(stdout);
		}
	}
	return 0;
}
