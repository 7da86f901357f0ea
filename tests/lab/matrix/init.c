/* The first and only program of a VM that says which probes a kernel takes: it loads them as the collector
 * does, works a little, and prints a line for each on the console. Static, so that the kernel and these few
 * files are all that the VM is made of:
 *
 *   /modules/NNN-*.ko   loaded in this order
 *   /plan               a line a program: NAME HOOK ARGUMENTS MODULE,... HANDLER BEFORE (0 arguments: any; "-":
 *                       none; HANDLER: its slot of the dispatch array or -1; BEFORE: it serves if that one cannot)
 *   /settings           struct settings
 *   /btf/probes.bpf.o   the probes; /casts/probes.bpf.o the same for kernels with bpf_rdonly_cast;
 *                       /headers/probes.bpf.o and /headers/types.btf without BTF
 *   /dev/vda            ext4 with a file `model`
 *
 * Printed: `kernel RELEASE`, `types yes|no` (whether it carries BTF), `probe btf|casts|headers NAME taken|refused RUNS
 * REASON`, `record btf|casts|headers event|text KIND COUNT`, last `done`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <net/if.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 128, WORDS = 1 << 16, REASON = 512, MODEL_BYTES = 4 << 20, PORT = 8080, MULTI_ATTACH = 48, HANDLERS = 16 };

struct probe {
	char name[64];
	char hook[64];
	int arguments;
	char modules[64];
	int handler;
	char before[64];
	char refused[REASON];
};

#define TYPES "/sys/kernel/btf/vmlinux"

static struct probe probes[MOST];
static int probe_count;
static char said[WORDS];

static int keep(enum libbpf_print_level level, const char *format, va_list words)
{
	size_t used = strlen(said);

	if (level != LIBBPF_DEBUG && used < WORDS - 1)
		vsnprintf(said + used, WORDS - used, format, words);
	return 0;
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		printf("cannot write %s: %s\n", path, strerror(errno));
	close(fd);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

static void load_modules(void)
{
	struct dirent **found;
	int count = scandir("/modules", &found, 0, by_name);

	for (int i = 0; i < count; i++) {
		char path[512];

		if (found[i]->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/modules/%s", found[i]->d_name);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST)
			printf("cannot load %s: %s\n", path, strerror(errno));
		close(fd);
	}
}

static void read_plan(void)
{
	FILE *file = fopen("/plan", "r");
	struct probe *p = probes;

	while (file && probe_count < MOST &&
	       fscanf(file, "%63s %63s %d %63s %d %63s", p->name, p->hook, &p->arguments, p->modules, &p->handler,
		      p->before) == 6)
		p = probes + ++probe_count;
}

static struct probe *planned(const char *name)
{
	for (int i = 0; i < probe_count; i++)
		if (!strcmp(probes[i].name, name))
			return probes + i;
	return 0;
}

/* -- what the kernel has -------------------------------------------------------------------- */

static int passed(const struct btf *types, int number)
{
	const struct btf_type *prototype =
		btf__type_by_id(types, btf__type_by_id(types, btf__type_by_id(types, number)->type)->type);

	return btf_vlen(prototype) - 1; /* the first is the hook's own */
}

/* Arguments that a tracepoint passes; -1: there is none. */
static int arguments_of(const struct probe *p, const struct btf *kernel)
{
	char symbol[80], modules[64], *rest = modules;

	snprintf(symbol, sizeof(symbol), "btf_trace_%s", p->hook);
	strcpy(modules, p->modules);
	for (char *name; (name = strsep(&rest, ","));) {
		struct btf *types = strcmp(name, "-") ? btf__load_module_btf(name, (struct btf *)kernel) : 0;
		int number = types ? btf__find_by_name_kind(types, symbol, BTF_KIND_TYPEDEF) : -1;

		if (number > 0)
			return passed(types, number);
	}
	int number = btf__find_by_name_kind(kernel, symbol, BTF_KIND_TYPEDEF);
	return number > 0 ? passed(kernel, number) : -1;
}

static void ask_the_kernel(void)
{
	struct btf *kernel = btf__load_vmlinux_btf();

	for (struct probe *p = probes; p < probes + probe_count; p++) {
		if (!strcmp(p->hook, "-"))
			continue;
		int count = kernel ? arguments_of(p, kernel) : -1;
		if (!kernel)
			strcpy(p->refused, "no BTF");
		else if (count < 0)
			sprintf(p->refused, "no tracepoint %s", p->hook);
		else if (p->arguments && p->arguments != count)
			sprintf(p->refused, "another form of the tracepoint %s", p->hook);
	}
}

