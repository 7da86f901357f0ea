// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reads of the target's files over SMB, from the making of the request until its
 * data is here; of that, the time from sending to the head of the answer.
 *
 * The hooks name a file by the server's handle only. The thread that makes the
 * request tells the inode: by its descriptor if it is in a read call, else by the
 * pages it has just put into the cache; from then on the handle stands for it. The
 * command's number, that the answer comes back with, follows on the same thread.
 */
#include "remote.bpf.h"

#define SMB2_READ 8

struct smb_handle {
	u64 handle;
	u64 session;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct smb_handle);
	__type(value, struct file_key);
} smb_files SEC(".maps");

/* The read that a thread has made and not sent yet. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u64);
	__type(value, struct remote_key);
} smb_making SEC(".maps");

/* Commands on their way; the key's `what` is the command's number. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, REMOTE_REQUESTS);
	__type(key, struct smb_handle);
	__type(value, struct remote_key);
} smb_sent SEC(".maps");

static __always_inline bool on_smb(struct inode *inode)
{
	u64 magic = inode ? BPF_CORE_READ(inode, i_sb, s_magic) : 0;

	return magic == MAGIC_SMB2 || magic == MAGIC_CIFS;
}

static __always_inline struct inode *inode_being_read(struct task_struct *task)
{
	s64 nr = task_syscall(task);
	u32 call = nr >= 0 && nr < 512 ? settings.call_class[nr & 511] : CALL_NONE;

	if (call != CALL_READ && call != CALL_PREAD && call != CALL_READV && call != CALL_PREADV)
		return 0;
	struct pt_regs *regs = task_regs(task);
	struct file *file = fd_file(REGS_ARG0(regs));
	return file ? file_cache_inode(file) : 0;
}

static __always_inline bool tell_file(struct smb_handle *handle, struct inode_facts *file)
{
	struct thread_slot *t = current_slot();
	struct file_key *known = 0;

	if (t) {
		struct inode *inode = inode_being_read(current_task());

		if (on_smb(inode)) {
			inode_read(inode, file);
		} else {
			file->ino = t->file_ino;
			file->dev = t->file_dev;
		}
		struct file_key key = {.ino = file->ino, .dev = file->dev};
		bpf_map_update_elem(&smb_files, handle, &key, BPF_ANY);
		return true;
	}
	known = bpf_map_lookup_elem(&smb_files, handle);
	if (!known)
		return false;
	file->ino = known->ino;
	file->dev = known->dev;
	return true;
}

static __always_inline int make(u64 handle, u64 session, u64 offset, u32 bytes)
{
	struct smb_handle which = {.handle = handle, .session = session};
	struct remote_key key = {.what = handle, .where = session, .offset = offset};
	struct inode_facts file = {};
	u64 id = bpf_get_current_pid_tgid();

	if (!tell_file(&which, &file))
		return 0;
	remote_begin(&key, &file, offset, bytes, REMOTE_SMB);
	bpf_map_update_elem(&smb_making, &id, &key, BPF_ANY);
	return 0;
}

static __always_inline int read_ends(u64 handle, u64 session, u64 offset, u32 bytes, u16 flags)
{
	struct remote_key key = {.what = handle, .where = session, .offset = offset};

	remote_end(&key, bytes, flags);
	return 0;
}

/* Two shapes of each hook: 6.10 put the identity of the netfs request before the
 * rest. The loader keeps the one with as many arguments as here. */
TRACEPOINT(smb3_read_enter)
int BPF_PROG(smb__make, u32 xid, u64 handle, u32 tree, u64 session, u64 offset, u32 bytes)
{
	return make(handle, session, offset, bytes);
}

TRACEPOINT(smb3_read_enter)
int BPF_PROG(smb__make_netfs, u32 request, u32 part, u32 xid, u64 handle, u32 tree, u64 session,
	     u64 offset, u32 bytes)
{
	return make(handle, session, offset, bytes);
}

TRACEPOINT(smb3_read_done)
int BPF_PROG(smb__done, u32 xid, u64 handle, u32 tree, u64 session, u64 offset, u32 bytes)
{
	return read_ends(handle, session, offset, bytes, 0);
}

TRACEPOINT(smb3_read_done)
int BPF_PROG(smb__done_netfs, u32 request, u32 part, u32 xid, u64 handle, u32 tree, u64 session,
	     u64 offset, u32 bytes)
{
	return read_ends(handle, session, offset, bytes, 0);
}

TRACEPOINT(smb3_read_err)
int BPF_PROG(smb__failed, u32 xid, u64 handle, u32 tree, u64 session, u64 offset, u32 bytes, int error)
{
	return read_ends(handle, session, offset, 0, REMOTE_FAILED);
}

TRACEPOINT(smb3_read_err)
int BPF_PROG(smb__failed_netfs, u32 request, u32 part, u32 xid, u64 handle, u32 tree, u64 session,
	     u64 offset, u32 bytes, int error)
{
	barrier_var(error); /* so that a kernel that does not pass it refuses this form */
	return read_ends(handle, session, offset, 0, REMOTE_FAILED);
}

TRACEPOINT(smb3_cmd_enter)
int BPF_PROG(smb__sent, u32 tree, u64 session, u16 command, u64 number)
{
	u64 id = bpf_get_current_pid_tgid();

	if (command != SMB2_READ)
		return 0;
	struct remote_key *making = bpf_map_lookup_elem(&smb_making, &id);
	if (!making)
		return 0;
	struct remote_key key = *making;
	struct smb_handle sent = {.handle = number, .session = session};
	struct remote_request *r = bpf_map_lookup_elem(&remotes, &key);
	bpf_map_delete_elem(&smb_making, &id);
	if (!r)
		return 0;
	r->sent_ns = bpf_ktime_get_ns();
	r->times_sent++;
	bpf_map_update_elem(&smb_sent, &sent, &key, BPF_ANY);
	return 0;
}

TRACEPOINT(smb3_cmd_done)
int BPF_PROG(smb__answered, u32 tree, u64 session, u16 command, u64 number)
{
	struct smb_handle sent = {.handle = number, .session = session};

	if (command != SMB2_READ)
		return 0;
	struct remote_key *key = bpf_map_lookup_elem(&smb_sent, &sent);
	if (!key)
		return 0;
	struct remote_request *r = bpf_map_lookup_elem(&remotes, key);
	if (r) {
		r->queue_ns += r->sent_ns - r->start_ns;
		r->wire_ns += bpf_ktime_get_ns() - r->sent_ns;
	}
	bpf_map_delete_elem(&smb_sent, &sent);
	return 0;
}

/* A server grants credits, one for each 64 KiB that may be asked for. Of fewer than nine the
 * client takes none: it asks for 64 KiB, and waits for a credit before it sends that. */
TRACEPOINT(smb3_wait_credits)
int BPF_PROG(smb__starved, u64 number, u64 connection, char *host, int credits, int taken, int in_flight)
{
	if (taken || !current_slot())
		return 0;
	struct event *e = event_begin(EVENT_REMOTE_STARVED, bpf_ktime_get_ns());
	if (!e)
		return 0;
	e->flags = REMOTE_SMB;
	e->a = credits;
	e->b = in_flight;
	event_end(e);
	return 0;
}
