// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The target's HTTP sockets: when a request reached one, what the server read
 * and answered, who was connected to whom.
 *
 * A connection shows its role by its first bytes: a request read makes the
 * target its server, a request written its client. Only what a server reads and
 * writes is copied out; once the collector has seen the first token it asks for
 * quiet, and small writes are then only counted.
 */
#include "sockets.bpf.h"

#define TCP_ESTABLISHED 1
#define TCP_NAGLE_OFF 1
#define TCP_SYN_RECV 3
#define TCP_LISTEN 10
#define MSG_OOB 1
#define MSG_PEEK 2
#define MSG_ERRQUEUE 0x2000
#define NOT_THE_STREAM (MSG_OOB | MSG_PEEK | MSG_ERRQUEUE)

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} listen_ports SEC(".maps");

/* Addresses of Unix sockets that the target took connections from: their next
 * connections are known before they are accepted. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 256);
	__type(key, u64);
	__type(value, u32);
} unix_listeners SEC(".maps");

static __always_inline u16 family_of(const struct sock *sk)
{
	return PEEK(struct sock, sk, __sk_common.skc_family);
}

static __always_inline u32 ports_of(const struct sock *sk)
{
	u16 family = family_of(sk);

	if (family != AF_INET && family != AF_INET6)
		return 0;
	u32 local = PEEK(struct sock, sk, __sk_common.skc_num);
	u32 remote = __builtin_bswap16(PEEK(struct sock, sk, __sk_common.skc_dport));
	return local << 16 | remote;
}

static __always_inline u64 unix_address_of(const struct sock *sk)
{
	const struct unix_sock *unix_sock = (const struct unix_sock *)sk;

	if (!bpf_core_field_exists(unix_sock->addr) || family_of(sk) != AF_UNIX)
		return 0;
	return (u64)PEEK(struct unix_sock, sk, addr);
}

TRACEPOINT(inet_sock_set_state)
int BPF_PROG(sockets__state, const struct sock *sk, int before, int after)
{
	u64 key = (u64)sk;

	if (after == TCP_LISTEN) {
		u32 port = PEEK(struct sock, sk, __sk_common.skc_num);
		u32 tgid = bpf_get_current_pid_tgid() >> 32;

		if (!current_slot())
			return 0;
		bpf_map_update_elem(&listen_ports, &port, &tgid, BPF_ANY);
		struct event *e = event_begin(EVENT_LISTEN, bpf_ktime_get_ns());
		if (e) {
			e->a = port;
			event_end(e);
		}
		return 0;
	}
	if (before == TCP_SYN_RECV && after == TCP_ESTABLISHED) {
		u32 port = PEEK(struct sock, sk, __sk_common.skc_num);

		if (!bpf_map_lookup_elem(&listen_ports, &port))
			return 0;
		struct conn fresh = {.ports = ports_of(sk), .accepted = 1};
		bpf_map_update_elem(&conns, &key, &fresh, BPF_ANY);
		return 0;
	}
	struct conn *c = bpf_map_lookup_elem(&conns, &key);
	if (!c)
		return 0;
	struct held_back *h = bpf_map_lookup_elem(&held, &key);
	if (h) /* closing sends what is left */
		has_left(key, h);
	if (after == TCP_CLOSE)
		conn_gone(key, c);
	else if (c->role == ROLE_SERVER)
		conn_event(EVENT_CONN, key, c->ports, after, 0);
	return 0;
}

/* Data has come in, though the server may be too busy to read it for long. */
static __always_inline int ready(const struct sock *sk)
{
	u64 key = (u64)sk;
	struct conn *c = bpf_map_lookup_elem(&conns, &key);

	if (c) {
		if (c->role != ROLE_CLIENT && !c->arrival_ns)
			c->arrival_ns = bpf_ktime_get_ns();
		return 0;
	}
	u64 address = unix_address_of(sk);
	if (!address || !bpf_map_lookup_elem(&unix_listeners, &address) || !unix_peer(sk))
		return 0;
	/* Not accepted yet, so it has no inode either. */
	struct conn fresh = {.arrival_ns = bpf_ktime_get_ns(), .accepted = 1};
	bpf_map_update_elem(&conns, &key, &fresh, BPF_NOEXIST);
	return 0;
}

