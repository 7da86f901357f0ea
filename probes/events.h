/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Every record and shared value that crosses from the kernel to the collector.
 *
 * This header is the contract: collector/ttftprof/events.py mirrors it as numpy
 * dtypes and a test compares both against the objects' BTF, so that drift fails.
 * All stamps are CLOCK_MONOTONIC nanoseconds (bpf_ktime_get_ns).
 */
#pragma once

/* `struct event` is 56 bytes so that, behind the ring buffer's 8-byte header, a
 * record is 64: records never wrap, and the mapped ring is one numpy array. */
struct event {
	u64 start_ns;
	u64 duration_ns; /* 0 for an instant */
	u32 tid;
	u32 tgid;
	u16 kind;  /* enum event_kind */
	u16 flags; /* meaning by kind */
	u32 dev;   /* kernel dev_t: major << 20 | minor */
	u64 ino;
	u64 a;
	u64 b;
};

enum event_kind {
	EVENT_NONE = 0,
	EVENT_FORK = 1,		/* tid/tgid = child; a = parent tgid, b = parent tid; flags bit 0 = a worker of io_uring */
	EVENT_EXEC = 2,		/* flags bit 0 = taken in as a successor; a text record carries the name */
	EVENT_THREAD_END = 3,	/* a = min_flt, b = maj_flt, ino = CPU ns, duration = time tracked */
	EVENT_PROCESS_EXIT = 4, /* a = wait status */
	EVENT_SIGNAL = 5,	/* to tid/tgid; flags = signal; a = sender tgid */
	EVENT_OFFCPU = 6,	/* flags = enum wait_reason; dev/ino = file waited for; a = syscall number or -1 */
	EVENT_OPEN = 7,		/* a = size_bytes, b = cached pages, flags bit 0 = O_DIRECT */
	EVENT_MMAP = 8,		/* a = length, b = address or -errno, flags = enum mmap_flag */
	EVENT_MUNMAP = 9,	/* a = length, b = address */
	EVENT_MADVISE = 10,	/* a = length, b = address, flags = advice */
	EVENT_FADVISE = 11,	/* a = length, b = offset, flags = advice */
	EVENT_READ = 12,	/* a = bytes, b = offset, flags = enum read_flag */
	EVENT_TOUCH = 13,	/* first page-cache activity on a file after 4 jiffies of none: a = jiffies now */
	EVENT_BLOCK = 14,	/* start = issued; a = bytes, b = sector, flags = in flight at issue; dev = disk, ino = file or 0 */
	EVENT_LISTEN = 15,	/* a = port */
	EVENT_CONN = 16,	/* ino = socket, a = local port << 16 | remote port (0: Unix), flags = TCP state */
	EVENT_FORWARD = 17,	/* target sent a request as a client: ino = socket, a = ports, b = the far socket (Unix) */
	EVENT_MARK_ENTER = 18,	/* uprobe: flags = mark id, a and b = arguments */
	EVENT_MARK_EXIT = 19,	/* uprobe return: flags = mark id, a = return value */
	EVENT_CONNECT = 20,	/* the target opened a connection: ino = socket, a = ports, b = the far socket (Unix) */
	EVENT_ACCEPT = 21,	/* the target took a connection: ino = socket, a = ports, b = the far socket (Unix) */
	EVENT_HELD = 22,	/* mapped or open when recording began: a = size_bytes, b = cached pages, flags bit 0 = open; the recorder makes one of many and puts how often into the bits above */
	EVENT_REMOTE = 23,	/* one read asked of a server or daemon: start = handed over, flags = enum remote_flag, a = bytes asked << 32 | got, b = offset, dev/ino = file */
	EVENT_REMOTE_SPLIT = 24, /* of the REMOTE with its start, tid and file: duration = sent to answered, a = ns before it was sent, b = number of the connection that carried it, plus one (0: unknown) << 48 | ns in all by its transport's own count, flags = times sent */
	EVENT_REMOTE_STARVED = 25, /* no credit to send with: flags = enum remote_flag, a = credits left, b = requests in flight */
	EVENT_DEVICE = 26, /* a GPU's device file: flags = enum device_flag, dev = its number or 0, a = ioctl number, b = result or -errno */
};

/* Why a thread was off the CPU. The order is that of the short-wait counters. */
enum wait_reason {
	WAIT_RUNNABLE = 0, /* preempted or yielded: it wanted the CPU */
	WAIT_STORAGE = 1,
	WAIT_LOCK = 2,
	WAIT_TIMER = 3,
	WAIT_NETWORK = 4, /* socket, poll, epoll */
	WAIT_CHILD = 5,
	WAIT_PIPE = 6,
	WAIT_DEVICE = 7,
	WAIT_RECLAIM = 8,
	WAIT_OTHER = 9,
	WAIT_REASONS = 10,
};

