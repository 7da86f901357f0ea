"""A target watched without the kernel's probes: what /proc, a relay between client and server, and
a command's own output can tell, in the records that the probes would give.

For who is not root, for containers, and for kernels that load no probes. Everything behind the
records is the same; that edges are known to a look's distance only is said by `states`.
"""

from ttftprof.polled.session import PolledSession

__all__ = ["PolledSession"]
