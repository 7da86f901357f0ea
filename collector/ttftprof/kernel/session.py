"""Loads the probes, seeds the target and attaches.

`ProbeSession` owns every kernel resource; closing it (or dying) takes all of it away. A probe that
cannot be had is a `ProbeState` with the reason, never an exception, unless
nothing works without it.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import platform
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ttftprof.clock import NS_PER_MS, NS_PER_S, now_ns
from ttftprof.errors import NotPermitted, Unsupported, too_many_files
from ttftprof.events import (
    CONTROL,
    EVENT,
    FILE_SLOT,
    REMOTE_KEY_BYTES,
    REMOTE_REQUEST,
    THREAD_SLOT,
    Kind,
    Records,
    RemoteFlag,
)
from ttftprof.kernel import libbpf, perf_events, privilege
from ttftprof.kernel.confinement import guards
from ttftprof.kernel.headers import compiled_types
from ttftprof.kernel.held import held_files
from ttftprof.kernel.latecomers import Attached, Latecomers
from ttftprof.kernel.libbpf import BpfError, Pointer, library
from ttftprof.kernel.permission import is_wsl, lacking_capabilities
from ttftprof.kernel.ring import FixedRing, TextRing, map_array
from ttftprof.kernel.table import HANDLERS, ON_ENTRY, PROBES, VARIANTS, Probe, call_tables
from ttftprof.kernel.types import VMLINUX, KernelTypes

_MODULES = Path("/sys/module")
OBJECT = Path(__file__).parent / "objects" / platform.machine() / "probes.bpf.o"
# The same probes for a kernel whose programs may say what lies at an address: they read faster.
OBJECT_WITH_CASTS = OBJECT.parent / "casts" / OBJECT.name
_CAST = "bpf_rdonly_cast"
_JIT = Path("/proc/sys/net/core/bpf_jit_enable")  # without it no program calls such a function
# The same for a kernel that carries no types.
OBJECT_WITHOUT_BTF = OBJECT.parent / "no_btf" / OBJECT.name
OBJECTS = (OBJECT_WITH_CASTS, OBJECT, OBJECT_WITHOUT_BTF)
# How the kernel's types are come by: it carries them, or bcc compiles them from its headers.
LOADERS = ("auto", "libbpf", "bcc")
IDLE_NS = 160 * NS_PER_MS  # between two looks at probes that have nothing to tell
THREADS = 8192
FILES = 4096
END_RING_BYTES = 1 << 20
TEXT_RING_BYTES = 8 << 20
# The cookies of uprobes came with it: they say which call a mark is at. Loops came in 5.13.
MINIMUM_KERNEL = (5, 15)
MINIMUM = ".".join(map(str, MINIMUM_KERNEL))
# Those for one link with many uprobes; whether the kernel can is found out when one is made.
_MULTI = ("marks__calls", "marks__returns")
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP)
# In this order: the walks over maps and files look only at members.
_ITERATORS = ("process__seed", "files__held_maps", "files__held_files")
_TICK = "cpu__tick"
_HELD = "files__held"  # in their place without BTF, run for one file after the other
_HOOKED = ("tp_btf/", "raw_tp/", "fentry/", "kprobe/")
_OTHER_FORMS = frozenset(name for variants in VARIANTS for name in variants)
_REFUSED_PROGRAM = re.compile(r"prog '(\w+)'")


def object_build(path: Path = OBJECT) -> str | None:
    """The probe object's CRC-32, which tells builds apart without a library of cryptography, 3 MB
    of them. None: there is none."""
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class ProbeState:
    """What became of one probe. `state`: ok, degraded (in part) or absent."""

    name: str
    state: str
    reason: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """`struct settings` of probes/events.h, fixed before the objects load.

    `tick_hz` is the sampling rate of running threads; a prime, so that it keeps step with nothing.
    `loader` is one of `LOADERS`, and the collector's own.
    """

    short_wait_ns: int = 100_000
    min_file_bytes: int = 1 << 20
    event_ring_bytes: int = 8 << 20
    text_ring_bytes: int = TEXT_RING_BYTES
    tick_hz: int = 251
    loader: str = "auto"
    own_tgid: int = field(default_factory=os.getpid)

    def packed(self) -> bytes:
        begin, end = kernel_function("handle_mm_fault") or (0, 0)
        head = struct.pack(
            "<QQQQII",
            self.short_wait_ns,
            self.min_file_bytes,
            begin,
            end,
            self.own_tgid,
            self.event_ring_bytes,
        )
        return head + b"".join(call_tables())


def is_compiled(setting: Path = _JIT) -> bool:
    """Whether the kernel compiles BPF programs; where nobody can set it, it does."""
    try:
        return setting.read_text().strip() != "0"
    except OSError:
        return True


def kernel_function(name: str) -> tuple[int, int] | None:
    """[begin, end) of a kernel function from /proc/kallsyms, or None where addresses are hidden."""
    wanted = f" {name}\n"
    begin = 0
    following = 0
    table = Path("/proc/kallsyms")
    if not table.exists():  # CONFIG_KALLSYMS=n
        return None
    with table.open() as symbols:
        for line in symbols:
            if line.endswith(wanted) and line[17] in "tT":
                begin = int(line[:16], 16)
                break
        if not begin:
            return None
        # The table is in address order up to the modules: the next symbol ends the function.
        for line in symbols:
            following = int(line[:16], 16)
            if following > begin:
                break
    return (begin, following) if following > begin else None


class ProbeObject:
    """The object of all probes, opened anew for each attempt to load it.

    A program is named `<stem>__<what>`; `programs` maps the whole name. `types`: raw BTF to place
    fields by, instead of the kernel's own.
    """

    def __init__(self, path: Path = OBJECT, types: bytes | None = None) -> None:
        if not path.exists():
            raise Unsupported(
                f"the probes were not built ({path.name} is missing)",
                next_step="run scripts/setup (it needs clang and libbpf-dev)",
            )
        lib = library()
        libbpf.forget_words()
        self._types = _in_memory(types) if types is not None else None
        opts = libbpf.OpenOpts(sz=c.sizeof(libbpf.OpenOpts))
        if self._types is not None:
            opts.btf_custom_path = f"/proc/self/fd/{self._types}".encode()
        self.pointer = libbpf.present(
            f"open {path.name}", lib.bpf_object__open_file(str(path).encode(), c.byref(opts))
        )
        self.programs: dict[str, Pointer] = {}
        self.links: list[Pointer] = []
        self.named_links: dict[str, Pointer] = {}
        self.link_fds: list[int] = []
        program = lib.bpf_object__next_program(self.pointer, None)
        while program:
            self.programs[lib.bpf_program__name(program).decode()] = Pointer(program)
            program = lib.bpf_object__next_program(self.pointer, program)

    def section(self, name: str) -> str:
        return str(library().bpf_program__section_name(self.programs[name]).decode())

    def is_loaded(self, name: str) -> bool:
        return bool(library().bpf_program__fd(self.programs[name]) >= 0)

    def maps(self) -> Iterable[tuple[str, Pointer]]:
        lib = library()
        current = lib.bpf_object__next_map(self.pointer, None)
        while current:
            yield lib.bpf_map__name(current).decode(), Pointer(current)
            current = lib.bpf_object__next_map(self.pointer, current)

    def value_bytes(self, name: str) -> int:
        """The size of a map's values."""
        return int(library().bpf_map__value_size(dict(self.maps())[name]))

    def load(
        self, settings: Settings, without: Iterable[str], maps: Mapping[str, int] | None = None
    ) -> None:
        """Writes the settings and loads all programs but `without`; raises `BpfError`. `maps`:
        descriptors of another object's maps, to be used by this one too."""
        lib = library()
        sizes = {"events": settings.event_ring_bytes, "texts": settings.text_ring_bytes}
        for name, pointer in self.maps():
            if name in sizes:
                lib.bpf_map__set_max_entries(pointer, sizes[name])
            elif name.endswith(".rodata"):
                _write_settings(pointer, settings.packed())
            if maps and not name.endswith(".rodata"):
                libbpf.checked("reuse a map", lib.bpf_map__reuse_fd(pointer, maps[name]))
        for name in _MULTI:
            lib.bpf_program__set_expected_attach_type(
                self.programs[name], libbpf.TRACE_UPROBE_MULTI
            )
        for name in without:
            lib.bpf_program__set_autoload(self.programs[name], False)
        libbpf.checked("load the probes", lib.bpf_object__load(self.pointer))

    def close(self) -> None:
        for link in (*self.links, *self.named_links.values()):
            library().bpf_link__destroy(link)
        self.links.clear()
        self.named_links.clear()
        for fd in self.link_fds:
            os.close(fd)
        self.link_fds.clear()
        library().bpf_object__close(self.pointer)
        if self._types is not None:
            os.close(self._types)
            self._types = None


