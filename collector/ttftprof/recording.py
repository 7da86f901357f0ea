"""The recording: one SQLite file of facts, appended while the probes run, never changed after.

Guarantees: what `commit` returned from survives kill -9; the file describes itself (`meta`,
`layouts`) and says whether it is complete; a full disk ends the recording, not what it holds; files
of older versions stay readable, of newer ones and of other programs are refused with a clear error.

Kernel records are stored as one row per drain: a packed array (`batches.data`) with its layout in
`layouts`, columns one after the other, compressed where that pays. Everything else is a plain row,
JSON where it has structure, so that `sqlite3 run.ttft` shows it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import sqlite3
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import numpy as np

from ttftprof.caller import sudo_caller
from ttftprof.columns import (
    UPDATE,
    Columns,
    as_records,
    dtype_of,
    joined,
    layout_of,
    pack,
    unpack,
)
from ttftprof.errors import OutputError, RecordingError
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Records
from ttftprof.gpu_rows import GPU_PROCESS_ROW, GPU_ROW
from ttftprof.sources.mounts import mount_under, mounts_of

if TYPE_CHECKING:
    import tempfile

APPLICATION_ID = 0x54544654  # "TTFT"
VERSION = 1
_MAGIC = b"SQLite format 3\0"
FOLD_EVERY_S = 5.0  # what of a killed recording is in its log alone
_PAGE_RECORDS = 1 << 15  # at least, of what is read part by part
_LAST_ROW = (1 << 63) - 1
_MOST_COMPRESSED = 1032  # bytes out of one, at most: https://zlib.net/zlib_tech.html

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE layouts(stream TEXT PRIMARY KEY, layout TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE batches(
    stream TEXT NOT NULL, first_ns INTEGER NOT NULL, count INTEGER NOT NULL,
    codec TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE facts(kind TEXT NOT NULL, ns INTEGER NOT NULL, fact TEXT NOT NULL);
CREATE TABLE sources(
    name TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT NOT NULL, lost TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE lost(place TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
"""

# The streams of packed arrays and their layouts, as this version writes them.
STREAMS: Mapping[str, np.dtype[Any]] = {
    "events": EVENT,
    "threads": THREAD_ROW,
    "files": FILE_ROW,
    "gpu": GPU_ROW,
    "gpu_processes": GPU_PROCESS_ROW,
}

# File systems on which SQLite's shared-memory index does not work: no write-ahead log there.
_NO_WAL = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuse.sshfs", "afs", "ceph", "virtiofs"}


@dataclass(frozen=True, slots=True)
class Source:
    """One source of facts: `state` is ok, degraded or absent; `lost` what that costs."""

    name: str
    state: str
    reason: str = ""
    lost: str = ""


LOOKED_AT = "proc"  # the loader of a recording without probes


def is_watched(sources: Iterable[Source], name: str) -> bool:
    """Whether a source told anything; one that nobody had yet is not known to be absent."""
    return all(s.name != name or s.state != "absent" for s in sources)


class Sink(Protocol):
    """What a recorder writes to; `Writer` tells what each call means."""

    path: Path
    filesystem: str

    def set_meta(self, key: str, value: Any) -> None: ...
    def add_batch(self, stream: str, records: Records) -> None: ...
    def set_passing(self, stream: str, records: Records) -> None: ...
    def add_fact(self, kind: str, ns: int, fact: Mapping[str, Any]) -> None: ...
    def set_source(self, source: Source) -> None: ...
    def set_lost(self, place: str, count: int) -> None: ...
    def commit(self) -> None: ...
    def close(self, complete: bool) -> None: ...


class Facts(Protocol):
    """A recording as the analysis reads it; `Reader` tells what each call means."""

    path: Path

    @property
    def meta(self) -> dict[str, Any]: ...
    def stream(self, stream: str) -> Records: ...
    def pages(self, stream: str) -> Sequence[Columns]: ...
    def has_field(self, stream: str, field: str) -> bool: ...
    def facts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]: ...
    def sources(self) -> list[Source]: ...
    def lost(self) -> dict[str, int]: ...


def filesystem_of(path: Path) -> str:
    """File-system type under `path`, "" where it cannot be told."""
    mount = mount_under(str(path.resolve()), mounts_of(os.getpid()))
    return mount.fstype if mount is not None else ""