TRACEPOINT(sk_data_ready)
int BPF_PROG(sockets__ready, const struct sock *sk)
{
	return ready(sk);
}

/* Before 6.3. */
ON_ENTRY(sock_def_readable, sockets__ready)
{
	return ready((const struct sock *)first);
}

/* The connection behind a socket's file. An entry whose inode is another's was left
 * by a socket whose end was not seen. */
static __always_inline struct conn *conn_of(struct file *file, u64 *key)
{
	if (file_mode(file) != MODE_SOCKET)
		return 0;
	struct sock *sk = file_sock(file);
	u64 inode = PEEK(struct file, file, f_inode, i_ino);
	struct conn *c;

	*key = (u64)sk;
	if (!sk)
		return 0;
	c = bpf_map_lookup_elem(&conns, key);
	if (c && !c->inode)
		c->inode = inode;
	if (c && c->inode == inode)
		return c;
	if (c)
		conn_gone(*key, c);
	struct conn fresh = {.ports = ports_of(sk), .inode = inode};
	bpf_map_update_elem(&conns, key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&conns, key);
}

#define ACK_SEQ_OFFSET 8 /* RFC 9293, 3.1 */

static __always_inline bool is_sent(const struct tcp_sock *tcp, u32 seq)
{
	return (s32)(PEEK(struct tcp_sock, tcp, snd_nxt) - seq) >= 0;
}

/* A segment has come in. What was held back leaves once all before it is acknowledged. */
TRACEPOINT(tcp_probe)
int BPF_PROG(sockets__acknowledged, const struct sock *sk, struct sk_buff *skb)
{
	u64 key = (u64)sk;
	struct held_back *h = bpf_map_lookup_elem(&held, &key);
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;
	u32 acknowledged = 0;

	if (!h)
		return 0;
	bpf_probe_read_kernel(&acknowledged, sizeof(acknowledged),
			      BPF_CORE_READ(skb, data) + ACK_SEQ_OFFSET);
	if (__builtin_bswap32(acknowledged) == PEEK(struct tcp_sock, tcp, snd_nxt) || is_sent(tcp, h->end_seq))
		has_left(key, h);
	return 0;
}

/* Whether the kernel holds all of this write back, though it may send. */
static __always_inline bool is_held_back(const struct sock *sk, u32 total)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	return family_of(sk) != AF_UNIX &&
	       !(BPF_CORE_READ_BITFIELD_PROBED(tcp, nonagle) & TCP_NAGLE_OFF) &&
	       PEEK(struct tcp_sock, tcp, write_seq) - PEEK(struct tcp_sock, tcp, snd_nxt) >= total;
}

/* After the record of a write: waits for the moment at which it leaves, which may have
 * passed meanwhile. */
static __always_inline void follow_held(u64 key, struct conn *c, struct text *head)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)key;
	struct held_back *h = 0;

	if (head->kind == TEXT_SENT_HELD) {
		struct held_back fresh = {.start_ns = head->start_ns,
					  .end_seq = PEEK(struct tcp_sock, tcp, write_seq),
					  .ports = c->ports};
		bpf_map_update_elem(&held, &key, &fresh, BPF_NOEXIST);
	}
	h = bpf_map_lookup_elem(&held, &key);
	if (h && is_sent(tcp, h->end_seq))
		has_left(key, h);
}

enum looks { LOOKS_OTHER, LOOKS_REQUEST, LOOKS_RESPONSE, LOOKS_TLS, LOOKS_STREAM };