class ProbeSession:
    """All probes of one recording.

    `load`, then `attach`, then `seed` the target's processes. `states` says what became of each
    probe, by stem.
    """

    is_probed = True
    slowest_ns = IDLE_NS

    def __init__(self, settings: Settings, probes: Sequence[Probe] = PROBES) -> None:
        self.settings = settings
        self._probes = {probe.stem: probe for probe in probes}
        self.states = {stem: ProbeState(stem, "ok") for stem in self._probes}
        # What became of those that only a target with files on certain file systems needs.
        self.if_needed: dict[str, ProbeState] = {}
        self.loader = settings.loader
        if self.loader == "auto":
            self.loader = "libbpf" if VMLINUX.exists() else "bcc"
        self._types: bytes | None = None
        self._casts = False
        self._attached: set[str] = set()
        self._without_hook: set[str] = set()
        self._object: ProbeObject | None = None
        self._tick_fds: dict[int, int] = {}  # by CPU
        self._tick_hz = settings.tick_hz
        self._maps: dict[str, int] = {}
        self._missing: dict[str, str] = {}  # programs with nothing to attach to, and why
        self._awaited: set[str] = set()  # modules that would bring it
        self._latecomers: Latecomers | None = None
        self._opener: perf_events.Opener | None = None
        self._late: dict[str, int] = {}  # programs attached since: their descriptors
        self._attached_ns = 0

    # -- set up -------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads every probe this kernel takes; raises only if a required one is refused.

        A program the kernel refuses is left out and the rest tried again.
        """
        if self.loader == "bcc":
            self._types = _types_of_headers(chosen=self.settings.loader == "bcc")
            without = self._undescribed(self._types)
        else:
            without = self._unavailable()
        while self._object is None:
            candidate = self._open()
            without |= {n for n in candidate.programs if n.partition("__")[0] not in self._probes}
            try:
                candidate.load(self.settings, without)
            except BpfError as error:
                candidate.close()
                without.add(self._refused(error, without))
            else:
                self._object = candidate
        self._mark_absent()
        self._maps = {n: int(library().bpf_map__fd(p)) for n, p in self._object.maps()}
        self._tail_bytes = self._object.value_bytes("quiet")
        self._map_memory()

    def _open(self) -> ProbeObject:
        if self._types:
            return ProbeObject(OBJECT_WITHOUT_BTF, self._types)
        return ProbeObject(OBJECT_WITH_CASTS if self._casts else OBJECT)

    def _undescribed(self, types: bytes) -> set[str]:
        """Programs whose types the headers do not have; their probes are marked degraded."""
        lacking = {
            stem: [name for name in probe.types if not libbpf.has_struct(types, name)]
            for stem, probe in self._probes.items()
        }
        names = self._open()
        try:
            without = {p for p in names.programs if lacking.get(p.partition("__")[0])}
        finally:
            names.close()
        for program in sorted(without):
            missing = lacking[program.partition("__")[0]]
            self._leave_out(program, f"the kernel's headers do not describe {_or(missing)}")
        return without

    def _unavailable(self) -> set[str]:
        """Programs whose tracepoint this kernel has not; their probes are marked degraded."""
        kernel, names = KernelTypes(), ProbeObject()
        try:
            self._casts = kernel.has_function(_CAST) and is_compiled()
            without = self._look_for_hooks(kernel, names)
            self._awaited = self._absent_modules()
        finally:
            names.close()
            kernel.close()
        self._leave_out_missing()
        return without

    def _absent_modules(self) -> set[str]:
        """Those that are not loaded and may bring what is missing."""
        needy = {self._probes[name.partition("__")[0]] for name in self._missing}
        modules = {module for probe in needy for module in probe.modules}
        return {m for m in modules if not (_MODULES / m).exists()}

    def _look_for_hooks(self, kernel: KernelTypes, names: ProbeObject) -> set[str]:
        """Notes which programs lack theirs; gives them, with those that another form serves for.

        Whether a kernel takes fentry is found out when it is attached: its kprobe is loaded too.
        """
        reasons = {p: self._why_not(kernel, names, p) for p in names.programs}
        self._missing = {program: reason for program, reason in reasons.items() if reason}
        without = set(self._missing)
        for variants in VARIANTS:
            fitting = [program for program in variants if program not in self._missing]
            without |= set(fitting[1:]) - {_kprobe_of(program) for program in fitting[:1]}
        return without

    def _leave_out_missing(self) -> None:
        """Of several forms one is enough, and if none fits, one reason is."""
        served = set()
        for variants in VARIANTS:
            fits = any(program not in self._missing for program in variants)
            served |= set(variants) if fits else set(list(variants)[1:])
        for program, reason in self._missing.items():
            if program not in served:
                self._leave_out(program, reason)

    def _why_not(self, kernel: KernelTypes, names: ProbeObject, program: str) -> str:
        """Why a program finds nothing to attach to here; "" if it does."""
        section, _, hook = names.section(program).partition("/")
        probe = self._probes.get(program.partition("__")[0])
        if section not in ("tp_btf", "fentry", "kprobe") or probe is None:
            return ""
        loaded = not probe.modules or any(map(kernel.has_module, probe.modules))
        # Without the module it may be built in: one look tells for all of the probe.
        if not loaded and not kernel.has_tracepoint(probe.needs[0][0]):
            if (_MODULES / probe.modules[0]).exists():
                return f"the module {probe.modules[0]} carries no types (BTF)"
            return _not_loaded(probe)
        if section != "tp_btf":
            return (
                "" if kernel.has_function(hook, probe.modules) else f"this kernel has no {hook}()"
            )
        if not kernel.has_tracepoint(hook, probe.modules):
            return _no_tracepoint(hook)
        if not kernel.has_tracepoint(hook) and "CAP_SYS_ADMIN" not in privilege.held():
            return f"without CAP_SYS_ADMIN the types of {hook}'s module cannot be had"
        wanted = next((v[program] for v in VARIANTS if program in v), None)
        if wanted and kernel.arguments(hook, probe.modules) != wanted:
            return f"this kernel has another form of the tracepoint {hook}"
        return ""

    def _leave_out(self, program: str, reason: str) -> None:
        """Marks the program's probe degraded."""
        stem = program.partition("__")[0]
        probe = self._probes.get(stem)
        if probe is None:
            return
        if probe.required:
            raise Unsupported(
                f"the probe for the {probe.title} cannot be used: {reason}",
                minimum_kernel=MINIMUM,
                next_step="`ttftprof doctor` shows what this kernel offers",
            )
        states = self.if_needed if probe.filesystems else self.states
        before = states.get(stem, ProbeState(stem, "ok"))
        states[stem] = ProbeState(
            stem,
            "degraded",
            _joined(before.reason, reason),
            _joined(before.lost, probe.cost_of(program)),
        )

    def states_for(self, fstypes: Iterable[str]) -> list[ProbeState]:
        """What became of every probe, for a target with files on these file systems.

        A probe for others is ok whatever became of it: its absence costs nothing.
        """
        used = set(fstypes)
        found = []
        for stem, state in self.states.items():
            probe = self._probes[stem]
            if probe.filesystems and not any(map(probe.serves, used)):
                found.append(ProbeState(stem, "ok", f"no file lies on {_or(probe.filesystems)}"))
            else:
                found.append(self.if_needed.get(stem, state))
        return found

    def _refused(self, error: BpfError, without: set[str]) -> str:
        """The program the kernel refused. Raises where it refuses all, or it is not known."""
        lacking = lacking_capabilities()
        if error.errno in (errno.EPERM, errno.EACCES) and lacking:
            raise NotPermitted(
                f"the kernel does not let this user load BPF programs: {', '.join(lacking)} "
                "is missing",
                "run it with sudo; in a container or under lockdown, `ttftprof doctor` tells more",
            ) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise too_many_files() from error
        found = _REFUSED_PROGRAM.search(error.detail)
        if not found and error.errno in (errno.EPERM, errno.EACCES):
            raise _forbidden() from error
        if not found or found[1] in without:
            raise Unsupported(
                f"the kernel refuses the probes: {error.detail or error.strerror}",
                minimum_kernel=MINIMUM,
                next_step="`ttftprof doctor` shows what this kernel offers",
            ) from error
        if _kprobe_of(found[1]) in without | {found[1]}:  # else that may serve
            self._leave_out(found[1], self._in_place_of(found[1], error.detail))
        return found[1]

    def _in_place_of(self, program: str, refusal: str) -> str:
        """Why a form is refused; of one that stands in for another, first why that is not there."""
        for variants in VARIANTS:
            for other in variants if program in variants else ():
                if other in self._missing:
                    return f"{self._missing[other]}; instead of it, {refusal}"
        return refusal

    def _mark_absent(self) -> None:
        """A degraded probe of which no program was loaded, or attached, is absent."""
        loaded = {name for name in self._loaded.programs if self._loaded.is_loaded(name)}
        there = (loaded - self._without_hook) | self._late.keys()
        left = {name.partition("__")[0] for name in there}
        for states in (self.states, self.if_needed):
            for stem, state in states.items():
                if state.state == "degraded" and stem not in left:
                    cost = self._probes[stem].cost_of_absence
                    states[stem] = replace(state, state="absent", lost=cost)

    def _map_memory(self) -> None:
        self.events = FixedRing(self._maps["events"], self.settings.event_ring_bytes, EVENT)
        self.ends = FixedRing(self._maps["ends"], END_RING_BYTES, THREAD_SLOT)
        self.texts = TextRing(self._maps["texts"], self.settings.text_ring_bytes)
        self.threads = map_array(self._maps["threads"], THREAD_SLOT, THREADS)
        self.files = map_array(self._maps["files"], FILE_SLOT, FILES)
        self.control = map_array(self._maps["control"], CONTROL, 1)

    @property
    def _loaded(self) -> ProbeObject:
        if self._object is None:
            raise RuntimeError("load() comes first")
        return self._object

    # -- arm ----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attaches all probes; the process tree first, so that no child slips through."""
        self._fill_dispatch()
        for forms in self._choices():
            self._attach_first(forms)
        if self._types is not None:  # with BTF it is known before anything is loaded
            self._awaited = self._absent_modules()
        self._mark_absent()
        self._attached_ns = now_ns()

    def _choices(self) -> list[list[str]]:
        """What is loaded and has a hook, in the order of attaching; of the forms in one list the
        first that the kernel takes serves."""
        loaded = [n for n in self._loaded.programs if self._loaded.is_loaded(n)]
        alone = [n for n in loaded if n not in HANDLERS and n not in _OTHER_FORMS]
        alone.sort(key=lambda n: not n.startswith("process__"))
        # What reads more arguments than a hook passes, the kernel refuses: the longest comes first.
        several = [[n for n in _longest_first(v) if n in loaded] for v in VARIANTS]
        return [*([name] for name in alone), *several]

    def _attach_first(self, forms: Sequence[str]) -> None:
        """The first of several forms that the kernel takes."""
        refusals = []
        if self._attached.intersection(forms):
            return
        for name in forms:
            try:
                self._attach_program(name, self._loaded.programs[name])
            except BpfError as error:
                refusals.append((name, error))
            else:
                self._attached.add(name)
                return
        self._without_hook |= {name for name, _ in refusals}
        for name, refusal in refusals[:1]:
            reason = self._in_place_of(name, self._why_not_attached(name, refusal))
            self._leave_out(name, reason)
            if self._types is not None:
                self._missing |= {form: reason for form, _ in refusals}

    def _why_not_attached(self, name: str, error: BpfError) -> str:
        if error.errno != errno.ENOENT:
            return str(error)
        probe = self._probes[name.partition("__")[0]]
        if probe.modules and not any((_MODULES / m).exists() for m in probe.modules):
            return _not_loaded(probe)
        return _no_tracepoint(self._loaded.section(name).partition("/")[2])

    def _attach_program(self, name: str, program: Pointer) -> None:
        section = self._loaded.section(name)
        if section == "perf_event":
            self._attach_ticks(program)
        elif section.startswith(_HOOKED):
            link = library().bpf_program__attach(program)
            self._loaded.named_links[name] = libbpf.present(f"attach {name}", link)

    def begin(self) -> None:
        """All that runs beside this process runs already."""

    def keep_helpers(self) -> None:
        """What needs more rights than are kept has small processes from now on: probes of modules
        that are not loaded yet are attached when they are, events are opened. To be called after
        `attach`, while this process has one thread."""
        if perf_events.are_for_admin_only():
            self._opener = perf_events.Opener()
        if self._awaited:
            self._await_modules()

    def _await_modules(self) -> None:
        kept = [*self._maps.values()]
        if self._types is None:
            self._latecomers = Latecomers(self._awaited, self._attach_late, kept)
            return
        kept += [library().bpf_program__fd(self._loaded.programs[name]) for name in self._missing]
        self._latecomers = Latecomers(
            self._awaited, self._attach_late_by_name, kept, with_types=False
        )

    def _attach_late(self) -> list[Attached]:
        """Attaches what was missing and is not any more. Runs in a process of its own."""
        before = set(self._missing)
        kernel, late = KernelTypes(), self._open()
        without = self._look_for_hooks(kernel, late)
        found = before - without
        if not found:
            return []
        late.load(self.settings, set(late.programs) - found, self._maps)
        links: dict[str, Pointer] = {}
        for name in sorted(found, key=lambda n: n.endswith(ON_ENTRY[1])):
            if any(_kprobe_of(other) == name for other in links):
                continue  # attached by fentry
            link = library().bpf_program__attach(late.programs[name])
            if link or _kprobe_of(name) not in found - {name}:
                links[name] = libbpf.present(f"attach {name}", link)
        return _attached(late, links)

    def _attach_late_by_name(self) -> list[Attached]:
        """The same without BTF, where a program is loaded before there is what it is attached to;
        of several forms the first that the kernel takes. Runs in a process of its own."""
        links: dict[str, Pointer] = {}
        for forms in self._choices():
            if not self._missing.keys() >= set(forms):
                continue
            for name in forms:
                if link := library().bpf_program__attach(self._loaded.programs[name]):
                    links[name] = Pointer(link)
                    break
        for name in links:
            self._missing.pop(name)
        return _attached(self._loaded, links)

    def take_late(self, used: Iterable[str]) -> None:
        """Takes over what was attached since the last call, and says so in the states. `used`: the
        types of the file systems that hold files followed so far."""
        if self._latecomers is None:
            return
        ns, came = self._latecomers.take()
        if not came:
            return
        for attached in came:
            self._missing.pop(attached.name, None)
            self._late[attached.name] = attached.program_fd
            self._loaded.link_fds.append(attached.link_fd)
        stems = {attached.name.partition("__")[0] for attached in came}
        for stem in stems:
            self.if_needed.pop(stem, None)
        self._leave_out_missing()
        self._mark_absent()
        for stem in stems:
            self.if_needed[stem] = self._since(ns, stem, used)

    def _since(self, ns: int, stem: str, used: Iterable[str]) -> ProbeState:
        """The state of a probe that is there since a moment after recording began."""
        state = self.if_needed.get(stem, ProbeState(stem, "ok"))
        when = self._since_arming(ns)
        state = replace(
            state, reason=_joined(state.reason, f"attached {when}, as its module was loaded")
        )
        if not any(map(self._probes[stem].serves, used)):
            return state
        lost = _joined(state.lost, "reads before that are not seen")
        return replace(state, state="degraded", lost=lost)

    def _fill_dispatch(self) -> None:
        for name, slot in HANDLERS.items():
            program = self._loaded.programs[name]
            if self._loaded.is_loaded(name):
                value = struct.pack("<I", library().bpf_program__fd(program))
                libbpf.map_update(self._maps["handlers"], struct.pack("<I", slot), value)

    def _attach_ticks(self, program: Pointer) -> None:
        for cpu in online_cpus():
            self._attach_tick(program, cpu)

    def _attach_tick(self, program: Pointer, cpu: int) -> None:
        fd = self._clock_event(cpu)
        self._loaded.named_links[f"tick {cpu}"] = libbpf.attach_event(program, fd)
        self._tick_fds[cpu] = fd  # the link owns it

    def _clock_event(self, cpu: int) -> int:
        try:
            return libbpf.open_clock_event(cpu, self._tick_hz)
        except BpfError as error:
            if error.errno != errno.EACCES or self._opener is None:
                raise
            return self._opener.clock(cpu, self._tick_hz)

    def follow_cpus(self, after_suspend: bool = False) -> None:
        """Ticks on CPUs that were switched on since the last look; the kernel ends for good those
        of one that is switched off. To be called now and then, and after a suspend, for which all
        but one go off and come on again faster than anybody looks."""
        if not self._tick_fds:
            return
        online = set(online_cpus())
        for cpu in self._tick_fds.keys() - (set() if after_suspend else online):
            del self._tick_fds[cpu]
            library().bpf_link__destroy(self._loaded.named_links.pop(f"tick {cpu}"))
        for cpu in sorted(online - self._tick_fds.keys()):
            self._follow_cpu(cpu, "the machine was suspended" if after_suspend else "it came on")

    def _follow_cpu(self, cpu: int, why: str) -> None:
        before = self.states["cpu"]
        try:
            self._attach_tick(self._loaded.programs[_TICK], cpu)
        except BpfError as error:
            reason, cost = f"CPU {cpu}: {why}, but {error}", self._probes["cpu"].cost_of_absence
            degraded = ProbeState("cpu", "degraded", _joined(before.reason, reason), cost)
            self.states["cpu"] = degraded
        else:
            since = f"CPU {cpu} is looked at since {self._since_arming(now_ns())}, when {why}"
            self.states["cpu"] = replace(before, reason=_joined(before.reason, since))

    def _since_arming(self, ns: int) -> str:
        return f"{(ns - self._attached_ns) / NS_PER_S:.1f} s after recording began"

    def drop(self, programs: Collection[str], reason: str) -> None:
        """Takes programs away while recording, whatever form serves for them; their probe is
        degraded from then on."""
        for name in (f"{program}{form}" for program in programs for form in ("", *ON_ENTRY)):
            link = self._loaded.named_links.pop(name, None)
            if link is not None:
                library().bpf_link__destroy(link)
                self._leave_out(name, reason)

    def slow_ticks(self, hz: int, reason: str, lost: str) -> None:
        """Running threads are looked at so many times a second from now on."""
        self._tick_hz = hz
        for fd in self._tick_fds.values():
            libbpf.set_clock_hz(fd, hz)
        self.states["cpu"] = ProbeState("cpu", "degraded", reason, lost)

    def seed(self, tgids: Collection[int]) -> None:
        """Makes every thread of these processes a member, and notes what files they hold.

        Idempotent.
        """
        wanted = [struct.pack("<I", tgid) for tgid in tgids]
        for key in wanted:
            libbpf.map_update(self._maps["seeds"], key, bytes(4))
        for name in _ITERATORS:
            if name in self._loaded.programs and self._loaded.is_loaded(name):
                self._iterate(name)
        for key in wanted:
            libbpf.map_delete(self._maps["seeds"], key)
        if _HELD in self._loaded.programs and self._loaded.is_loaded(_HELD):
            held = library().bpf_program__fd(self._loaded.programs[_HELD])
            for tgid in tgids:
                for fd, is_open in held_files(tgid):
                    libbpf.run_program(held, (fd, tgid, is_open))

    def _iterate(self, name: str) -> None:
        """Runs an iterator program over everything it iterates; one that walks itself, once."""
        program = self._loaded.programs[name]
        if self._loaded.section(name) == "raw_tp":
            libbpf.run_program(library().bpf_program__fd(program))
            return
        libbpf.iterate(program)

    def watch_port(self, port: int, tgid: int) -> None:
        """Connections to this port are followed from their handshake on."""
        key, value = struct.pack("<I", port), struct.pack("<I", tgid)
        libbpf.map_update(self._maps["listen_ports"], key, value)

    def take_successors(self, comm: str, cgroup: str = "") -> None:
        """From now on a process executed under this name becomes a member, once every member of
        the name is gone or on its way out.

        `cgroup`: the name of a control group that it must run in, or below. To be called before
        `seed`.
        """
        key = comm.encode()[:15].ljust(16, b"\0")
        libbpf.map_update(self._maps["successors"], key, cgroup.encode()[:63].ljust(64, b"\0"))

    def set_quiet(self, socket: int, turn: int) -> None:
        """From now on the small writes on this socket are only counted, and the last ones kept,
        until its turn is over. Without effect if it is already, or if too many are quiet."""
        tail = struct.pack("<I", turn).ljust(self._tail_bytes, b"\0")
        with suppress(BpfError):  # the map is full: the writes are looked at one by one
            libbpf.map_update(self._maps["quiet"], struct.pack("<Q", socket), tail)

    def attach_marks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        """Uprobes on the calls and returns at (offset, cookie) `places` of a file; `BpfError`.

        In one link where the kernel can: taking a single uprobe away costs it 0.1 s.
        """
        try:
            for name, on_return in zip(_MULTI, (False, True), strict=True):
                fd = library().bpf_program__fd(self._loaded.programs[name])
                self._loaded.link_fds.append(libbpf.link_uprobes(fd, path, places, on_return))
        except BpfError as error:
            if error.errno not in _CANNOT:
                raise
            for offset, cookie in places:
                self._attach_mark(path, offset, cookie, False)
                self._attach_mark(path, offset, cookie, True)

    def _attach_mark(self, path: str, offset: int, cookie: int, on_return: bool) -> None:
        program = self._loaded.programs["marks__return" if on_return else "marks__call"]
        opts = libbpf.UprobeOpts(
            sz=c.sizeof(libbpf.UprobeOpts), bpf_cookie=cookie, retprobe=on_return
        )
        libbpf.forget_words()
        link = library().bpf_program__attach_uprobe_opts(
            program, -1, path.encode(), offset, c.byref(opts)
        )
        try:
            held = libbpf.present(f"uprobe in {path}", link)
        except BpfError as error:
            if error.errno != errno.EACCES or self._opener is None:
                raise
            event = self._opener.uprobe(path, offset, on_return)
            held = libbpf.attach_event(program, event, cookie)
        self._loaded.links.append(held)

    # -- read ---------------------------------------------------------------------------------

    def lost(self) -> list[int]:
        """The kernel's loss counters, in the order of `events.LOST`."""
        return [int(n) for n in self.control["lost"][0]]

    def unanswered(self, now_ns: int) -> Records:
        """The remote reads that still wait for their answer, as records; the map is left as it is.

        The duration is that of the wait so far.
        """
        found = []
        fd = self._maps["remotes"]
        for key in libbpf.map_keys(fd, REMOTE_KEY_BYTES):
            try:
                found.append(libbpf.map_lookup(fd, key, REMOTE_REQUEST.itemsize))
            except BpfError:
                continue  # answered meanwhile
        waiting = np.frombuffer(b"".join(found), REMOTE_REQUEST)
        records = np.zeros(len(waiting), EVENT)
        for name in ("start_ns", "tid", "tgid", "dev", "ino"):
            records[name] = waiting[name]
        records["duration_ns"] = np.maximum(now_ns - waiting["start_ns"].astype(np.int64), 0)
        records["kind"] = Kind.REMOTE
        records["flags"] = waiting["flags"] | np.uint16(RemoteFlag.UNANSWERED)
        records["a"] = waiting["bytes"].astype(np.uint64) << np.uint64(32)
        records["b"] = waiting["offset"]
        return records

    def program_counts(self) -> dict[str, libbpf.ProgramCounts]:
        """What the kernel counted for every program but those that walk over what exists."""
        loaded = self._loaded
        fds = {n: library().bpf_program__fd(p) for n, p in loaded.programs.items()}
        fds = {n: fd for n, fd in fds.items() if loaded.is_loaded(n)} | self._late
        return {
            name: libbpf.program_counts(fdinfo(fd))
            for name, fd in fds.items()
            if name not in (*_ITERATORS, _HELD)
        }

    def close(self) -> None:
        if self._latecomers is not None:
            self._latecomers.close()
            self._latecomers = None
        if self._opener is not None:
            self._opener.close()
            self._opener = None
        for fd in self._late.values():
            os.close(fd)
        self._late.clear()
        if self._object is not None:
            self._object.close()
            self._object = None


