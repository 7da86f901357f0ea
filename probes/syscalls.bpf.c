// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The one pair of hooks on system calls. It drops calls of no interest by a
 * table, strangers by membership, and hands the rest to the handler that files,
 * sockets or logs put into the dispatch array; a missing handler is no error.
 */
#include "sockets.bpf.h"

static __always_inline u32 class_of(s64 nr)
{
	return nr >= 0 && nr < 512 ? settings.call_class[nr & 511] : CALL_NONE;
}

/* The end of a Unix socket, with its last holder; the states of a TCP socket tell theirs. */
static __always_inline void note_close(struct file *file)
{
	if (file_mode(file) != MODE_SOCKET || file_is_shared(file))
		return;
	struct sock *sk = file_sock(file);
	u64 key = (u64)sk;
	struct conn *c = bpf_map_lookup_elem(&conns, &key);

	if (c && PEEK(struct sock, sk, __sk_common.skc_family) == AF_UNIX)
		conn_gone(key, c);
}

TRACEPOINT(sys_enter)
int BPF_PROG(syscalls__enter, struct pt_regs *regs, long nr)
{
	u32 call = class_of(nr);

	if (call == CALL_NONE)
		return 0;
	struct thread_slot *t = current_slot();
	if (!t)
		return 0;
	if (call == CALL_CLOSE)
		note_close(fd_file(REGS_ARG0(regs)));
	else
		t->enter_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline u32 read_handler(u64 fd)
{
	u16 mode = file_mode(fd_file(fd));

	if (mode == MODE_REGULAR)
		return HANDLE_FILE_READ;
	return mode == MODE_SOCKET ? HANDLE_RECEIVE : HANDLERS;
}

static __always_inline u32 write_handler(u64 fd)
{
	if (fd == 1 || fd == 2)
		return HANDLE_LOG;
	return file_mode(fd_file(fd)) == MODE_SOCKET ? HANDLE_SEND : HANDLERS;
}

static __always_inline u32 handler_of(u32 call, u64 fd)
{
	switch (call) {
	case CALL_OPEN:
	case CALL_OPENAT:
		return HANDLE_OPEN;
	case CALL_MMAP:
		return HANDLE_MMAP;
	case CALL_MUNMAP:
		return HANDLE_MUNMAP;
	case CALL_MADVISE:
	case CALL_FADVISE:
	case CALL_READAHEAD:
		return HANDLE_ADVISE;
	case CALL_READ:
	case CALL_READV:
	case CALL_PREAD:
	case CALL_PREADV:
		return read_handler(fd);
	case CALL_RECV:
	case CALL_RECVMSG:
		return HANDLE_RECEIVE;
	case CALL_WRITE:
	case CALL_WRITEV:
		return write_handler(fd);
	case CALL_SEND:
	case CALL_SENDMSG:
		return HANDLE_SEND;
	case CALL_ACCEPT:
	case CALL_CONNECT:
		return HANDLE_CONNECTION;
	case CALL_IOCTL:
		return file_mode(fd_file(fd)) == MODE_CHAR ? HANDLE_DEVICE : HANDLERS;
	}
	return HANDLERS;
}

TRACEPOINT(sys_exit)
int BPF_PROG(syscalls__exit, struct pt_regs *regs, long ret)
{
	u32 call = class_of(REGS_NR(regs));

	if (call == CALL_NONE || !current_slot())
		return 0;
	u32 handler = handler_of(call, REGS_ARG0(regs));
	if (handler < HANDLERS)
		bpf_tail_call(ctx, &handlers, handler);
	return 0;
}