enum mmap_flag {
	MMAP_POPULATE = 1 << 0,
	MMAP_EXEC = 1 << 1,
	MMAP_FAILED = 1 << 2,
	MMAP_WRITE = 1 << 3,
};

/* Whose device file, in the low bits; without DEVICE_IOCTL it was opened. */
enum device_flag {
	DEVICE_NVIDIA = 1,
	DEVICE_KFD = 2,
	DEVICE_DRI = 3,
	DEVICE_FAMILY = 0xf,
	DEVICE_IOCTL = 1 << 4,
};

enum cache_flag {
	CACHE_WRITE = 1 << 0,
	CACHE_MISSING = 1 << 1,
};

enum read_flag {
	READ_DIRECT = 1 << 0,
	READ_IO_URING = 1 << 1,
	READ_RUN = 1 << 2, /* small ones that follow each other, as one: b is right if they were in order */
};

/* Who was asked, in the low bits, and how it went. */
enum remote_flag {
	REMOTE_NFS = 1,
	REMOTE_SMB = 2,
	REMOTE_FUSE = 3,
	REMOTE_NETFS = 4, /* 9P, Ceph, AFS */
	REMOTE_FAMILY = 0xf,
	REMOTE_FAILED = 1 << 4,
	REMOTE_UNANSWERED = 1 << 5, /* when recording ended; set by the collector */
	REMOTE_DIRECT = 1 << 6,	    /* past the page cache */
};

/* A read that waits for its answer. What the collector finds of these at the end
 * was never answered. */
struct remote_request {
	u64 start_ns;
	u64 sent_ns;
	u64 queue_ns;
	u64 wire_ns;
	u64 execute_ns;
	u64 ino;
	u64 offset;
	u32 dev;
	u32 bytes;
	u32 tid;
	u32 tgid;
	u16 flags; /* enum remote_flag */
	u16 times_sent;
	u16 connection;
	u16 pad;
};

/* Where a process must run to be taken for the target's successor: the name of its
 * control group or of one of those above it; "" for anywhere. */
struct successor {
	char cgroup[64];
} __attribute__((aligned(8)));

/* What a sampled tick found a thread doing on the CPU. */
enum cpu_mode {
	CPU_USER = 0,
	CPU_FAULT = 1, /* kernel, under handle_mm_fault */
	CPU_KERNEL = 2,
	CPU_MODES = 3,
};

/* One per tracked thread, in a mapped array: the collector reads it in place.
 * Only its own thread writes it, so no field needs an atomic. A thread that ends
 * sends its slot whole through the ring `ends`: it may have lived for less than
 * the time between two looks. */
struct thread_slot {
	u32 tid;
	u32 tgid;
	u64 since_ns; /* tracked since; changes when the slot is reused; 0 = free */
	u64 off_ns;   /* start of the present off-CPU interval, 0 while running */
	u32 off_reason;
	s32 off_syscall;
	u32 file_dev; /* file whose pages this thread last asked for */
	u32 enter_nr; /* system call in progress that a handler waits for */
	u64 file_ino;
	u64 enter_ns;
	u64 cpu_ns; /* CPU time of the task, as of its last switch or sample */
	u64 min_flt;
	u64 maj_flt;
	u64 file_faults; /* faults that reached the file system's fault handler */
	u64 map_arounds; /* faults served by mapping cached pages around the address */
	u64 opens;
	u64 mmaps;
	u64 forks;
	u64 short_ns[10]; /* off-CPU time in intervals too short for a record, by reason */
	u32 short_count[10];
	u32 samples[3]; /* by enum cpu_mode */
	u32 pad;
	u64 asked_what; /* the remote read it asked for last: its key */
	u64 asked_where;
	u64 asked_offset;
};

/* One per file of interest. Several CPUs add to it: atomics. */
struct file_slot {
	u32 dev;
	u32 pad;
	u64 ino;
	u64 since_ns; /* 0 = free */
	u64 size_bytes;
	u64 cached_pages;  /* in the page cache, as of the last change or open */
	u64 added_pages;   /* entered the cache because a tracked thread asked */
	u64 foreign_pages; /* entered the cache because somebody else asked */
	u64 evicted_pages;
	u64 reads;
	u64 read_bytes;
	u64 direct_bytes; /* of read_bytes, those past the cache */
	u64 sequential_reads;
	u64 next_offset;
	u64 faults;
	u64 map_arounds;
	u64 opens;
	u64 mmaps;
	u64 short_wait_ns; /* waits for its pages too short for a record */
	u64 touch_jiffies; /* last page-cache activity; jiffies cost no clock read */
	u64 readahead_asks; /* times a remote file system was asked to read ahead */
	u64 readahead_pages;
	u64 reclaimed_pages; /* of evicted_pages, those taken because memory was short */
	u64 refaulted_pages; /* of added_pages, those evicted before, while this file was followed */
	u64 run_bytes; /* of small reads since run_start_ns, not yet an event */
	u64 run_start_ns;
	u64 run_end_ns;
};

