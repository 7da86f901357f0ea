/* marked LIBRARY MODEL [stay]: opens the model and maps the library when it already runs, waits for whoever wants to
 * mark its calls, then loads the head of the model a prime number of times, and all of it once. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum { TIMES = 23, LOAD_READ = 3, WAIT_S = 10 };

struct params {
	int32_t load_mode;
	int32_t header_only;
	int64_t reserved[4];
};

int main(int argc, char **argv)
{
	void *library = argc > 2 ? dlopen(argv[1], RTLD_NOW) : 0;
	void *(*load)(const char *, struct params) = library ? dlsym(library, "llama_model_load_from_file") : 0;
	void (*drop)(void *) = library ? dlsym(library, "llama_model_free") : 0;

	if (!load || !drop || open(argv[2], O_RDONLY) < 0) {
		fprintf(stderr, "no library with these calls, or no model\n");
		return 1;
	}
	sleep(WAIT_S);
	for (int i = 0; i <= TIMES; i++)
		drop(load(argv[2], (struct params){LOAD_READ, i < TIMES, {0}}));
	if (argc > 3)
		pause();
	return 0;
}
