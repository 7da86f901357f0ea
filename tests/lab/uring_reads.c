/* Reads COUNT blocks of a file through io_uring, one at a time, by the raw system calls.
 *
 * uring_reads FILE COUNT BYTES [fixed] [poll] [late] [worker]: waits for a line on stdin, reads,
 * prints the bytes read, waits for the end of stdin. Block i starts at i * BYTES.
 *   fixed   the file is a registered one
 *   poll    a thread of the kernel polls for submissions; no system call is made for a read
 *   worker  every read is done by a worker thread
 *   late    the ring is made only after the line on stdin
 *   idle    before it reads, it waits in the ring for the first line on stdin, as a server for a
 *           connection */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool given(int argc, char **argv, const char *word)
{
	for (int i = 4; i < argc; i++)
		if (!strcmp(argv[i], word))
			return true;
	return false;
}

static void *map_ring(int fd, size_t size, off_t what)
{
	void *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);

	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return at;
}

int main(int argc, char **argv)
{
	struct io_uring_params p;
	char line[16];
	long total = 0;

	bool fixed = given(argc, argv, "fixed"), poll = given(argc, argv, "poll");
	bool late = given(argc, argv, "late"), worker = given(argc, argv, "worker");

	if (argc < 4)
		return 2;
	int count = atoi(argv[2]), bytes = atoi(argv[3]);
	char *buffer = malloc(bytes);
	int file = open(argv[1], O_RDONLY);
	if (late) {
		printf("ready\n");
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			return 0;
	}
	memset(&p, 0, sizeof(p));
	p.flags = poll ? IORING_SETUP_SQPOLL : 0;
	p.sq_thread_idle = 1000;
	int ring = syscall(__NR_io_uring_setup, 4, &p);
	if (fixed && syscall(__NR_io_uring_register, ring, IORING_REGISTER_FILES, &file, 1) < 0) {
		perror("register");
		return 1;
	}
	if (file < 0 || ring < 0 || !buffer) {
		perror("setup");
		return 1;
	}
	char *sq = map_ring(ring, p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
	char *cq = map_ring(ring, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe),
			    IORING_OFF_CQ_RING);
	struct io_uring_sqe *sqes =
		map_ring(ring, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
	unsigned *tail = (unsigned *)(sq + p.sq_off.tail), *array = (unsigned *)(sq + p.sq_off.array);
	unsigned sq_mask = *(unsigned *)(sq + p.sq_off.ring_mask);
	unsigned *head = (unsigned *)(cq + p.cq_off.head);
	unsigned cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
	struct io_uring_cqe *cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);

	unsigned *flags = (unsigned *)(sq + p.sq_off.flags), *ready = (unsigned *)(cq + p.cq_off.tail);

	if (given(argc, argv, "idle")) {
		struct io_uring_sqe *sqe = &sqes[*tail & sq_mask];

		printf("ready\n");
		fflush(stdout);
		memset(sqe, 0, sizeof(*sqe));
		sqe->opcode = IORING_OP_POLL_ADD;
		sqe->poll32_events = POLLIN;
		array[*tail & sq_mask] = *tail & sq_mask;
		__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
		syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0);
		__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
		if (!fgets(line, sizeof(line), stdin))
			return 0;
	} else if (!late) {
		printf("ready\n");
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			return 0;
	}
	for (int i = 0; i < count; i++) {
		unsigned slot = *tail & sq_mask;
		struct io_uring_sqe *sqe = &sqes[slot];

		memset(sqe, 0, sizeof(*sqe));
		sqe->opcode = IORING_OP_READ;
		sqe->fd = fixed ? 0 : file;
		sqe->flags = (fixed ? IOSQE_FIXED_FILE : 0) | (worker ? IOSQE_ASYNC : 0);
		sqe->addr = (unsigned long)buffer;
		sqe->len = bytes;
		sqe->off = (unsigned long long)i * bytes;
		array[slot] = slot;
		__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
		if (poll) {
			if (__atomic_load_n(flags, __ATOMIC_SEQ_CST) & IORING_SQ_NEED_WAKEUP)
				syscall(__NR_io_uring_enter, ring, 0, 0, IORING_ENTER_SQ_WAKEUP, 0, 0);
			while (__atomic_load_n(ready, __ATOMIC_ACQUIRE) == *head)
				usleep(100);
		} else if (syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) {
			perror("enter");
			return 1;
		}
		unsigned at = __atomic_load_n(head, __ATOMIC_ACQUIRE);
		if (cqes[at & cq_mask].res > 0)
			total += cqes[at & cq_mask].res;
		__atomic_store_n(head, at + 1, __ATOMIC_RELEASE);
	}
	printf("%ld\n", total);
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin))
		;
	return 0;
}
