"""How long whoever stamps a moment stood ready for a core, which makes his stamp that much late."""

from pathlib import Path


def stood_ready_ns() -> int:
    """How long this thread was ready and did not run, so far: the kernel's own count
    (Documentation/scheduler/sched-stats.rst)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