class Writer:
    """Appends facts to a new recording.

    Raises `OutputError` when the file cannot be made, exists, or the disk is full; after that error
    everything committed before it is safe in the file.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        self.filesystem = filesystem_of(path.parent)
        self._wal = not (self.filesystem in _NO_WAL or self.filesystem.startswith("fuse"))
        self._replaced = _set_aside(path, self._wal) if overwrite else []
        try:
            # Open as long as the database is: to close it would let go of SQLite's own locks.
            self._file = _create(path)
        except OutputError:
            self._put_back()
            raise
        if self._wal:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._begun = False
        self._next_fold_s = 0.0
        self._passing: dict[str, int] = {}  # stream -> row of what is replaced by what comes next
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._prepare()
        except (sqlite3.Error, OutputError) as error:
            self.discard()
            raise self._failure(error) if isinstance(error, sqlite3.Error) else error from error

    def _prepare(self) -> None:
        # What we wrote outlives us in the page cache. To wait for the disk would, on ext4, have it
        # write others' data as well, while it is being measured; `close` does so once.
        self._db.execute("PRAGMA synchronous=OFF")
        # Before there is a log: the file itself says whose it is, whatever becomes of the log.
        self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        self._db.execute(f"PRAGMA user_version={VERSION}")
        self._db.execute(f"PRAGMA journal_mode={'WAL' if self._wal else 'TRUNCATE'}")
        self._db.execute("PRAGMA cache_size=-2048")
        self._db.executescript(_SCHEMA)
        self._db.execute("BEGIN")
        for stream, dtype in STREAMS.items():
            self._db.execute(
                "INSERT INTO layouts VALUES(?, ?)", (stream, json.dumps(layout_of(dtype)))
            )
        self.set_meta("complete", False)
        self.commit()

    def _failure(self, error: sqlite3.Error) -> OutputError:
        # The low byte is the code; what is above says more precisely what failed.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            log = f"{self.path}-wal"
            kept = f" and in {shlex.quote(log)} beside it" if Path(log).exists() else ""
            kept = f"what was recorded is in the file{kept}; record again with -o on another disk"
            return OutputError(
                f"the disk under {self.path} is full or failing ({error})",
                kept if self._begun else "nothing was recorded; choose an -o FILE on another disk",
            )
        if self._is_gone():
            return self._gone()
        return OutputError(f"{self.path} cannot be written: {error}", "choose another -o FILE")

    def _is_gone(self) -> bool:
        """Whether the file was removed, or another has taken its name."""
        try:
            return not os.path.samestat(os.fstat(self._file), self.path.lstat())
        except OSError:
            return True

    def _gone(self) -> OutputError:
        return OutputError(
            f"{self.path} was removed or replaced while it was written; what it held is lost",
            "record again, and leave the file alone until the recording ends",
        )

    def _execute(self, statement: str, values: tuple[Any, ...]) -> int:
        """The row that an INSERT made."""
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
            return int(self._db.execute(statement, values).lastrowid or 0)
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def set_meta(self, key: str, value: Any) -> None:
        self._execute(
            "INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, json.dumps(value, sort_keys=True))
        )

    def add_batch(self, stream: str, records: Records) -> None:
        if len(records):
            self._insert_batch(stream, records)

    def _insert_batch(self, stream: str, records: Records) -> int:
        stamp = "start_ns" if stream == "events" else "ns"
        codec, data = pack(records)
        return self._execute(
            "INSERT INTO batches VALUES(?, ?, ?, ?, ?)",
            (stream, int(records[stamp][0]), len(records), codec, data),
        )

    def set_passing(self, stream: str, records: Records) -> None:
        """What is true of now only, and holds if nothing comes after; replaces what was set."""
        row = self._passing.pop(stream, None)
        if row is not None:
            self._execute("DELETE FROM batches WHERE rowid = ?", (row,))
        if len(records):
            self._passing[stream] = self._insert_batch(stream, records)

    def add_fact(self, kind: str, ns: int, fact: Mapping[str, Any]) -> None:
        """One row of structured fact; `kind` is process, file, exchange, mark, mounts, …"""
        self._execute("INSERT INTO facts VALUES(?, ?, ?)", (kind, ns, json.dumps(fact)))

    def set_source(self, source: Source) -> None:
        self._execute(
            "INSERT OR REPLACE INTO sources VALUES(?, ?, ?, ?)",
            (source.name, source.state, source.reason, source.lost),
        )

    def set_lost(self, place: str, count: int) -> None:
        self._execute("INSERT OR REPLACE INTO lost VALUES(?, ?)", (place, count))

    def commit(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("COMMIT")
            now_s = time.monotonic()
            if now_s >= self._next_fold_s:
                self._next_fold_s = now_s + FOLD_EVERY_S
                if self._is_gone():
                    raise self._gone()
                # So that the file alone, without its log, holds nearly all if we are killed.
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def close(self, complete: bool) -> None:
        """Marks the recording (in)complete and folds the log into the one file."""
        self.settle()
        try:
            if self._is_gone():
                raise self._gone()
            self.set_meta("complete", complete)
            self.commit()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            raise self._failure(error) from error
        finally:
            self.abandon()

    def settle(self) -> None:
        """Recording has begun: a file that this one replaces goes, and what is there so far is
        folded with the next commit."""
        self._begun = True
        self._next_fold_s = 0.0
        for _, aside in self._replaced:
            aside.unlink(missing_ok=True)
        self._replaced.clear()

    def abandon(self) -> None:
        """Closes, keeping what was committed."""
        self._db.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def discard(self) -> None:
        """Takes back a recording that never began; a file it was to replace is there again."""
        ours = not self._is_gone()
        self.abandon()
        if ours:
            for end in _SIDE_FILES:
                Path(f"{self.path}{end}").unlink(missing_ok=True)
        self._put_back()

    def _put_back(self) -> None:
        for was, aside in self._replaced:
            aside.rename(was)
        self._replaced.clear()


_SIDE_FILES = ("", "-wal", "-shm", "-journal")


def _set_aside(path: Path, locked: bool) -> list[tuple[Path, Path]]:
    """Moves a recording that is to be replaced, with its log, out of the way until the new one has
    begun: [(where it was, where it is)]. `locked`: who writes one holds a lock on it."""
    if path.exists() and not path.is_symlink() and not path.is_file():
        raise OutputError(f"{path} is no regular file", "name a file with -o FILE")
    if path.exists() and not (is_recording(path) or _is_empty(path)):
        raise OutputError(
            f"{path} is no recording of ttftprof: --force does not replace it",
            "choose another -o FILE",
        )
    if locked and path.exists() and _is_written(path):
        raise OutputError(
            f"{path} is being written by another recorder",
            "wait until it ends, or choose another -o FILE",
        )
    moved = []
    for end in _SIDE_FILES:
        was, now = Path(f"{path}{end}"), Path(f"{path}.replaced{end}")
        try:
            was.rename(now)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(
                f"{path} cannot be replaced: {os.strerror(error.errno or errno.EIO)}",
                "choose another -o FILE",
            ) from error
        moved.append((was, now))
    return moved


def _is_written(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_recording(path: Path) -> bool:
    """Whether a file is a recording by its header, whole or not.

    Layout: the database header of https://www.sqlite.org/fileformat2.html.
    """
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError:
        return False
    return header.startswith(_MAGIC) and header[68:] == APPLICATION_ID.to_bytes(4, "big")


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def _create(path: Path) -> int:
    """Makes an empty file that only its owner may read: the invoking user, under sudo. Its
    descriptor."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o600)
        for end in _SIDE_FILES[1:]:  # of a recording that was here before and was removed
            Path(f"{path}{end}").unlink(missing_ok=True)
    except FileExistsError as error:
        if path.is_dir():
            raise OutputError(f"{path} is a folder", "name a file with -o FILE") from error
        raise OutputError(
            f"{path} exists", "choose another -o FILE, or add --force to replace it"
        ) from error
    except OSError as error:
        raise OutputError(
            f"{path} cannot be created: {os.strerror(error.errno or errno.EIO)}",
            "choose a folder that exists and is writable with -o FILE",
        ) from error
    caller = sudo_caller()
    if caller is not None:
        os.fchown(fd, caller.uid, caller.gid)
    return fd