/* A record of variable length in the text ring. */
struct text {
	u64 start_ns;
	u64 end_ns;
	u64 key; /* socket, or inode number */
	u32 tid;
	u32 tgid;
	u32 dev;
	u16 kind; /* enum text_kind */
	u16 flags;   /* of RECEIVED and SENT: the connection's turn */
	u32 total;   /* bytes of the whole transfer */
	u32 offset;  /* of this piece in it */
	u32 skipped; /* bytes of earlier transfers on this socket that were only counted */
	u32 length;  /* bytes that follow; 0 of RECEIVED and SENT: moved without a buffer to look into */
};

enum text_kind {
	TEXT_PATH = 1,	  /* key/dev name the file, skipped = descriptor of the folder it starts from */
	TEXT_EXEC = 2,
	TEXT_RECEIVED = 3, /* start = when the data reached the socket */
	TEXT_SENT = 4,
	TEXT_LOG = 5, /* flags = descriptor */
	TEXT_CACHE = 6, /* a file of a kernel cache was opened: flags = enum cache_flag, skipped = its size */
	TEXT_SENT_HELD = 7, /* as SENT, of which the kernel has sent nothing yet */
	TEXT_LEFT = 8,	    /* what was held on this socket, the first at start, left it at end */
};

enum text_size {
	TEXT_PIECE = 4096,
	TEXT_PIECES = 16,
	PATH_BYTES = 1024,
};

/* Losses, counted where they happen. */
enum lost {
	LOST_EVENTS = 0,
	LOST_TEXTS = 1,
	LOST_THREADS = 2,
	LOST_FILES = 3,
	LOST_BLOCK = 4,
	LOST_REMOTE = 5,
	LOST_ENDS = 6, /* counters of threads that ended */
	LOST_URING = 7,
	LOST_KINDS = 8,
};

/* One mapped page of state that both sides see. */
struct control {
	u32 threads_used;
	u32 files_used;
	u64 lost[8];
	u64 events; /* records written */
	u64 texts;
	u64 block_bytes; /* read by requests of tracked files and threads */
	u64 block_requests;
};

/* Classes of system calls; the table that gives each number its class is data
 * of the collector, so nothing here depends on an architecture. */
enum syscall_class {
	CALL_NONE = 0,
	CALL_OPEN = 1,	 /* path in argument 0 */
	CALL_OPENAT = 2, /* path in argument 1 */
	CALL_MMAP = 3,
	CALL_MUNMAP = 4,
	CALL_MADVISE = 5,
	CALL_FADVISE = 6,
	CALL_READAHEAD = 7,
	CALL_READ = 8,	  /* fd, buffer, length */
	CALL_READV = 9,	  /* fd, vector, count */
	CALL_RECVMSG = 10,
	CALL_WRITE = 11,
	CALL_WRITEV = 12,
	CALL_SENDMSG = 13,
	CALL_ACCEPT = 14,
	CALL_CONNECT = 15,
	CALL_PREAD = 16,
	CALL_PREADV = 17,
	CALL_RECV = 18,
	CALL_SEND = 19,
	CALL_IOCTL = 20,
	CALL_CLOSE = 21,
	CALL_URING = 22,
	CALL_PWRITE = 23,
	CALL_CLASSES = 24,
};

/* Entries of the dispatch array: one handler each, filled by whoever loaded. */
enum handler {
	HANDLE_OPEN = 0,
	HANDLE_MMAP = 1,
	HANDLE_MUNMAP = 2,
	HANDLE_ADVISE = 3,
	HANDLE_FILE_READ = 4,
	HANDLE_RECEIVE = 5,
	HANDLE_SEND = 6,
	HANDLE_LOG = 7,
	HANDLE_CONNECTION = 8,
	HANDLE_DEVICE = 9,
	HANDLERS = 16,
};

/* Set by the collector between open and load. */
struct settings {
	u64 short_wait_ns;   /* off-CPU intervals below this are summed, not recorded */
	u64 min_file_bytes;  /* smaller files are not followed one by one */
	u64 fault_begin;     /* address range of handle_mm_fault; 0 = unknown */
	u64 fault_end;
	u32 own_tgid;	     /* the recorder itself is never a target */
	u32 ring_bytes;
	u8 call_class[512];  /* enum syscall_class by system call number */
	u8 call_wait[512];   /* enum wait_reason of a block in that call */
};
