"""Headers of the running kernel, made from the types it carries: for kernels that no package has
headers for. `python -m lab.kernel_headers FOLDER`; bcc takes them by BCC_KERNEL_SOURCE=FOLDER.

libbpf writes as C what `probes/types.bcc.c` asks for; every header of the kernel's that it includes
is empty but one. A type that this kernel has only in a module is not there.
"""

from __future__ import annotations

import ctypes as c
import platform
import re
import sys
from pathlib import Path

from ttftprof.kernel import libbpf
from ttftprof.kernel.headers import SOURCE

# What bcc itself includes and expects of the kernel's own
_OF_BCC = (
    "asm/page.h",
    "linux/bpf_common.h",
    "linux/log2.h",
    "linux/types.h",
    "uapi/linux/bpf.h",
    "uapi/linux/if_packet.h",
)
_BITS = (8, 16, 32, 64)
_INTEGERS = (
    *(f"{prefix}{sign}{bits}" for prefix in ("__", "") for sign in "us" for bits in _BITS),
    *("__be16", "__be32", "__be64", "__sum16", "__wsum", "bool", "size_t", "uintptr_t"),
)
_KINDS = {"struct": libbpf.BTF_KIND_STRUCT, "enum": 6, "typedef": libbpf.BTF_KIND_TYPEDEF}
_STACK_BYTES = {"x86_64": 16384, "aarch64": 16384}  # THREAD_SIZE, which no type tells
_MACROS = f"""#define __aligned_u64 __u64 __attribute__((aligned(8)))
#define __bitwise
#define CONFIG_BPF_SYSCALL 1
#define KERNEL_VERSION(a, b, c) ((a) * 65536 + (b) * 256 + (c))
#define LINUX_VERSION_CODE KERNEL_VERSION(6, 0, 0)
#define THREAD_SIZE {_STACK_BYTES[platform.machine()]}
"""
# Headers of modules: without them types.bcc.c does not ask for what is in them.
_OF_MODULES = ("linux/nfs_xdr.h", "trace/events/netfs.h")
_PRINT = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_void_p)


def write_headers(folder: Path) -> Path:
    """A folder that bcc takes for the source of this kernel."""
    source = SOURCE.read_text()
    wanted = re.findall(r"^\t(struct|enum) (\w+) \w+;", source, re.MULTILINE)
    included = re.findall(r"#include <(.+)>", source)
    for name in {*included, *_OF_BCC} - set(_OF_MODULES):
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    types = as_c([*wanted, *(("typedef", name) for name in _INTEGERS)])
    (folder / "include/linux/kconfig.h").write_text(_MACROS + types)
    return folder


def as_c(wanted: list[tuple[str, str]]) -> str:
    """The C of those (kind, name) types that the kernel has, with all they need."""
    parts: list[str] = []

    def keep(_context: int, text: bytes, arguments: int) -> None:
        parts.append(libbpf.formatted(text, arguments))

    lib = libbpf.library()
    lib.btf_dump__new.restype = c.c_void_p
    lib.btf_dump__new.argtypes = (c.c_void_p, _PRINT, c.c_void_p, c.c_void_p)
    lib.btf_dump__dump_type.argtypes = (c.c_void_p, c.c_uint32)
    lib.btf_dump__free.argtypes = (c.c_void_p,)
    kernel = lib.btf__load_vmlinux_btf()
    callback = _PRINT(keep)
    dump = lib.btf_dump__new(kernel, callback, None, None)
    for kind, name in wanted:
        number = lib.btf__find_by_name_kind(kernel, name.encode(), _KINDS[kind])
        if number > 0:
            libbpf.checked(name, lib.btf_dump__dump_type(dump, number))
    lib.btf_dump__free(dump)
    lib.btf__free(kernel)
    return "".join(parts)


if __name__ == "__main__":
    print(write_headers(Path(sys.argv[1])))