class Reader:
    """A recording opened to be read; nothing in it is trusted.

    Raises `RecordingError`: no such file, not a recording, damaged, of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_magic()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._db, self._copy = _open_read(path)
        # SQLite's complaint may quote what is no text: then it cannot even be told.
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            raise self._damaged(error) from error
        try:
            self._check_version()
            self._check_size()
            self._check_tables()
            self._layouts = dict(self._read_layouts())
        except (*_MALFORMED, OSError) as error:
            self.close()
            raise self._damaged(error) from error
        except RecordingError:
            self.close()
            raise

    def _check_magic(self) -> None:
        try:
            if not self.path.is_file():
                raise RecordingError(f"{self.path} does not exist or is no file", "ls *.ttft")
            with self.path.open("rb") as file:
                head = file.read(16)
        except OSError as error:
            raise RecordingError(
                f"{self.path} cannot be read: {os.strerror(error.errno or errno.EIO)}",
                f"sudo chown $USER {shlex.quote(str(self.path))}"
                if error.errno == errno.EACCES
                else "",
            ) from error
        if not head:
            raise RecordingError(f"{self.path} is empty", "record again; nothing was ever written")
        if head != _MAGIC:
            raise RecordingError(f"{self.path} is not a ttftprof recording", "ls *.ttft")

    def _check_version(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise RecordingError(
                f"{self.path} is an SQLite file of another program, not a ttftprof recording",
                "ls *.ttft",
            )
        if version > VERSION:
            raise RecordingError(
                f"{self.path} was written by a newer ttftprof (format {version}, this one reads "
                f"up to {VERSION})",
                UPDATE,
            )

    def _check_size(self) -> None:
        """SQLite reads what is missing of its last page as zeros. With a log beside it, a file may
        be shorter than it will be."""
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        page_bytes = self._db.execute("PRAGMA page_size").fetchone()[0]
        size = self.path.stat().st_size
        if size < pages * page_bytes and not _leftover_logs(self.path):
            raise ValueError(f"{size} of {pages * page_bytes} bytes are there")

    def _check_tables(self) -> None:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        absent = _TABLES - {name for (name,) in self._db.execute(query)}
        if absent:
            raise ValueError(f"without {', '.join(sorted(absent))}")

    def _read_layouts(self) -> Iterator[tuple[str, np.dtype[Any]]]:
        for stream, layout in self._db.execute("SELECT stream, layout FROM layouts"):
            dtype = dtype_of(json.loads(layout))
            unknown = set(dtype.names or ()) - set(STREAMS[stream].names or ())
            if unknown:
                raise ValueError(f"{stream} with {', '.join(sorted(unknown))}")
            yield stream, dtype

    def _damaged(self, error: Exception) -> RecordingError:
        if _lacks_log(self.path):
            log = f"{self.path.name}-wal"
            return RecordingError(
                f"{self.path} is the half of a recording that did not end by itself: its log, "
                f"{log}, is not beside it",
                f"copy {shlex.quote(log)} from where it was recorded, too",
            )
        return RecordingError(
            f"{self.path} is damaged or was cut short ({error})",
            f"sqlite3 {shlex.quote(str(self.path))} .recover shows what is left",
        )

    def _rows(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        try:
            # No `yield from`: left early, it would close a cursor of a closed database.
            cursor = self._db.execute(query, values)
            while (row := cursor.fetchone()) is not None:
                yield row
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._damaged(error) from error

    @property
    def meta(self) -> dict[str, Any]:
        """What was noted once. A file without the log it was written with says so as its end."""
        try:
            noted = {str(k): json.loads(v) for k, v in self._rows("SELECT key, value FROM meta")}
        except _MALFORMED as error:
            raise self._damaged(error) from error
        if _lacks_log(self.path):
            noted["ended_because"] = (
                f"cut off, and its log, {self.path.name}-wal, is not beside it: copy that, too"
            )
        return noted

    @property
    def complete(self) -> bool:
        return bool(self.meta.get("complete", False))

    def batches(self, stream: str) -> Iterator[Records]:
        """The packed arrays of a stream, in the order they were written."""
        for columns in self.columns(stream):
            yield as_records(columns, STREAMS[stream])

    def columns(
        self, stream: str, first_row: int = 0, last_row: int = _LAST_ROW
    ) -> Iterator[Columns]:
        """The same as they lie in the file, of all of it or of some rows."""
        dtype = self._layouts.get(stream)
        if dtype is None:
            return
        query = (
            "SELECT count, codec, data FROM batches "
            "WHERE stream = ? AND rowid BETWEEN ? AND ? ORDER BY rowid"
        )
        for count, codec, data in self._rows(query, stream, first_row, last_row):
            if not isinstance(data, bytes) or not isinstance(count, int):
                raise self._damaged(ValueError("a batch row is malformed"))
            try:
                yield unpack(codec, data, dtype, count)
            except ValueError as error:
                raise self._damaged(error) from error

    def stream(self, stream: str) -> Records:
        """A whole stream as one array; empty, with this version's layout, if there is none.

        It is filled batch by batch, so that no second copy of the recording is ever held.
        """
        whole = np.zeros(self._length(stream), STREAMS[stream])
        at = 0
        for columns in self.columns(stream):
            for name, column in columns.items():
                whole[name][at : at + len(column)] = column
            at += len(column)
        return whole

    def pages(self, stream: str) -> Sequence[Columns]:
        """A stream to be read part by part: some thousand records each, in the order they were
        written. They can be read for as long as they are held, also once this is closed."""
        return _Pages(Reader(self.path), stream)

    def rows_of_pages(self, stream: str, at_least: int) -> Iterator[tuple[int, int]]:
        """(first, last) rows of batches that hold so many records together."""
        first, last, held = None, 0, 0
        query = "SELECT rowid, count FROM batches WHERE stream = ? ORDER BY rowid"
        for row, count in self._rows(query, stream):
            if not isinstance(count, int) or count < 0:
                raise self._damaged(ValueError("a batch row is malformed"))
            first, last, held = (row if first is None else first), row, held + count
            if held >= at_least:
                yield first, last
                first, held = None, 0
        if first is not None:
            yield first, last

    def _length(self, stream: str) -> int:
        """How many records the batches say they hold, none more than its bytes can."""
        dtype, total = self._layouts.get(stream), 0
        if dtype is None:
            return 0
        query = "SELECT count, length(data) FROM batches WHERE stream = ?"
        for count, length in self._rows(query, stream):
            if not isinstance(count, int) or not isinstance(length, int):
                raise self._damaged(ValueError("a batch row is malformed"))
            if not 0 <= count * dtype.itemsize <= (length + 1) * _MOST_COMPRESSED:
                raise self._damaged(ValueError(f"a batch of {count} records"))
            total += count
        return total

    def has_field(self, stream: str, field: str) -> bool:
        """Whether whoever wrote the recording knew a field; `stream` reads others as 0."""
        layout = self._layouts.get(stream)
        return layout is not None and field in (layout.names or ())

    def facts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(ns, fact) of one kind, oldest row first."""
        query = "SELECT ns, fact FROM facts WHERE kind = ? ORDER BY rowid"
        for ns, text in self._rows(query, kind):
            try:
                fact = json.loads(text)
                stamp = int(ns)
            except _MALFORMED as error:
                raise self._damaged(error) from error
            if not isinstance(fact, dict):
                raise self._damaged(ValueError(f"a fact of kind {kind} is malformed"))
            yield stamp, fact

    def fact_kinds(self) -> list[str]:
        return [str(k) for (k,) in self._rows("SELECT DISTINCT kind FROM facts ORDER BY kind")]

    def sources(self) -> list[Source]:
        query = "SELECT name, state, reason, lost FROM sources ORDER BY name"
        return [Source(*map(str, row)) for row in self._rows(query)]

    def lost(self) -> dict[str, int]:
        try:
            rows = self._rows("SELECT place, count FROM lost WHERE count")
            return {str(place): int(count) for place, count in rows}
        except _MALFORMED as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        self._db.close()
        if self._copy:
            self._copy.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pages(Sequence[Columns]):
    """See `Reader.pages`."""

    def __init__(self, reader: Reader, stream: str) -> None:
        self._reader, self._stream = reader, stream
        weakref.finalize(self, reader.close)
        self._rows = list(reader.rows_of_pages(stream, _PAGE_RECORDS))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> Columns: ...
    @overload
    def __getitem__(self, number: slice) -> list[Columns]: ...
    def __getitem__(self, number: int | slice) -> Columns | list[Columns]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        batches = list(self._reader.columns(self._stream, *self._rows[number]))
        return joined(batches, STREAMS[self._stream])


