/* Reads COUNT blocks of a file through io_uring, one at a time, by the raw system calls.
 *
 * uring_reads FILE COUNT BYTES: waits for a line on stdin, reads, prints the bytes read, waits for
 * the end of stdin. Block i starts at i * BYTES. */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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

	if (argc != 4)
		return 2;
	int count = atoi(argv[2]), bytes = atoi(argv[3]);
	char *buffer = malloc(bytes);
	int file = open(argv[1], O_RDONLY);
	memset(&p, 0, sizeof(p));
	int ring = syscall(__NR_io_uring_setup, 4, &p);
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

	printf("ready\n");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return 0;
	for (int i = 0; i < count; i++) {
		unsigned slot = *tail & sq_mask;
		struct io_uring_sqe *sqe = &sqes[slot];

		memset(sqe, 0, sizeof(*sqe));
		sqe->opcode = IORING_OP_READ;
		sqe->fd = file;
		sqe->addr = (unsigned long)buffer;
		sqe->len = bytes;
		sqe->off = (unsigned long long)i * bytes;
		array[slot] = slot;
		__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
		if (syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) {
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
