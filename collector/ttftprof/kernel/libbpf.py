"""A thin ctypes layer on libbpf.so.1, and the few bpf(2) commands it does not need.

It keeps libbpf's names. Every failure becomes a `BpfError` with the errno and libbpf's last words;
nothing is printed.
"""

from __future__ import annotations

import ctypes as c
import ctypes.util
import errno
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ttftprof.errors import Unsupported
from ttftprof.packages import install_command, libbpf_packages

Pointer = c.c_void_p

BTF_KIND_STRUCT = 4
BTF_KIND_TYPEDEF = 8
BTF_KIND_FUNC = 12
_BPF_MAP_LOOKUP_ELEM = 1
_BPF_MAP_UPDATE_ELEM = 2
_BPF_MAP_DELETE_ELEM = 3
_BPF_MAP_GET_NEXT_KEY = 4
_BPF_ENABLE_STATS = 32
_NR_BPF = {"x86_64": 321, "aarch64": 280}
_NR_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


class BpfError(OSError):
    """A refused libbpf or bpf(2) call. `errno` is the kernel's; `detail` libbpf's last lines."""

    def __init__(self, what: str, number: int, detail: str = "") -> None:
        super().__init__(number, f"{what}: {os.strerror(number)}")
        self.detail = detail


class UprobeOpts(c.Structure):
    _fields_ = (
        ("sz", c.c_size_t),
        ("ref_ctr_offset", c.c_size_t),
        ("bpf_cookie", c.c_uint64),
        ("retprobe", c.c_bool),
        ("func_name", c.c_char_p),
        ("attach_mode", c.c_int),
    )


class PerfEventOpts(c.Structure):
    """struct bpf_perf_event_opts, up to what is used."""

    _fields_ = (("sz", c.c_size_t), ("bpf_cookie", c.c_uint64))


class OpenOpts(c.Structure):
    """struct bpf_object_open_opts, up to what is used."""

    _fields_ = (
        ("sz", c.c_size_t),
        ("object_name", c.c_char_p),
        ("relaxed_maps", c.c_bool),
        ("pin_root_path", c.c_char_p),
        ("unused", c.c_uint32),
        ("kconfig", c.c_char_p),
        ("btf_custom_path", c.c_char_p),
    )


class RunOpts(c.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        ("sz", c.c_size_t),
        ("data_in", c.c_void_p),
        ("data_out", c.c_void_p),
        ("data_size_in", c.c_uint32),
        ("data_size_out", c.c_uint32),
        ("ctx_in", c.c_void_p),
        ("ctx_out", c.c_void_p),
        ("ctx_size_in", c.c_uint32),
        ("ctx_size_out", c.c_uint32),
        ("retval", c.c_uint32),
        ("repeat", c.c_int),
        ("duration", c.c_uint32),
        ("flags", c.c_uint32),
        ("cpu", c.c_uint32),
        ("batch_size", c.c_uint32),
    )


_messages: list[str] = []
_PRINT = c.CFUNCTYPE(c.c_int, c.c_int, c.c_char_p, c.c_void_p)
_libc = c.CDLL(None, use_errno=True)


def formatted(fmt: bytes, args: int) -> str:
    """What libbpf would print. It formats with a va_list; vsnprintf takes it as it comes."""
    buffer = c.create_string_buffer(4096)
    _libc.vsnprintf(buffer, c.c_size_t(len(buffer)), c.c_char_p(fmt), c.c_void_p(args))
    return buffer.value.decode(errors="replace")


def _keep_message(level: int, fmt: bytes, args: int) -> int:
    if level > 1:  # debug
        return 0
    _messages.append(formatted(fmt, args).rstrip())
    del _messages[:-40]
    return 0


