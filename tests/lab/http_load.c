/*
 * Many streamed answers at once, over loopback, to hold the tap against.
 *
 *   http_load serve TOKENS GAP_US WAIT_MS  prints its port, then a line a request
 *   http_load ask PORT STREAMS REQUESTS    prints a line a request
 *
 * Lines: the client's port, then CLOCK_MONOTONIC ns. The server: before and after
 * it sent the first token, the last one likewise. The client: when it sent, and
 * when the first token had arrived. One thread each, epoll, keep-alive. Each
 * answer waits WAIT_MS to 11 times that, then streams TOKENS small chunks GAP_US apart, a usage
 * chunk of vLLM's size, [DONE] and the last chunk, a write each.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNS 4096

struct conn {
	int fd;
	int port;
	int step; /* server: next write of the answer, -1: none; client: requests left */
	long due_ns, sent_ns, first_ns, sent_by_ns, first_by_ns;
	char in[8192];
	int filled;
};

static struct conn conns[MAX_CONNS];
static int used;

static long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void no_delay(int fd)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static int watch(int epoll, int fd, struct conn *c)
{
	struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};

	return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e);
}

static void send_chunk(struct conn *c, const char *text)
{
	char out[1024];
	int n = snprintf(out, sizeof(out), "%zx\r\n%s\r\n", strlen(text), text);

	if (send(c->fd, out, n, MSG_NOSIGNAL) != n)
		die("send");
}

static const char HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
			   "Transfer-Encoding: chunked\r\n\r\n";
static const char LAST[] = "0\r\n\r\n";
#define EVENT "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\"," \
	      "\"created\":1766000000,\"model\":\"m\",\"choices\":["

/* One write of the answer. */
static void answer(struct conn *c, int tokens, long gap_ns)
{
	int step = c->step++;

	c->due_ns = now_ns() + (step == 0 ? 0 : gap_ns);
	if (step == 0) {
		if (send(c->fd, HEAD, sizeof(HEAD) - 1, MSG_NOSIGNAL) < 0)
			die("send");
		send_chunk(c, EVENT "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n");
	} else if (step <= tokens) {
		long ns = now_ns();
		send_chunk(c, EVENT "{\"index\":0,\"delta\":{\"content\":\"CANARY-answer\"}}]}\n\n");
		c->sent_ns = ns;
		c->sent_by_ns = now_ns();
		if (step == 1) {
			c->first_ns = c->sent_ns;
			c->first_by_ns = c->sent_by_ns;
		}
	} else if (step == tokens + 1) {
		char usage[400];
		snprintf(usage, sizeof(usage),
			 EVENT "],\"usage\":{\"prompt_tokens\":17,\"total_tokens\":%d,"
			       "\"completion_tokens\":%d}}\n\n",
			 17 + tokens, tokens);
		send_chunk(c, usage);
		send_chunk(c, "data: [DONE]\n\n");
		if (send(c->fd, LAST, sizeof(LAST) - 1, MSG_NOSIGNAL) < 0)
			die("send");
		printf("%d %ld %ld %ld %ld\n", c->port, c->first_ns, c->first_by_ns, c->sent_ns,
		       c->sent_by_ns);
		c->step = -1;
	}
}

static struct conn *unused_conn(void)
{
	for (int i = 0; i < used; i++)
		if (conns[i].fd < 0)
			return &conns[i];
	if (used == MAX_CONNS)
		exit(2);
	return &conns[used++];
}

static void accept_all(int epoll, int listener)
{
	struct sockaddr_in peer;
	socklen_t size = sizeof(peer);
	int fd;

	while ((fd = accept4(listener, (void *)&peer, &size, SOCK_NONBLOCK)) >= 0) {
		struct conn *c = unused_conn();
		c->filled = 0;
		c->fd = fd;
		c->port = ntohs(peer.sin_port);
		c->step = -1;
		no_delay(fd);
		if (watch(epoll, fd, c))
			die("epoll_ctl");
	}
}

/* Whether a request is complete; its head says how long it is. */
static bool take_request(struct conn *c)
{
	int n = recv(c->fd, c->in + c->filled, sizeof(c->in) - 1 - c->filled, 0);

	if (n <= 0) {
		close(c->fd);
		c->fd = -1;
		return false;
	}
	c->filled += n;
	c->in[c->filled] = 0;
	char *end = strstr(c->in, "\r\n\r\n");
	char *length = strstr(c->in, "Content-Length: ");
	if (!end || !length || c->filled < end + 4 - c->in + atoi(length + 16))
		return false;
	c->filled = 0;
	return true;
}

