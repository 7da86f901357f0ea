"""Which tracepoints the running kernel has, and what they pass, by the types it carries (BTF)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ttftprof.errors import Unsupported
from ttftprof.kernel import libbpf
from ttftprof.kernel.libbpf import library

VMLINUX = Path("/sys/kernel/btf/vmlinux")


class KernelTypes:
    """The running kernel's BTF, and that of its modules, asked which tracepoints exist."""

    def __init__(self) -> None:
        self._btf = library().btf__load_vmlinux_btf()
        if not self._btf:
            raise Unsupported(
                f"this kernel offers no BTF ({VMLINUX} is missing)",
                next_step="--loader bcc takes its types from its headers",
            )
        self._modules: dict[str, int | None] = {}
        self._known: dict[tuple[str, tuple[str, ...]], int | None] = {}

    def has_module(self, name: str) -> bool:
        """Whether a module is loaded and carries BTF."""
        return self._module(name) is not None

    def has_tracepoint(self, name: str, modules: Iterable[str] = ()) -> bool:
        """Whether the kernel, or one of these modules if it is loaded, has a tracepoint."""
        return self.arguments(name, modules) is not None

    def arguments(self, tracepoint: str, modules: Iterable[str] = ()) -> int | None:
        """How many arguments a tracepoint passes, or None if there is no such."""
        key = tracepoint, tuple(modules)
        if key not in self._known:  # a look-up walks all types: half a millisecond
            self._known[key] = self._look_up(*key)
        return self._known[key]

    def _look_up(self, tracepoint: str, modules: Iterable[str]) -> int | None:
        symbol = f"btf_trace_{tracepoint}".encode()
        for btf in (*map(self._module, modules), self._btf):
            if btf is not None:
                found = library().btf__find_by_name_kind(btf, symbol, libbpf.BTF_KIND_TYPEDEF)
                if found > 0:
                    return _parameters(btf, found) - 1  # the first is the probe's own data
        return None

    def has_function(self, name: str, modules: Iterable[str] = ()) -> bool:
        """Whether the kernel, or one of these modules if it is loaded, has a function."""
        types = [btf for btf in (*map(self._module, modules), self._btf) if btf is not None]
        find = library().btf__find_by_name_kind
        return any(find(btf, name.encode(), libbpf.BTF_KIND_FUNC) > 0 for btf in types)

    def _module(self, name: str) -> int | None:
        if name not in self._modules:
            loaded = Path("/sys/kernel/btf", name).exists()
            btf = library().btf__load_module_btf(name.encode(), self._btf) if loaded else None
            self._modules[name] = btf or None
        return self._modules[name]

    def close(self) -> None:
        for btf in self._modules.values():
            if btf is not None:
                library().btf__free(btf)
        library().btf__free(self._btf)


def _parameters(btf: int, typedef: int) -> int:
    """Parameters of the function that a `btf_trace_` type points to.

    Layout: struct btf_type of include/uapi/linux/btf.h; the third word of a typedef and of a
    pointer is the type meant, the low half of a function's second how many parameters follow.
    """
    pointer = library().btf__type_by_id(btf, typedef).contents[2]
    prototype = library().btf__type_by_id(btf, pointer).contents[2]
    return int(library().btf__type_by_id(btf, prototype).contents[1]) & 0xFFFF