static __always_inline bool is_hex(u32 byte)
{
	return byte - '0' < 10 || (byte | 0x20) - 'a' < 6;
}

/* The first four bytes of a chunk: the digits of its size, then the end of a line. */
static __always_inline bool is_chunk(u32 word)
{
	bool told = is_hex(word >> 24);

	for (s32 shift = 16; shift >= 0 && told; shift -= 8) {
		u32 byte = word >> shift & 0xff;

		if (byte == '\r')
			return true;
		told = is_hex(byte);
	}
	return told;
}

/* A function of its own, so that the verifier does not follow each word through all
 * that comes after. */
__noinline u32 looks_like(u32 word)
{
	switch (word) {
	case 0x504f5354: /* POST */
	case 0x47455420: /* GET_ */
	case 0x48454144: /* HEAD */
	case 0x50555420: /* PUT_ */
	case 0x50415443: /* PATC */
	case 0x44454c45: /* DELE */
	case 0x4f505449: /* OPTI */
	case 0x434f4e4e: /* CONN */
	case 0x50524920: /* PRI_ : HTTP/2 */
		return LOOKS_REQUEST;
	case 0x48545450: /* HTTP */
		return LOOKS_RESPONSE;
	}
	if (word >> 16 == 0x1603)
		return LOOKS_TLS;
	/* data, even(t:), a JSON object, a chunk: the middle of an answer */
	if (word == 0x64617461 || word == 0x6576656e || word >> 16 == 0x7b22 || is_chunk(word))
		return LOOKS_STREAM;
	return LOOKS_OTHER;
}

static long next_byte(u32 index, void *unused)
{
	struct sending *job = the_sending();
	u8 byte = 0;

	if (!job || job->have >= 4 || !job->ahead_bytes || !source_advance(&job->ahead))
		return 1;
	if (!job->ahead.left) /* an empty buffer of a vector */
		return 0;
	if (bpf_probe_read_user(&byte, 1, (void *)job->ahead.base))
		return 1;
	job->word = job->word << 8 | byte;
	job->have++;
	job->ahead.base++;
	job->ahead.left--;
	job->ahead_bytes--;
	return 0;
}

LOOPED(next_byte, 8)

/* What of the first four bytes one buffer has, without a call a byte. */
static __always_inline void look_at(struct sending *job)
{
	u8 bytes[4] = {};
	u64 n = 4 - job->have;

	if (job->have >= 4)
		return;
	if (n > job->ahead_bytes)
		n = job->ahead_bytes;
	if (bpf_probe_read_user(bytes, n & 7, (void *)job->ahead.base))
		return;
	for (u32 i = 0; i < 4; i++)
		if (i < n)
			job->word = job->word << 8 | bytes[i];
	job->have += n;
}

/* Gathers the first four bytes, over reads and buffers, after those there are. */
static __always_inline void look_ahead(struct sending *job, u64 length, u32 word, u32 have)
{
	job->ahead = job->src;
	job->ahead_bytes = length;
	job->word = word;
	job->have = have;
	if (job->src.vector)
		LOOP(8, next_byte, 0);
	else
		look_at(job);
}

static __always_inline u32 begins_like(struct sending *job, u64 length)
{
	look_ahead(job, length, 0, 0);
	return job->have == 4 ? looks_like(job->word) : LOOKS_OTHER;
}

static __always_inline void text_head(struct text *head, struct thread_slot *t, u64 key, u16 kind,
				      struct conn *c, u32 total)
{
	u64 id = bpf_get_current_pid_tgid();

	head->end_ns = bpf_ktime_get_ns();
	head->start_ns = t->enter_ns ? t->enter_ns : head->end_ns;
	head->key = key;
	head->tid = (u32)id;
	head->tgid = id >> 32;
	head->dev = c->ports;
	head->kind = kind;
	head->flags = c->turn;
	head->total = total;
}