static void serve(int tokens, long gap_ns, long wait_ns)
{
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof(at);

	if (bind(listener, (void *)&at, size) || listen(listener, 4096) ||
	    getsockname(listener, (void *)&at, &size) || watch(epoll, listener, NULL))
		die("listen");
	printf("%d\n", ntohs(at.sin_port));
	fflush(stdout);
	for (;;) {
		struct epoll_event events[256];
		int n = epoll_wait(epoll, events, 256, 1);
		for (int i = 0; i < n; i++) {
			struct conn *c = events[i].data.ptr;
			if (!c) {
				accept_all(epoll, listener);
			} else if (c->fd >= 0 && take_request(c)) {
				c->step = 0;
				c->due_ns = now_ns() + wait_ns + random() % 11 * wait_ns;
			}
		}
		long now = now_ns();
		for (int i = 0; i < used; i++)
			if (conns[i].fd >= 0 && conns[i].step >= 0 && conns[i].due_ns <= now)
				answer(&conns[i], tokens, gap_ns);
		fflush(stdout);
	}
}

static void ask(struct conn *c)
{
	static const char body[] = "{\"model\":\"m\",\"stream\":true,\"messages\":[{\"role\":\"user\","
				   "\"content\":\"CANARY-prompt\"}]}";
	char out[1024];
	int n = snprintf(out, sizeof(out),
			 "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
			 "Authorization: Bearer CANARY-key\r\nContent-Length: %zu\r\n\r\n%s",
			 sizeof(body) - 1, body);

	c->first_ns = 0;
	c->filled = 0;
	c->sent_ns = now_ns();
	if (send(c->fd, out, n, MSG_NOSIGNAL) != n)
		die("send");
}

/* Reads what came; true once the answer has ended. */
static bool hear(struct conn *c)
{
	char *in = c->in;
	int n = recv(c->fd, in + c->filled, sizeof(c->in) - 1 - c->filled, 0);
	long now = now_ns();

	if (n <= 0)
		die("recv");
	c->filled += n;
	in[c->filled] = 0;
	if (!c->first_ns && strstr(in, "CANARY-answer"))
		c->first_ns = now;
	bool ended = c->filled >= 5 && !memcmp(in + c->filled - 5, LAST, 5);
	if (c->filled > 4096) { /* the end is all that is still of interest */
		memmove(in, in + c->filled - 16, 16);
		c->filled = 16;
	}
	return ended;
}

static void ask_all(int port, int streams, int requests)
{
	int epoll = epoll_create1(0), open = streams;
	struct sockaddr_in at = {.sin_family = AF_INET,
				 .sin_port = htons(port),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

	for (int i = 0; i < streams; i++) {
		struct conn *c = &conns[i];
		struct sockaddr_in own;
		socklen_t size = sizeof(own);
		c->fd = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(c->fd, (void *)&at, sizeof(at)) || getsockname(c->fd, (void *)&own, &size))
			die("connect");
		c->port = ntohs(own.sin_port);
		c->step = requests;
		no_delay(c->fd);
		watch(epoll, c->fd, c);
	}
	for (int i = 0; i < streams; i++)
		ask(&conns[i]);
	while (open) {
		struct epoll_event events[256];
		int n = epoll_wait(epoll, events, 256, -1);
		for (int i = 0; i < n; i++) {
			struct conn *c = events[i].data.ptr;
			if (!hear(c))
				continue;
			printf("%d %ld %ld\n", c->port, c->sent_ns, c->first_ns);
			if (--c->step) {
				ask(c);
			} else {
				close(c->fd);
				open--;
			}
		}
	}
}

int main(int argc, char **argv)
{
	struct rlimit files = {MAX_CONNS + 64, MAX_CONNS + 64};

	setrlimit(RLIMIT_NOFILE, &files);
	if (argc == 5 && !strcmp(argv[1], "serve"))
		serve(atoi(argv[2]), atol(argv[3]) * 1000, atol(argv[4]) * 1000000);
	else if (argc == 5 && !strcmp(argv[1], "ask"))
		ask_all(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
	else
		return 2;
	return 0;
}