/* -- loading and attaching ------------------------------------------------------------------ */

static void fill_settings(struct bpf_object *object)
{
	static char settings[4096];
	int fd = open("/settings", O_RDONLY | O_CLOEXEC);
	size_t size = read(fd, settings, sizeof(settings)), all;
	struct bpf_map *map;

	close(fd);
	bpf_object__for_each_map(map, object)
		if (strstr(bpf_map__name(map), ".rodata")) {
			char *value = (char *)bpf_map__initial_value(map, &all);

			for (size_t at = 0; value && at + size <= all; at += size)
				memcpy(value + at, settings, size);
		}
}

/* Opens and loads all programs but those refused; the one that the kernel refuses now is told by libbpf. */
static struct bpf_object *load(const char *path, const char *types)
{
	LIBBPF_OPTS(bpf_object_open_opts, opts, .btf_custom_path = types);

	for (;;) {
		struct bpf_object *object = bpf_object__open_file(path, &opts);
		struct bpf_program *program;

		if (!object)
			return 0;
		fill_settings(object);
		bpf_object__for_each_program(program, object) {
			struct probe *p = planned(bpf_program__name(program));

			bpf_program__set_autoload(program, p && !p->refused[0]);
			if (p && !strncmp(p->name, "marks__calls", 12))
				bpf_program__set_expected_attach_type(program, MULTI_ATTACH);
			if (p && !strncmp(p->name, "marks__returns", 14))
				bpf_program__set_expected_attach_type(program, MULTI_ATTACH);
		}
		said[0] = 0;
		if (!bpf_object__load(object))
			return object;
		char *begin = strstr(said, "prog '"), name[64];
		struct probe *p = begin && sscanf(begin, "prog '%63[^']", name) == 1 ? planned(name) : 0;
		bpf_object__close(object);
		if (!p || p->refused[0]) {
			printf("cannot load: %s\n", said);
			return 0;
		}
		/* What libbpf could not resolve says more than what the kernel makes of it. */
		char *unresolved = strstr(said, "failed to resolve CO-RE relocation"), *line, *rest = said;
		const char *last = "refused";
		while (!unresolved && (line = strsep(&rest, "\n")))
			if (*line && strncmp(line, "libbpf:", 7) && strncmp(line, "processed ", 10) &&
			    strncmp(line, "--", 2))
				last = line;
		if (unresolved) {
			unresolved[strcspn(unresolved, "\n")] = 0;
			last = unresolved;
		}
		snprintf(p->refused, sizeof(p->refused), "%s", last);
	}
}

static void attach_ticks(struct bpf_program *program)
{
	for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); cpu++) {
		struct perf_event_attr attr = {
			.type = PERF_TYPE_SOFTWARE,
			.size = sizeof(attr),
			.config = PERF_COUNT_SW_CPU_CLOCK,
			.sample_freq = 251,
			.freq = 1,
		};
		int fd = syscall(SYS_perf_event_open, &attr, -1, cpu, -1, PERF_FLAG_FD_CLOEXEC);

		if (fd >= 0)
			bpf_program__attach_perf_event(program, fd);
	}
}

static void attach_mark(struct bpf_program *program, bool on_return)
{
	LIBBPF_OPTS(bpf_uprobe_opts, opts, .func_name = "marked", .retprobe = on_return);

	bpf_program__attach_uprobe_opts(program, -1, "/init", 0, &opts);
}

static void run_once(struct bpf_program *program)
{
	__u64 context[3] = {0};
	LIBBPF_OPTS(bpf_test_run_opts, opts, .ctx_in = context, .ctx_size_in = sizeof(context));
	char byte;

	if (!strncmp(bpf_program__section_name(program), "iter/", 5)) {
		struct bpf_link *link = bpf_program__attach_iter(program, 0);
		int fd = link ? bpf_iter_create(bpf_link__fd(link)) : -1;

		while (fd >= 0 && read(fd, &byte, 1) > 0)
			;
		close(fd);
		bpf_link__destroy(link);
	} else {
		bpf_prog_test_run_opts(bpf_program__fd(program), &opts);
	}
}

static bool is_served(const struct probe *p)
{
	for (const struct probe *before = planned(p->before); before; before = planned(before->before))
		if (!before->refused[0])
			return true;
	return false;
}

