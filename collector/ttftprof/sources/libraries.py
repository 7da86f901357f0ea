"""Finds the calls worth marking in the libraries a process has mapped, and probes them.

A library is probed once, by its file; whatever process maps it later is covered. Every lookup
reads an ELF file of the target and trusts nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ttftprof.engines.driver_calls import DriverCall, calls_in, usual_paths
from ttftprof.engines.markers import SYMBOL_MARKS
from ttftprof.kernel.libbpf import BpfError
from ttftprof.sources.elf import symbol_places
from ttftprof.sources.processes import PROC

Attach = Callable[[str, Sequence[tuple[int, int]]], None]  # path, (offset, cookie) of each call


def symbol_offsets(path: Path, names: set[str]) -> dict[str, int]:
    """{symbol: offset in the file} of the defined functions among `names`; of several versions of
    one, the first."""
    return dict(reversed(symbol_places(path, names)))


def _driver_calls(shown: str, launches: bool = False) -> tuple[DriverCall, ...]:
    """What to probe in a file by its path as /proc shows it."""
    return calls_in(Path(shown.removesuffix(" (deleted)")).name, launches)


class LibraryMarks:
    """Probes marked calls in libraries as they are met, and rare calls into GPU drivers.

    `on_found(path, marks)` tells which marks a library brought; `on_refused(path, reason)` why one
    could not be probed. `launches`: kernel launches too, thousands a second.
    """

    def __init__(
        self,
        attach: Attach,
        on_found: Callable[[str, list[str]], None],
        on_refused: Callable[[str, str], None],
        launches: bool = False,
    ) -> None:
        self._attach = attach
        self._on_found = on_found
        self._on_refused = on_refused
        self._launches = launches
        self._seen: set[tuple[int, int]] = set()
        self._drivers: set[tuple[int, int]] = set()  # inode and size: a device has many numbers
        self.attached = 0
        self.hidden = ""  # what of the target could not be looked at, and why

    def attach_drivers(self, paths: Iterable[str] = usual_paths()) -> None:
        """Probes the GPU drivers of this machine before any process maps them."""
        for path in paths:
            if Path(path).exists():
                self.probe(Path(path), shown=path)

    def scan(self, pid: int, proc: Path = PROC) -> bool:
        """Looks at every executable mapping of a process that was not met before; first at drivers,
        whose first calls come within milliseconds. False if the process is gone."""
        try:
            maps = (proc / str(pid) / "maps").read_text(errors="replace")
        except PermissionError as error:
            self._hide(f"what pid {pid} maps", error)
            return False
        except OSError:
            return False
        mapped = [line.split(None, 5) for line in maps.splitlines()]
        code = [f for f in mapped if len(f) == 6 and "x" in f[1] and f[5].startswith("/")]
        for fields in sorted(code, key=lambda f: not _driver_calls(f[5])):
            self._meet(pid, fields, proc)
        return bool(mapped)

    def _meet(self, pid: int, fields: list[str], proc: Path) -> None:
        major, _, minor = fields[3].partition(":")
        key = (int(major, 16) << 20 | int(minor, 16), int(fields[4]))
        if key in self._seen:
            return
        self._seen.add(key)
        # As the process sees it, in whatever mount namespace; a deleted file, as after an
        # upgrade, by its mapping, which takes root.
        inside = proc / str(pid) / "root" / fields[5].lstrip("/")
        if fields[5].endswith(" (deleted)"):
            inside = proc / str(pid) / "map_files" / fields[0]
        self.probe(inside, shown=fields[5])

    def probe(self, path: Path, shown: str) -> None:
        """Attaches to whatever this file has of what is known."""
        calls = _driver_calls(shown, self._launches)
        if calls:
            self._probe_driver(path, shown, calls)
        else:
            self._probe_engine(path, shown)

    def _probe_driver(self, path: Path, shown: str, calls: tuple[DriverCall, ...]) -> None:
        """Each exported variant and version of each call; an address that two names have, once."""
        try:
            status = path.stat()
        except OSError:
            return
        if (status.st_ino, status.st_size) in self._drivers:
            return
        self._drivers.add((status.st_ino, status.st_size))
        by_symbol = {name: call for call in calls for name in call.symbols}
        taken: dict[int, DriverCall] = {}
        for name, offset in sorted(symbol_places(path, set(by_symbol))):
            taken.setdefault(offset, by_symbol[name])
        if not taken:
            return
        try:
            self._attach(str(path), [(at, call.cookie) for at, call in taken.items()])
        except BpfError as error:
            self._on_refused(shown, str(error))
        else:
            self._on_found(shown, sorted({call.name for call in taken.values()}))

    def _probe_engine(self, path: Path, shown: str) -> None:
        offsets = symbol_offsets(path, {name for mark in SYMBOL_MARKS for name in mark.symbols})
        found = [m for m in SYMBOL_MARKS if any(name in offsets for name in m.symbols)]
        if not found:
            self._try_to_read(path, shown)
            return
        places = [(offsets[n], mark.cookie) for mark in found for n in mark.symbols if n in offsets]
        try:
            self._attach(str(path), places)
        except BpfError as error:
            self._on_refused(shown, str(error))
        else:
            self.attached += len(places)
            self._on_found(shown, [mark.name for mark in found])

    def _try_to_read(self, path: Path, shown: str) -> None:
        """Whether a file has nothing that is known, or may not be looked at."""
        try:
            path.open("rb").close()
        except PermissionError as error:
            self._hide(shown, error)
        except OSError:
            pass  # it is gone

    def _hide(self, what: str, error: OSError) -> None:
        self.hidden = self.hidden or f"{what} may not be read: {error.strerror}"
