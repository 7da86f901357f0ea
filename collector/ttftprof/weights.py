"""From what the user named to open files: a path in a process's root, a folder's weights, shards.

Files are held by descriptors opened without reading (O_PATH), so what is looked at and measured is
one and the same file even if its name is deleted or given to another meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from ttftprof.errors import NotPermitted, TargetError, TtftprofError, UsageError
from ttftprof.reports.safe import clip_path, plain

SUFFIXES = frozenset(
    (".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".engine", ".npz")
)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<part>\d{4,6})-of-(?P<all>\d{4,6})(?P<suffix>\..+)?")
_MAX_FOLDERS_DEEP, _MAX_ENTRIES = 6, 200_000
_MAX_FILES = 500  # held open at once
_MAX_SHOWN = 100

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_SYS_OPENAT2 = 437  # the same on every architecture; Linux 5.6
_RESOLVE_IN_ROOT = 0x10  # linux/openat2.h


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file held open by O_PATH. `path` is as the process sees it, links resolved."""

    fd: int
    path: str
    mount_id: int | None
    device: int
    inode: int
    size_bytes: int

    def reopen(self, flags: int = os.O_RDONLY) -> int:
        """A descriptor of its own on the same file (its own readahead state), name or no name."""
        return os.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a PATH stands for: one file, or the shards of one model; `chosen` says why that."""

    asked: str
    files: tuple[OpenFile, ...]
    chosen: str
    _held: ExitStack

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._held.close()


def shown(path: str) -> str:
    """A path fit for a message."""
    return clip_path(plain(path), _MAX_SHOWN)


def open_weights(asked: str, pid: int | None = None) -> Weights:
    """Opens what `asked` names in the root of process `pid` (None: this one).

    A folder stands for the biggest model in it. Raises UsageError for what is no such file,
    NotPermitted, TargetError if the process is gone.
    """
    try:
        with ExitStack() as held:
            weights = _open(asked, pid, held)
            return Weights(weights.asked, weights.files, weights.chosen, held.pop_all())
    except OSError as error:
        raise _explained(error, asked, pid) from error


def _open(asked: str, pid: int | None, held: ExitStack) -> Weights:
    if not asked or "\0" in asked:
        raise UsageError("an empty path names nothing", "name a model file or its folder")
    fd = _hold(held, open_path(asked, pid))
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return Weights(asked, (_checked(fd, asked),), "", held)
    if not stat.S_ISDIR(mode):
        raise UsageError(
            f"{shown(asked)} is {_kind(mode)}, not a file", "name a model file or its folder"
        )
    names, chosen = biggest_model(Path(f"/proc/self/fd/{fd}"))
    if not names:
        raise UsageError(f"no file to measure in {shown(asked)}", "name the model file itself")
    files = [_checked(_hold(held, open_path(str(Path(asked, n)), pid)), n) for n in names]
    return Weights(asked, tuple(files), chosen, held)


def _hold(held: ExitStack, fd: int) -> int:
    held.callback(os.close, fd)
    return fd


def open_path(path: str, pid: int | None) -> int:
    """An O_PATH descriptor of a path as process `pid` sees it. Nothing is read; nothing blocks."""
    if pid is None:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not path.startswith("/"):
        path = str(Path(f"/proc/{pid}/cwd").readlink() / path)
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    try:
        how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
        fd = _LIBC.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, ctypes.sizeof(how))
        if fd >= 0:
            return int(fd)
        code = ctypes.get_errno()
        if code == errno.ENOSYS:  # before 5.6: absolute links are followed in our own root
            return os.open(f"/proc/{pid}/root{path}", os.O_PATH | os.O_CLOEXEC)
        raise OSError(code, os.strerror(code), path)
    finally:
        os.close(root)


def _checked(fd: int, name: str) -> OpenFile:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise UsageError(f"{shown(name)} is {_kind(facts.st_mode)}, not a file")
    return OpenFile(
        fd=fd,
        path=str(Path(f"/proc/self/fd/{fd}").readlink()),
        mount_id=mount_id(Path(f"/proc/self/fdinfo/{fd}").read_text()),
        device=facts.st_dev,
        inode=facts.st_ino,
        size_bytes=facts.st_size,
    )


def mount_id(fdinfo: str) -> int | None:
    """The mount an open file lies on, as its fdinfo says; ids are those of mountinfo."""
    match = re.search(r"^mnt_id:\s*(\d+)$", fdinfo, re.MULTILINE)
    return int(match[1]) if match else None


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _explained(error: OSError, asked: str, pid: int | None) -> TtftprofError:
    where = "" if pid is None else f" (as process {pid} sees it)"
    if pid is not None and not Path(f"/proc/{pid}").exists():
        return TargetError(f"there is no process {pid}", "pgrep -a llama")
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(f"{shown(asked)}{where}: {reason}", "sudo ttftprof storage …")
    return UsageError(f"{shown(asked)}{where}: {reason}", "name a model file or its folder")


# -- what a folder holds ---------------------------------------------------------------------------


def biggest_model(folder: Path) -> tuple[list[str], str]:
    """Names below `folder` of the biggest model's files (its shards in order), and why these.

    Files with a suffix of weights come before others; Ollama's blobs have none.
    """
    sizes = dict(_sizes(folder))
    weights = {name: size for name, size in sizes.items() if Path(name).suffix in SUFFIXES}
    groups: dict[str, list[str]] = {}
    for name in weights or sizes:
        groups.setdefault(shard_group(name), []).append(name)
    total = {group: sum(sizes[n] for n in names) for group, names in groups.items()}
    best = max(total, key=lambda group: total[group], default=None)
    if best is None or not total[best]:
        return [], ""
    names = sorted(groups[best])[:_MAX_FILES]
    what = f"{len(names)} shards of {Path(best).name}" if len(names) > 1 else Path(names[0]).name
    return names, f"the biggest of {len(groups)} model(s) in the folder: {what}"


@lru_cache(maxsize=1 << 14)
def shard_group(name: str) -> str:
    """`m-00001-of-00005.gguf` and its like share a group; another file is its own."""
    match = _SHARD.fullmatch(name)
    return f"{match['stem']}-of-{match['all']}{match['suffix'] or ''}" if match else name


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """(name below the folder, size) of its regular files; links to files count, links to folders
    are not followed."""
    left = [("", 0)]
    seen = 0
    while left:
        below, depth = left.pop()
        for entry in _scan(folder / below):
            seen += 1
            if seen > _MAX_ENTRIES:
                return
            name = f"{below}/{entry.name}" if below else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < _MAX_FOLDERS_DEEP:
                        left.append((name, depth + 1))
                elif entry.is_file():
                    yield name, entry.stat().st_size
            except OSError:
                continue


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda e: e.name)
    except OSError:
        return []