/* Whether more has come in than was read; what is left arrived no later. */
static __always_inline bool has_unread(const struct sock *sk)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	return family_of(sk) != AF_UNIX &&
	       PEEK(struct tcp_sock, tcp, rcv_nxt) != PEEK(struct tcp_sock, tcp, copied_seq);
}

/* Something was read on a server's connection: stamps the record, begins a turn. */
static __always_inline void received(struct text *head, struct thread_slot *t, u64 key,
				     struct conn *c, u32 total)
{
	end_quiet(key, c);
	c->turn++;
	text_head(head, t, key, TEXT_RECEIVED, c, total);
	/* When it arrived if that was seen; else when it was read: a blocked read
	 * began long before. */
	head->start_ns = c->arrival_ns ? c->arrival_ns : head->end_ns;
	if (!has_unread((const struct sock *)key))
		c->arrival_ns = 0;
}

/* Sets the role by the first four bytes, however they are read; says whether these
 * are for the collector. */
static __always_inline bool settle_role(struct conn *c, struct sending *job, u64 length)
{
	look_ahead(job, length, c->first, c->firsts);
	c->first = job->word;
	c->firsts = job->have;
	if (job->have < 4)
		return c->role == ROLE_UNKNOWN;
	u32 looks = looks_like(job->word);
	c->firsts = 0;
	c->first = 0;
	if (looks == LOOKS_RESPONSE && c->role == ROLE_UNKNOWN)
		c->role = ROLE_CLIENT;
	else if (looks == LOOKS_REQUEST || looks == LOOKS_TLS)
		c->role = ROLE_SERVER;
	return c->role == ROLE_SERVER;
}

TRACEPOINT(sys_exit)
int BPF_PROG(sockets__receive, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	u32 call = settings.call_class[REGS_NR(regs) & 511];
	u64 key = 0;

	if (!t || ret <= 0)
		return 0;
	if (call == CALL_RECV && REGS_ARG3(regs) & NOT_THE_STREAM)
		return 0;
	if (call == CALL_RECVMSG && REGS_ARG2(regs) & NOT_THE_STREAM)
		return 0;
	struct conn *c = conn_of(fd_file(REGS_ARG0(regs)), &key);
	if (!c || c->role == ROLE_CLIENT)
		return 0;
	struct sending *job = sending_begin(regs, call);
	if (!job || (c->role != ROLE_SERVER && !settle_role(c, job, ret)))
		return 0;
	received(&job->head, t, key, c, ret);
	send_text();
	return 0;
}

struct keeping {
	u8 *bytes;
};

static long keep_piece(u32 index, struct keeping *to)
{
	struct sending *job = the_sending();

	if (!job || !job->ahead_bytes || !source_advance(&job->ahead))
		return 1;
	u64 n = job->ahead.left < job->ahead_bytes ? job->ahead.left : job->ahead_bytes;
	if (bpf_probe_read_user(to->bytes + (job->kept & (TAIL_BYTES - 1)), n & (TAIL_BYTES - 1),
				(void *)job->ahead.base))
		return 1;
	job->kept += n;
	job->ahead_bytes -= n;
	job->ahead.left = 0;
	return 0;
}

LOOPED(keep_piece, 8)

/* Keeps a small write of a quiet, in place of the oldest; false if it ends the quiet:
 * too big, a response's head, or the last chunk. */