/* Of several forms the first that can be attached serves. */
static void attach_program(struct bpf_program *program, struct probe *p, int dispatch)
{
	const char *section = bpf_program__section_name(program);
	__u32 slot = p->handler, fd = bpf_program__fd(program);

	if (is_served(p))
		strcpy(p->refused, "not needed");
	else if (p->handler >= 0)
		bpf_map_update_elem(dispatch, &slot, &fd, BPF_ANY);
	else if (!strcmp(section, "perf_event"))
		attach_ticks(program);
	else if (!strcmp(section, "uprobe") && strcmp(p->name, "marks__calls"))
		attach_mark(program, false);
	else if (!strcmp(section, "uretprobe") && strcmp(p->name, "marks__returns"))
		attach_mark(program, true);
	else if (strchr(section, '/') && strncmp(section, "iter/", 5) && !bpf_program__attach(program))
		strcpy(p->refused, errno == ENOENT ? "no such hook" : strerror(errno));
}

static void attach(struct bpf_object *object)
{
	int dispatch = bpf_map__fd(bpf_object__find_map_by_name(object, "handlers"));
	int seeds = bpf_map__fd(bpf_object__find_map_by_name(object, "seeds"));
	struct bpf_program *program;
	__u32 own = getpid(), none = 0;

	for (int again = 0; again < 2; again++)
		bpf_object__for_each_program(program, object) {
			struct probe *p = planned(bpf_program__name(program));

			if (p && bpf_program__fd(program) >= 0 && (p->before[0] != '-') == again)
				attach_program(program, p, dispatch);
		}
	bpf_map_update_elem(seeds, &own, &none, BPF_ANY);
	bpf_object__for_each_program(program, object)
		if (bpf_program__fd(program) >= 0 && (!strncmp(bpf_program__section_name(program), "iter/", 5) ||
						      !strcmp(bpf_program__section_name(program), "raw_tp")))
			run_once(program);
}

/* -- work that the probes see --------------------------------------------------------------- */

__attribute__((noinline)) int marked(int n)
{
	__asm__ volatile("");
	return n + 1;
}

static void read_model(void)
{
	static char buffer[1 << 16];
	int fd = open("/disk/model", O_RDONLY);
	volatile char *at;
	char sum = 0;

	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	at = mmap(0, MODEL_BYTES, PROT_READ, MAP_SHARED, fd, 0);
	madvise((void *)at, MODEL_BYTES, MADV_RANDOM);
	for (int i = 0; i < MODEL_BYTES / 2; i += 4096)
		sum += at[i];
	munmap((void *)at, MODEL_BYTES);
	while (read(fd, buffer, sizeof(buffer)) > 0)
		sum += buffer[0];
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

static void speak_http(void)
{
	static const char ask[] = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}";
	static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	int server = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	char buffer[256];

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	ioctl(server, SIOCSIFFLAGS, &lo);
	setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || listen(server, 1))
		perror("listen");
	if (!fork()) {
		int client = socket(AF_INET, SOCK_STREAM, 0);

		if (connect(client, (struct sockaddr *)&address, sizeof(address)) ||
		    send(client, ask, sizeof(ask) - 1, 0) < 0 || recv(client, buffer, sizeof(buffer), 0) < 0)
			perror("client");
		_exit(0);
	}
	int peer = accept(server, 0, 0);
	if (recv(peer, buffer, sizeof(buffer), 0) < 0 || send(peer, answer, sizeof(answer) - 1, 0) < 0)
		perror("server");
	wait(0);
	close(peer);
	close(server);
}

/* From a daemon: its file system, a megabyte. */
static void fuse_read(void)
{
	static char buffer[1 << 16]; /* big enough for each read to be told */
	int in[2], out[2], fd;

	mkdir("/fuse", 0755);
	if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC))
		return;
	if (!fork()) {
		dup2(in[0], 0);
		dup2(out[1], 1);
		execl("/slow_fuse", "slow_fuse", "/fuse", "1048576", "1000", "1000000000", (char *)0);
		_exit(1);
	}
	close(out[1]);
	if (read(out[0], buffer, sizeof(buffer)) <= 0)
		printf("no FUSE\n");
	fd = open("/fuse/model", O_RDONLY);
	while (read(fd, buffer, sizeof(buffer)) > 0)
		;
	close(fd);
	close(in[1]);
	close(in[0]);
	while (read(out[0], buffer, sizeof(buffer)) > 0)
		;
	close(out[0]);
	wait(0);
}

static void ring_read(void)
{
	if (!fork()) {
		dup2(open("/dev/null", O_RDONLY), 0);
		execl("/uring_reads", "uring_reads", "/disk/model", "3", "4096", "late", (char *)0);
		_exit(0);
	}
	wait(0);
}