_print_callback = _PRINT(_keep_message)  # kept: libbpf holds only its address


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "libbpf_version_string": (c.c_char_p, ()),
    "libbpf_set_print": (Pointer, (_PRINT,)),
    "bpf_object__open_file": (Pointer, (c.c_char_p, c.POINTER(OpenOpts))),
    "bpf_object__load": (c.c_int, (Pointer,)),
    "bpf_object__close": (None, (Pointer,)),
    "bpf_object__find_map_by_name": (Pointer, (Pointer, c.c_char_p)),
    "bpf_object__next_map": (Pointer, (Pointer, Pointer)),
    "bpf_object__next_program": (Pointer, (Pointer, Pointer)),
    "bpf_map__fd": (c.c_int, (Pointer,)),
    "bpf_map__name": (c.c_char_p, (Pointer,)),
    "bpf_map__reuse_fd": (c.c_int, (Pointer, c.c_int)),
    "bpf_map__set_max_entries": (c.c_int, (Pointer, c.c_uint32)),
    "bpf_map__value_size": (c.c_uint32, (Pointer,)),
    "bpf_map__initial_value": (Pointer, (Pointer, c.POINTER(c.c_size_t))),
    "bpf_program__name": (c.c_char_p, (Pointer,)),
    "bpf_program__section_name": (c.c_char_p, (Pointer,)),
    "bpf_program__set_autoload": (c.c_int, (Pointer, c.c_bool)),
    "bpf_program__fd": (c.c_int, (Pointer,)),
    "bpf_program__set_expected_attach_type": (c.c_int, (Pointer, c.c_int)),
    "bpf_program__attach": (Pointer, (Pointer,)),
    "bpf_program__attach_iter": (Pointer, (Pointer, Pointer)),
    "bpf_program__attach_perf_event_opts": (
        Pointer,
        (Pointer, c.c_int, c.POINTER(PerfEventOpts)),
    ),
    "bpf_program__attach_uprobe_opts": (
        Pointer,
        (Pointer, c.c_int, c.c_char_p, c.c_size_t, c.POINTER(UprobeOpts)),
    ),
    "bpf_prog_test_run_opts": (c.c_int, (c.c_int, c.POINTER(RunOpts))),
    "bpf_iter_create": (c.c_int, (c.c_int,)),
    "bpf_link__fd": (c.c_int, (Pointer,)),
    "bpf_link__destroy": (c.c_int, (Pointer,)),
    "btf__load_vmlinux_btf": (Pointer, ()),
    "btf__new": (Pointer, (Pointer, c.c_uint32)),
    "btf__load_module_btf": (Pointer, (c.c_char_p, Pointer)),
    "btf__type_by_id": (c.POINTER(c.c_uint32 * 3), (Pointer, c.c_uint32)),
    "btf__find_by_name_kind": (c.c_int32, (Pointer, c.c_char_p, c.c_uint32)),
    "btf__free": (None, (Pointer,)),
}


