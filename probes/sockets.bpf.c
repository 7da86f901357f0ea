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
#include "text.bpf.h"

#define AF_INET 2
#define AF_INET6 10
#define TCP_ESTABLISHED 1
#define TCP_SYN_RECV 3
#define TCP_CLOSE 7
#define TCP_LISTEN 10
#define MSG_PEEK 2
#define QUIET_BYTES 400 /* writes this big may close an answer: its statistics */

enum role { ROLE_UNKNOWN, ROLE_SERVER, ROLE_CLIENT, ROLE_OTHER };

struct conn {
	u64 arrival_ns; /* data waits unread since */
	u32 ports;	/* local << 16 | remote */
	u32 skipped;	/* bytes of quiet writes not reported yet */
	u8 role;
	u8 pad[7];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct conn);
} conns SEC(".maps");

/* Sockets in quiet, set by the collector, cleared by the next request. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, u32);
} quiet SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} listen_ports SEC(".maps");

static __always_inline u32 ports_of(const struct sock *sk)
{
	u16 family = BPF_CORE_READ(sk, __sk_common.skc_family);

	if (family != AF_INET && family != AF_INET6)
		return 0;
	u32 local = BPF_CORE_READ(sk, __sk_common.skc_num);
	u32 remote = __builtin_bswap16(BPF_CORE_READ(sk, __sk_common.skc_dport));
	return local << 16 | remote;
}

static __always_inline void conn_event(u16 kind, u64 sk, u32 ports, u16 flags)
{
	struct event *e = event_begin(kind, bpf_ktime_get_ns());

	if (!e)
		return;
	e->ino = sk;
	e->a = ports;
	e->flags = flags;
	event_end(e);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(sockets__state, const struct sock *sk, int before, int after)
{
	u64 key = (u64)sk;

	if (after == TCP_LISTEN) {
		u32 port = BPF_CORE_READ(sk, __sk_common.skc_num);
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
		u32 port = BPF_CORE_READ(sk, __sk_common.skc_num);

		if (!bpf_map_lookup_elem(&listen_ports, &port))
			return 0;
		struct conn fresh = {.ports = ports_of(sk)};
		bpf_map_update_elem(&conns, &key, &fresh, BPF_ANY);
		return 0;
	}
	struct conn *c = bpf_map_lookup_elem(&conns, &key);
	if (!c)
		return 0;
	if (c->role == ROLE_SERVER)
		conn_event(EVENT_CONN, key, c->ports, after);
	if (after == TCP_CLOSE) {
		bpf_map_delete_elem(&conns, &key);
		bpf_map_delete_elem(&quiet, &key);
	}
	return 0;
}

/* Data has come in, though the server may be too busy to read it for long. */
SEC("tp_btf/sk_data_ready")
int BPF_PROG(sockets__ready, const struct sock *sk)
{
	u64 key = (u64)sk;
	struct conn *c = bpf_map_lookup_elem(&conns, &key);

	if (c && c->role != ROLE_CLIENT && !c->arrival_ns)
		c->arrival_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline struct sock *fd_sock(u64 fd)
{
	struct file *file = fd_file(fd);

	if (file_mode(file) != MODE_SOCKET)
		return 0;
	struct socket *socket = BPF_CORE_READ(file, private_data);
	return BPF_CORE_READ(socket, sk);
}

static __always_inline struct conn *conn_of(struct sock *sk)
{
	u64 key = (u64)sk;
	struct conn *c = bpf_map_lookup_elem(&conns, &key);

	if (c)
		return c;
	struct conn fresh = {.ports = ports_of(sk)};
	bpf_map_update_elem(&conns, &key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&conns, &key);
}

enum looks { LOOKS_OTHER, LOOKS_REQUEST, LOOKS_RESPONSE, LOOKS_TLS };

/* By the first four bytes, as they lie in memory. */
static __always_inline u32 looks_like(u64 base, u64 length)
{
	u8 b[4] = {};

	if (length < 4 || bpf_probe_read_user(b, sizeof(b), (void *)base))
		return LOOKS_OTHER;
	u32 word = (u32)b[0] << 24 | b[1] << 16 | b[2] << 8 | b[3];
	switch (word) {
	case 0x504f5354: /* POST */
	case 0x47455420: /* GET_ */
	case 0x48454144: /* HEAD */
	case 0x50555420: /* PUT_ */
	case 0x44454c45: /* DELE */
	case 0x4f505449: /* OPTI */
	case 0x50524920: /* PRI_ : HTTP/2 */
		return LOOKS_REQUEST;
	case 0x48545450: /* HTTP */
		return LOOKS_RESPONSE;
	}
	return b[0] == 0x16 && b[1] == 3 ? LOOKS_TLS : LOOKS_OTHER;
}

static __always_inline void text_head(struct text *head, struct thread_slot *t, u64 sk, u16 kind,
				      u32 total)
{
	u64 id = bpf_get_current_pid_tgid();

	head->end_ns = bpf_ktime_get_ns();
	head->start_ns = t->enter_ns ? t->enter_ns : head->end_ns;
	head->key = sk;
	head->tid = (u32)id;
	head->tgid = id >> 32;
	head->kind = kind;
	head->total = total;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(sockets__receive, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();
	u32 call = settings.call_class[REGS_NR(regs) & 511];

	if (!t || ret <= 0)
		return 0;
	if (call == CALL_RECV && REGS_ARG3(regs) & MSG_PEEK)
		return 0;
	if (call == CALL_RECVMSG && REGS_ARG2(regs) & MSG_PEEK)
		return 0;
	struct sock *sk = fd_sock(REGS_ARG0(regs));
	struct conn *c = sk ? conn_of(sk) : 0;
	if (!c || c->role == ROLE_CLIENT)
		return 0;
	struct sending job = {};
	source_of(&job.src, regs, call);
	if (!source_advance(&job.src))
		return 0;
	u32 looks = looks_like(job.src.base, ret);
	u64 key = (u64)sk;
	if (looks == LOOKS_RESPONSE && c->role == ROLE_UNKNOWN) {
		c->role = ROLE_CLIENT;
		return 0;
	}
	if (looks == LOOKS_REQUEST || looks == LOOKS_TLS) {
		c->role = ROLE_SERVER;
		bpf_map_delete_elem(&quiet, &key);
	}
	if (c->role != ROLE_SERVER)
		return 0;
	text_head(&job.head, t, key, TEXT_RECEIVED, ret);
	/* When it arrived if that was seen; else when it was read: a blocked read
	 * began long before. */
	job.head.start_ns = c->arrival_ns ? c->arrival_ns : job.head.end_ns;
	job.head.dev = c->ports;
	c->arrival_ns = 0;
	send_text(&job);
	return 0;
}

/* In quiet, is this write still worth a look? A terminal chunk, or a big one. */
static __always_inline bool worth_a_look(u64 base, u64 length)
{
	u8 tail[5] = {};
	u8 head[8] = {};

	if (length >= QUIET_BYTES)
		return true;
	if (length >= 5 && !bpf_probe_read_user(tail, 5, (void *)(base + length - 5)) &&
	    tail[0] == '0' && tail[1] == '\r' && tail[2] == '\n' && tail[3] == '\r')
		return true;
	return length >= 8 && !bpf_probe_read_user(head, 8, (void *)base) && head[0] == 'd' &&
	       head[1] == 'a' && head[4] == ':' && head[6] == '[';
}

SEC("tp_btf/sys_exit")
int BPF_PROG(sockets__send, struct pt_regs *regs, long ret)
{
	struct thread_slot *t = current_slot();

	if (!t || ret <= 0)
		return 0;
	struct sock *sk = fd_sock(REGS_ARG0(regs));
	struct conn *c = sk ? conn_of(sk) : 0;
	/* Once a socket wrote what is no HTTP, its writes cost no second look; a request
	 * that it reads later still makes it a server's. */
	if (!c || c->role == ROLE_OTHER)
		return 0;
	struct sending job = {};
	source_of(&job.src, regs, settings.call_class[REGS_NR(regs) & 511]);
	if (!source_advance(&job.src))
		return 0;
	u64 key = (u64)sk;
	if (c->role != ROLE_SERVER) {
		u32 looks = looks_like(job.src.base, ret);

		if (looks == LOOKS_REQUEST) {
			c->role = ROLE_CLIENT;
			conn_event(EVENT_FORWARD, key, c->ports ? c->ports : ports_of(sk), 0);
		} else if (looks == LOOKS_RESPONSE && c->role == ROLE_UNKNOWN) {
			c->role = ROLE_SERVER; /* its request came before recording began */
		} else if (c->role == ROLE_UNKNOWN) {
			c->role = ROLE_OTHER;
		}
		if (c->role != ROLE_SERVER)
			return 0;
	}
	if (bpf_map_lookup_elem(&quiet, &key) && !worth_a_look(job.src.base, ret)) {
		c->skipped += ret;
		return 0;
	}
	text_head(&job.head, t, key, TEXT_SENT, ret);
	job.head.dev = c->ports;
	job.head.skipped = c->skipped;
	c->skipped = 0;
	send_text(&job);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(sockets__connection, struct pt_regs *regs, long ret)
{
	bool connecting = settings.call_class[REGS_NR(regs) & 511] == CALL_CONNECT;

	/* A non-blocking connect returns -EINPROGRESS (115). */
	if (ret < 0 && !(connecting && ret == -115))
		return 0;
	struct sock *sk = fd_sock(connecting ? REGS_ARG0(regs) : ret);
	if (!sk)
		return 0;
	u32 ports = ports_of(sk);
	if (ports)
		conn_event(connecting ? EVENT_CONNECT : EVENT_ACCEPT, (u64)sk, ports, 0);
	return 0;
}