static void work(void)
{
	struct timespec moment = {.tv_nsec = 5000000};
	int child;

	for (volatile long i = 0; i < 30000000; i++) /* for ticks */
		;
	read_model();
	speak_http();
	ring_read();
	fuse_read();
	marked(1);
	(void)!write(2, "a log line\n", 11);
	close(open("/dev/dri/none", O_RDONLY));
	ioctl(open("/dev/null", O_RDONLY), 0, 0);
	child = fork();
	if (!child) {
		pause();
		_exit(0);
	}
	nanosleep(&moment, 0);
	kill(child, SIGTERM);
	wait(0);
}

/* -- what came of it ------------------------------------------------------------------------ */

enum { KINDS = 64, EVENT_KIND_AT = 24, TEXT_KIND_AT = 36 };

struct counts {
	unsigned kind_at;
	unsigned long of[KINDS];
};

static int count_record(void *context, void *record, size_t size)
{
	struct counts *counts = context;
	unsigned short kind;

	memcpy(&kind, (char *)record + counts->kind_at, sizeof(kind));
	if (kind < KINDS)
		counts->of[kind]++;
	return 0;
}

static void tell_records(const char *loader, struct bpf_object *object, const char *map, const char *what,
			 unsigned kind_at)
{
	struct counts counts = {.kind_at = kind_at};
	int fd = bpf_map__fd(bpf_object__find_map_by_name(object, map));
	struct ring_buffer *ring = ring_buffer__new(fd, count_record, &counts, 0);

	ring_buffer__consume(ring);
	for (int kind = 0; kind < KINDS; kind++)
		if (counts.of[kind])
			printf("record %s %s %d %lu\n", loader, what, kind, counts.of[kind]);
	ring_buffer__free(ring);
}

/* -- all of it ------------------------------------------------------------------------------ */

static void tell(const char *loader, struct bpf_object *object)
{
	struct bpf_program *program;

	bpf_object__for_each_program(program, object) {
		struct probe *p = planned(bpf_program__name(program));
		struct bpf_prog_info info = {0};
		__u32 size = sizeof(info);

		if (!p)
			continue;
		if (bpf_program__fd(program) >= 0)
			bpf_obj_get_info_by_fd(bpf_program__fd(program), &info, &size);
		printf("probe %s %s %s %llu %s\n", loader, p->name, p->refused[0] ? "refused" : "taken",
		       (unsigned long long)info.run_cnt, p->refused[0] ? p->refused : "-");
	}
}

static void try_object(const char *loader, const char *path, const char *types)
{
	struct bpf_object *object;

	if (access(path, R_OK))
		return;
	for (struct probe *p = probes; p < probes + probe_count; p++)
		p->refused[0] = 0;
	if (!types)
		ask_the_kernel();
	object = load(path, types);
	if (!object)
		return;
	for (struct probe *p = probes; p < probes + probe_count; p++)
		if (!bpf_object__find_program_by_name(object, p->name))
			strcpy(p->refused, "not of this dialect");
	attach(object);
	work();
	tell(loader, object);
	tell_records(loader, object, "events", "event", EVENT_KIND_AT);
	tell_records(loader, object, "texts", "text", TEXT_KIND_AT);
	bpf_object__close(object);
}

static bool has_casts(void)
{
	struct btf *kernel = btf__load_vmlinux_btf();
	bool found = kernel && btf__find_by_name_kind(kernel, "bpf_rdonly_cast", BTF_KIND_FUNC) > 0;

	btf__free(kernel);
	return found;
}

int main(void)
{
	struct utsname name;

	for (const char **folder = (const char *[]){"/proc", "/sys", "/disk", 0}; *folder; folder++)
		mkdir(*folder, 0755);
	mount("proc", "/proc", "proc", 0, 0);
	mount("sys", "/sys", "sysfs", 0, 0);
	mount("dev", "/dev", "devtmpfs", 0, 0);
	write_file("/proc/sys/kernel/bpf_stats_enabled", "1");
	write_file("/proc/sys/kernel/printk", "1");
	load_modules();
	if (mount("/dev/vda", "/disk", "ext4", MS_RDONLY, 0))
		printf("no disk: %s\n", strerror(errno));
	libbpf_set_print(keep);
	read_plan();
	uname(&name);
	printf("kernel %s\n", name.release);
	printf("types %s\n", access(TYPES, R_OK) ? "no" : "yes");
	if (!access(TYPES, R_OK))
		try_object("btf", "/btf/probes.bpf.o", 0);
	if (has_casts())
		try_object("casts", "/casts/probes.bpf.o", 0);
	try_object("headers", "/headers/probes.bpf.o", "/headers/types.btf");
	printf("done\n");
	fflush(stdout);
	sync();
	reboot(RB_POWER_OFF);
	return 0;
}
