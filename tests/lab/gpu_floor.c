/*
 * What it costs to wake at all: a C library's loop that does nothing else.
 */
#include <time.h>

static long long now(clockid_t clock)
{
	struct timespec at;

	clock_gettime(clock, &at);
	return at.tv_sec * 1000000000ll + at.tv_nsec;
}

/* Processor time, in ns, that this thread takes to wake so often, by an absolute schedule. */
long long wakes(long long period_ns, long long count)
{
	long long due = now(CLOCK_MONOTONIC), began = now(CLOCK_THREAD_CPUTIME_ID);

	while (count--) {
		due += period_ns;
		struct timespec at = {due / 1000000000, due % 1000000000};

		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0);
	}
	return now(CLOCK_THREAD_CPUTIME_ID) - began;
}