@lru_cache(1)
def library() -> c.CDLL:
    """libbpf.so.1 with its signatures declared.

    Raises `Unsupported` where it is missing.
    """
    try:
        lib = c.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise Unsupported(
            "libbpf.so.1 is not installed", next_step=install_command(libbpf_packages())
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.libbpf_set_print(_print_callback)
    return lib


def last_words() -> str:
    """libbpf's last complaint that says more than that something failed."""
    telling = [m for m in _messages if "BEGIN PROG LOAD LOG" not in m and "-- END" not in m]
    return telling[0].removeprefix("libbpf: ") if telling else ""


def forget_words() -> None:
    _messages.clear()


def checked(what: str, result: int) -> int:
    """Raises `BpfError` for libbpf's negative errno returns."""
    if result < 0:
        raise BpfError(what, -result, last_words())
    return result


def present(what: str, pointer: int | None) -> Pointer:
    """Raises `BpfError` for a null pointer, whose reason is in errno."""
    if not pointer:
        raise BpfError(what, c.get_errno() or errno.EINVAL, last_words())
    return Pointer(pointer)


def has_struct(types: bytes, name: str) -> bool:
    """Whether raw BTF, if it is valid, describes this structure."""
    btf = library().btf__new(types, len(types))
    if not btf:
        return False
    try:
        found = library().btf__find_by_name_kind(btf, name.encode(), BTF_KIND_STRUCT)
        return bool(found > 0)
    finally:
        library().btf__free(btf)


def run_program(program_fd: int, arguments: Sequence[int] = ()) -> None:
    """Runs a raw tracepoint's program once, here and now, as if the hook had passed these."""
    context = (c.c_uint64 * max(1, len(arguments)))(*arguments)
    opts = RunOpts(sz=c.sizeof(RunOpts), ctx_in=c.addressof(context), ctx_size_in=c.sizeof(context))
    checked("run a program", library().bpf_prog_test_run_opts(program_fd, c.byref(opts)))


def iterate(program: Pointer) -> None:
    """Runs an iterator program over everything it iterates."""
    lib = library()
    link = present("attach an iterator", lib.bpf_program__attach_iter(program, None))
    try:
        made = checked("iterate", lib.bpf_iter_create(lib.bpf_link__fd(link)))
        with os.fdopen(made, "rb", buffering=0) as walk:
            while walk.read(4096):
                pass
    finally:
        lib.bpf_link__destroy(link)


class _MapAttr(c.Structure):
    _fields_ = (
        ("map_fd", c.c_uint32),
        ("pad", c.c_uint32),
        ("key", c.c_uint64),
        ("value", c.c_uint64),
        ("flags", c.c_uint64),
    )


def _bpf(command: int, attr: c.Structure) -> int:
    number = _NR_BPF[platform.machine()]
    return int(_libc.syscall(number, command, c.byref(attr), c.sizeof(attr)))


def _map_call(command: int, fd: int, key: bytes | None, value: c.Array[c.c_char] | None) -> None:
    key_buffer = c.create_string_buffer(key, len(key)) if key is not None else None
    attr = _MapAttr(
        map_fd=fd,
        key=c.addressof(key_buffer) if key_buffer is not None else 0,
        value=c.addressof(value) if value is not None else 0,
    )
    if _bpf(command, attr) < 0:
        raise BpfError("bpf map", c.get_errno())


def map_update(fd: int, key: bytes, value: bytes) -> None:
    _map_call(_BPF_MAP_UPDATE_ELEM, fd, key, c.create_string_buffer(value, len(value)))


def map_delete(fd: int, key: bytes) -> None:
    _map_call(_BPF_MAP_DELETE_ELEM, fd, key, None)


def map_lookup(fd: int, key: bytes, size_bytes: int) -> bytes:
    value = c.create_string_buffer(size_bytes)
    _map_call(_BPF_MAP_LOOKUP_ELEM, fd, key, value)
    return value.raw


def map_keys(fd: int, size_bytes: int) -> Iterator[bytes]:
    """The keys of a hash map; of one that changes meanwhile some may be missed or come twice."""
    key: bytes | None = None
    following = c.create_string_buffer(size_bytes)
    while True:
        try:
            _map_call(_BPF_MAP_GET_NEXT_KEY, fd, key, following)
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return
            raise
        key = following.raw
        yield key


class _StatsAttr(c.Structure):
    _fields_ = (("type", c.c_uint32),)


def enable_stats() -> int:
    """A descriptor; while it is open the kernel times every BPF program (5.8)."""
    fd = _bpf(_BPF_ENABLE_STATS, _StatsAttr(type=0))
    if fd < 0:
        raise BpfError("bpf statistics", c.get_errno())
    return fd


@dataclass(frozen=True, slots=True)
class ProgramCounts:
    """What the kernel counted for a program: `runs` and `run_ns` while statistics were on.

    `skipped`: since it was loaded, how often it was due while it ran on that CPU already, for
    instance in an interrupt. The kernel then leaves the second run out (counted since 5.12).
    """

    runs: int
    run_ns: int
    skipped: int


_COUNTS = ("run_cnt", "run_time_ns", "recursion_misses")
_COUNT = re.compile(rf"^({'|'.join(_COUNTS)}):\t(\d+)", re.MULTILINE)


def program_counts(fdinfo: str) -> ProgramCounts:
    """From the text of /proc/self/fdinfo/FD of a program."""
    fields = dict(_COUNT.findall(fdinfo))
    return ProgramCounts(*(int(fields.get(name, 0)) for name in _COUNTS))


class _UprobeMultiAttr(c.Structure):
    # union bpf_attr of BPF_LINK_CREATE, include/uapi/linux/bpf.h
    _fields_ = (
        ("prog_fd", c.c_uint32),
        ("target_fd", c.c_uint32),
        ("attach_type", c.c_uint32),
        ("link_flags", c.c_uint32),
        ("path", c.c_uint64),
        ("offsets", c.c_uint64),
        ("ref_ctr_offsets", c.c_uint64),
        ("cookies", c.c_uint64),
        ("cnt", c.c_uint32),
        ("flags", c.c_uint32),
        ("pid", c.c_uint32),
        ("pad", c.c_uint32),
    )


TRACE_UPROBE_MULTI = 48  # enum bpf_attach_type
_BPF_LINK_CREATE = 28
_UPROBE_MULTI_RETURN = 1


def link_uprobes(
    program_fd: int, path: str, places: Sequence[tuple[int, int]], on_return: bool
) -> int:
    """A descriptor that holds probes at all (offset, cookie) `places` of a file; kernel 6.6.

    `EINVAL` or `EOPNOTSUPP` from a kernel that cannot.
    """
    name = c.create_string_buffer(os.fsencode(path))
    offsets = (c.c_uint64 * len(places))(*(offset for offset, _ in places))
    cookies = (c.c_uint64 * len(places))(*(cookie for _, cookie in places))
    attr = _UprobeMultiAttr(
        prog_fd=program_fd,
        attach_type=TRACE_UPROBE_MULTI,
        path=c.addressof(name),
        offsets=c.addressof(offsets),
        cookies=c.addressof(cookies),
        cnt=len(places),
        flags=_UPROBE_MULTI_RETURN if on_return else 0,
    )
    fd = _bpf(_BPF_LINK_CREATE, attr)
    if fd < 0:
        raise BpfError(f"uprobes in {path}", c.get_errno())
    return fd


class _PerfAttr(c.Structure):
    # struct perf_event_attr, first published size plus what the fields below need
    _fields_ = (
        ("type", c.c_uint32),
        ("size", c.c_uint32),
        ("config", c.c_uint64),
        ("sample", c.c_uint64),
        ("sample_type", c.c_uint64),
        ("read_format", c.c_uint64),
        ("flags", c.c_uint64),
        ("wakeup_and_breakpoint_type", c.c_uint64),
        ("uprobe_path", c.c_uint64),  # config1
        ("probe_offset", c.c_uint64),  # config2
        ("rest", c.c_uint64 * 5),
    )


_PERF_TYPE_SOFTWARE = 1
_PERF_COUNT_SW_CPU_CLOCK = 0
_PERF_EVENT_IOC_PERIOD = 0x40082404  # include/uapi/linux/perf_event.h
_PERF_FLAG_FREQ = 1 << 10
_PERF_FLAG_FD_CLOEXEC = 8


def set_clock_hz(fd: int, hz: int) -> None:
    """Another rate for a descriptor of `open_clock_event`."""
    if _libc.ioctl(fd, c.c_ulong(_PERF_EVENT_IOC_PERIOD), c.byref(c.c_uint64(hz))):
        raise BpfError("PERF_EVENT_IOC_PERIOD", c.get_errno())


def open_clock_event(cpu: int, hz: int) -> int:
    """A perf descriptor that ticks `hz` times a second on one CPU, whoever runs there."""
    attr = _PerfAttr(
        type=_PERF_TYPE_SOFTWARE,
        size=c.sizeof(_PerfAttr),
        config=_PERF_COUNT_SW_CPU_CLOCK,
        sample=hz,
        flags=_PERF_FLAG_FREQ,
    )
    return _perf_event_open(attr, cpu)


def attach_event(program: Pointer, fd: int, cookie: int = 0) -> Pointer:
    """The link of a program to a perf descriptor, which it owns; one that cannot be is closed."""
    opts = PerfEventOpts(c.sizeof(PerfEventOpts), cookie)
    link = library().bpf_program__attach_perf_event_opts(program, fd, c.byref(opts))
    try:
        return present("attach an event", link)
    except BpfError:
        os.close(fd)
        raise


_UPROBES = Path("/sys/bus/event_source/devices/uprobe")


def open_uprobe_event(path: str, offset: int, on_return: bool) -> int:
    """A perf descriptor of a place in a file, in whatever process."""
    name = c.create_string_buffer(os.fsencode(path))
    try:
        number = int((_UPROBES / "type").read_text())
        [bit] = re.findall(r"config:(\d+)", (_UPROBES / "format/retprobe").read_text())
    except (OSError, ValueError) as error:
        raise BpfError("the kernel's uprobes", errno.EOPNOTSUPP) from error
    attr = _PerfAttr(
        type=number,
        size=c.sizeof(_PerfAttr),
        config=on_return << int(bit),
        uprobe_path=c.addressof(name),
        probe_offset=offset,
    )
    return _perf_event_open(attr, 0)


def _perf_event_open(attr: _PerfAttr, cpu: int) -> int:
    number = _NR_PERF_EVENT_OPEN[platform.machine()]
    fd = int(_libc.syscall(number, c.byref(attr), -1, cpu, -1, _PERF_FLAG_FD_CLOEXEC))
    if fd < 0:
        raise BpfError("perf_event_open", c.get_errno())
    return fd