static __always_inline bool keep(struct tail *q, struct conn *c, struct thread_slot *t,
				 u64 key, struct sending *job, u32 total)
{
	struct kept_text *kept = &q->writes[q->held & (TAIL_WRITES - 1)];
	u8 *bytes = kept->bytes;
	struct keeping to = {.bytes = bytes};
	u64 id = bpf_get_current_pid_tgid();

	if (total >= TAIL_BYTES)
		return false;
	if (q->held >= TAIL_WRITES)
		c->skipped += kept->head.total;
	job->ahead = job->src;
	job->ahead_bytes = total;
	job->kept = 0;
	LOOP(8, keep_piece, &to);
	u32 length = job->kept;
	kept->head.start_ns = t->enter_ns;
	kept->head.key = key;
	kept->head.tid = (u32)id;
	kept->head.tgid = id >> 32;
	kept->head.dev = c->ports;
	kept->head.kind = TEXT_SENT;
	kept->head.total = total;
	kept->head.length = length;
	q->held++;
	if (length >= 4 && bytes[0] == 'H' && bytes[1] == 'T' && bytes[2] == 'T' && bytes[3] == 'P')
		return false;
	u8 *end = bytes + ((length - 5) & (TAIL_BYTES - 1));
	return length < 5 || end[0] != '0' || end[1] != '\r' || end[2] != '\n' || end[3] != '\r';
}

/* Whether the write was taken care of by the connection's quiet. */
static __always_inline bool kept_quiet(u64 key, struct conn *c, struct thread_slot *t,
				       struct sending *job, u32 total)
{
	struct tail *q = bpf_map_lookup_elem(&quiet, &key);

	if (!q)
		return false;
	if ((u16)q->turn != c->turn) { /* asked for too late: that answer is over */
		bpf_map_delete_elem(&quiet, &key);
		return false;
	}
	u32 held = q->held;
	if (keep(q, c, t, key, job, total))
		return true;
	bool kept = q->held != held;
	/* Handed over under the old turn, so that the collector does not ask anew, and put
	 * another tail in this one's place, before that is done. */
	end_quiet(key, c);
	c->turn++;
	return kept;
}

/* Whether the target took this connection: it has the port, or the address, of a listener. */
static __always_inline bool is_served(const struct sock *sk)
{
	u32 port = PEEK(struct sock, sk, __sk_common.skc_num);

	if (family_of(sk) == AF_UNIX)
		return unix_address_of(sk) != 0;
	return bpf_map_lookup_elem(&listen_ports, &port) != 0;
}

/* The role of a socket whose first bytes seen are its own: what it answers was asked
 * before recording began, or it is the one that asks. */
static __always_inline u32 role_by_writing(const struct sock *sk, u32 looks)
{
	if (looks == LOOKS_RESPONSE)
		return ROLE_SERVER;
	if (looks == LOOKS_TLS)
		return ROLE_CLIENT;
	if (!is_served(sk))
		return ROLE_OTHER;
	/* What cannot be told yet is looked at again: a head may have been written before. */
	return looks == LOOKS_STREAM ? ROLE_SERVER : ROLE_UNKNOWN;
}

TRACEPOINT(sys_exit)
int BPF_PROG(sockets__send, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	u64 key = 0;

	if (!t || ret <= 0)
		return 0;
	struct conn *c = conn_of(fd_file(REGS_ARG0(regs)), &key);
	/* Once a socket wrote what is no HTTP, its writes cost no second look; a request
	 * that it reads later still makes it a server's. */
	if (!c || c->role == ROLE_OTHER)
		return 0;
	struct sending *job = sending_begin(regs, settings.call_class[REGS_NR(regs) & 511]);
	if (!job || (c->role == ROLE_SERVER && kept_quiet(key, c, t, job, ret)))
		return 0;
	u32 looks = begins_like(job, ret);
	if (c->role != ROLE_SERVER) {
		if (looks == LOOKS_REQUEST) {
			c->role = ROLE_CLIENT;
			conn_event(EVENT_FORWARD, key, c->ports, 0,
				   (u64)unix_peer((const struct sock *)key));
		} else if (c->role == ROLE_UNKNOWN) {
			c->role = role_by_writing((const struct sock *)key, looks);
		}
		if (c->role != ROLE_SERVER)
			return 0;
	}
	if (looks == LOOKS_RESPONSE)
		c->turn++;
	u16 kind = is_held_back((const struct sock *)key, ret) ? TEXT_SENT_HELD : TEXT_SENT;
	text_head(&job->head, t, key, kind, c, ret);
	job->head.skipped = c->skipped;
	c->skipped = 0;
	send_text();
	follow_held(key, c, &job->head);
	return 0;
}