def _longest_first(variants: Mapping[str, int]) -> list[str]:
    return sorted(variants, key=lambda name: -variants[name])


def _attached(loaded: ProbeObject, links: Mapping[str, Pointer]) -> list[Attached]:
    lib = library()
    return [
        Attached(name, lib.bpf_program__fd(loaded.programs[name]), lib.bpf_link__fd(link))
        for name, link in links.items()
    ]


def fdinfo(fd: int) -> str:
    """Asked of fifty programs every two seconds."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY)
    try:
        return os.read(info, 4096).decode()
    finally:
        os.close(info)


def _forbidden() -> NotPermitted:
    """Whoever refuses a root with every capability does not say so."""
    found = guards()
    if not found:
        return NotPermitted(
            "the kernel forbids the probes, though no capability is missing",
            "`dmesg` or `journalctl -k` may tell who denied it; --loader proc records without them",
        )
    return NotPermitted(
        "the kernel forbids the probes, though no capability is missing; in force on this process: "
        + ", ".join(guard.what for guard in found),
        "; ".join(guard.remedy for guard in found) + "; or --loader proc, which shows less",
    )


def _not_loaded(probe: Probe) -> str:
    return f"the module {probe.modules[0]} was not loaded while recording ran"


def _no_tracepoint(hook: str) -> str:
    return f"this kernel has no tracepoint {hook}"


def _kprobe_of(program: str) -> str:
    """What stands in for a program by fentry that the kernel cannot attach; itself for others."""
    fentry, kprobe = ON_ENTRY
    return program.removesuffix(fentry) + kprobe if program.endswith(fentry) else program


def _types_of_headers(chosen: bool) -> bytes:
    """Compiled by bcc. Where nobody chose that, an error says why it was tried."""
    try:
        return compiled_types()
    except Unsupported as error:
        if chosen:
            raise
        hint = "; in Windows, `wsl --update` brings a kernel with BTF" if is_wsl() else ""
        raise Unsupported(
            f"this kernel carries no types (BTF), and {error.message}",
            next_step=f"{error.next_step}{hint}; or a kernel with BTF, as distributions have since "
            "2021; or --loader proc, which needs neither and shows less",
        ) from error


def _in_memory(content: bytes) -> int:
    """A descriptor of a file in memory."""
    fd = os.memfd_create("types")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    return fd


def _joined(before: str, now: str) -> str:
    """Both, each once."""
    return "; ".join(dict.fromkeys(filter(None, [*before.split("; "), now])))


def _or(names: Iterable[str]) -> str:
    *most, last = sorted(names)
    return f"{', '.join(most)} or {last}" if most else last


def online_cpus() -> list[int]:
    """Numbers of the CPUs that are on, from sysfs ("0-3,8")."""
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _write_settings(rodata: Pointer, packed: bytes) -> None:
    """Fills the object's constants. Each source left its own copy of `settings` in .rodata."""
    size = c.c_size_t()
    address = library().bpf_map__initial_value(rodata, c.byref(size))
    copies, rest = divmod(size.value, len(packed))
    if not address or rest:
        raise BpfError(f"settings of {len(packed)} bytes, not {size.value}", errno.EINVAL)
    c.memmove(address, packed * copies, size.value)