_TABLES = {"meta", "layouts", "batches", "facts", "sources", "lost"}
# What a damaged row makes the decoding of it raise.
_MALFORMED = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def _open_read(path: Path) -> tuple[sqlite3.Connection, tempfile.TemporaryDirectory[str] | None]:
    """Read-only. What a killed recorder left in a log beside the file is part of the recording:
    where it cannot be read in place (a read-only folder), a copy of both is."""
    try:
        return _connect(path, "mode=ro"), None
    except sqlite3.OperationalError:
        logs = _leftover_logs(path)
        if not logs:
            return _connect(path, "mode=ro&immutable=1"), None
    import tempfile  # brings much that most reports have no use for

    folder = tempfile.TemporaryDirectory(prefix="ttftprof-", ignore_cleanup_errors=True)
    copy = Path(folder.name) / path.name
    for source in (path, *logs):
        shutil.copyfile(source, copy.with_name(source.name))
    return _connect(copy, "mode=rw"), folder


def _lacks_log(path: Path) -> bool:
    """Whether a file was written together with a log that is not there; one that was closed is
    whole. Layout: as in `is_recording`."""
    try:
        with path.open("rb") as file:
            written_with_log = file.read(20)[18:] == b"\x02\x02"
    except OSError:
        return False
    return written_with_log and not _leftover_logs(path)


def _leftover_logs(path: Path) -> list[Path]:
    logs = [Path(f"{path}{end}") for end in ("-wal", "-journal")]
    return [log for log in logs if log.exists() and log.stat().st_size]


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # Whoever lets go of it last may do so in another thread.
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, check_same_thread=False)
    try:
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute("PRAGMA cell_size_check=ON")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, UnicodeDecodeError):
        db.close()
        raise
    return db