/* Whether a handler sees this transfer's bytes. Those of sendfile, splice and
 * io_uring never lie in a buffer that a system call names. */
static __always_inline bool is_seen(struct task_struct *task)
{
	s64 nr = task_syscall(task);

	if (FIELD(task, flags) & PF_IO_WORKER || nr < 0)
		return false;
	switch (settings.call_class[nr & 511]) {
	case CALL_READ:
	case CALL_READV:
	case CALL_RECVMSG:
	case CALL_WRITE:
	case CALL_WRITEV:
	case CALL_SENDMSG:
	case CALL_RECV:
	case CALL_SEND:
		return true;
	}
	return false;
}

/* A server's connection that moved bytes unseen, or 0. */
static __always_inline struct conn *unseen(const struct sock *sk, int ret, int flags)
{
	u64 key = (u64)sk;

	/* Nearly every transfer of anybody is seen, and leaves here. */
	if (ret <= 0 || flags & NOT_THE_STREAM || is_seen(current_task()) ||
	    !current_slot())
		return 0;
	struct conn *c = bpf_map_lookup_elem(&conns, &key);
	if (c && c->role == ROLE_UNKNOWN && c->accepted)
		c->role = ROLE_SERVER;
	return c && c->role == ROLE_SERVER ? c : 0;
}

static __always_inline void send_unseen(struct text *head)
{
	text_output(head, sizeof(*head), head->kind);
}

TRACEPOINT(sock_send_length)
int BPF_PROG(sockets__unseen_send, const struct sock *sk, int ret, int flags)
{
	struct conn *c = unseen(sk, ret, flags);
	struct thread_slot *t = c ? current_slot() : 0;
	struct text head = {};

	if (!c || !t)
		return 0;
	end_quiet((u64)sk, c);
	text_head(&head, t, (u64)sk, TEXT_SENT, c, ret);
	head.start_ns = head.end_ns; /* the call may have begun long before */
	head.skipped = c->skipped;
	c->skipped = 0;
	send_unseen(&head);
	return 0;
}

TRACEPOINT(sock_recv_length)
int BPF_PROG(sockets__unseen_receive, const struct sock *sk, int ret, int flags)
{
	struct conn *c = unseen(sk, ret, flags);
	struct thread_slot *t = c ? current_slot() : 0;
	struct text head = {};

	if (!c || !t)
		return 0;
	received(&head, t, (u64)sk, c, ret);
	send_unseen(&head);
	return 0;
}

TRACEPOINT(sys_exit)
int BPF_PROG(sockets__connection, struct pt_regs *regs, long ret)
{
	bool connecting = settings.call_class[REGS_NR(regs) & 511] == CALL_CONNECT;
	u64 key = 0;

	/* A non-blocking connect returns -EINPROGRESS (115). */
	if (ret < 0 && !(connecting && ret == -115))
		return 0;
	struct file *file = fd_file(connecting ? REGS_ARG0(regs) : ret);
	if (file_mode(file) != MODE_SOCKET)
		return 0;
	struct sock *sk = file_sock(file);
	u32 ports = ports_of(sk);
	if (!ports && family_of(sk) != AF_UNIX)
		return 0;
	if (!connecting) {
		u64 address = unix_address_of(sk);
		u32 tgid = bpf_get_current_pid_tgid() >> 32;
		struct conn *c = conn_of(file, &key);

		if (address)
			bpf_map_update_elem(&unix_listeners, &address, &tgid, BPF_ANY);
		if (c)
			c->accepted = 1;
	}
	conn_event(connecting ? EVENT_CONNECT : EVENT_ACCEPT, (u64)sk, ports, 0,
		   (u64)unix_peer(sk));
	return 0;
}
