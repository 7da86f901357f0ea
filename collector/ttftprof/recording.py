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
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ttftprof.errors import OutputError, RecordingError
from ttftprof.events import EVENT, FILE_ROW, THREAD_ROW, Records

APPLICATION_ID = 0x54544654  # "TTFT"
VERSION = 1
COMPRESS_FROM_BYTES = 2048

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


def layout_of(dtype: np.dtype[Any]) -> list[list[Any]]:
    """A dtype as JSON: [[name, type, shape], …] in order, without padding."""
    fields = []
    for name in dtype.names or ():
        kind = dtype[name]
        fields.append([name, kind.base.str, list(kind.shape)])
    return fields


def dtype_of(layout: Iterable[Iterable[Any]]) -> np.dtype[Any]:
    """The inverse of `layout_of`."""
    return np.dtype([(str(n), str(t), tuple(int(d) for d in shape)) for n, t, shape in layout])


def pack(records: Records) -> tuple[str, bytes]:
    """(codec, bytes) of a structured array: its columns one after the other.

    Times are stored as differences, which is what makes the columns small.
    """
    columns = []
    for name in records.dtype.names or ():
        column = np.ascontiguousarray(records[name])
        if name in ("start_ns", "ns"):
            column = np.diff(column, prepend=column.dtype.type(0))
        columns.append(column.tobytes())
    plain = b"".join(columns)
    if len(plain) < COMPRESS_FROM_BYTES:
        return "columns", plain
    return "columns+zlib", zlib.compress(plain, 1)


def unpack(codec: str, data: bytes, dtype: np.dtype[Any], count: int) -> Records:
    """The inverse of `pack`. Raises `RecordingError` if the bytes do not fit the layout."""
    if codec == "columns+zlib":
        try:
            # Bounded by what the layout says: a hostile file cannot swell in memory.
            data = zlib.decompressobj().decompress(data, count * dtype.itemsize + 1)
        except zlib.error as error:
            raise RecordingError(f"a batch of the recording is damaged ({error})") from error
    elif codec != "columns":
        raise RecordingError(f"the recording uses an unknown encoding, {codec!r}", _UPDATE)
    if len(data) != count * dtype.itemsize:
        raise RecordingError("a batch of the recording is damaged (its length is wrong)")
    records = np.empty(count, dtype)
    at = 0
    for name in dtype.names or ():
        kind = dtype[name]
        size = kind.itemsize * count
        column = np.frombuffer(data, kind.base, count * (kind.itemsize // kind.base.itemsize), at)
        at += size
        if name in ("start_ns", "ns"):
            column = np.cumsum(column, dtype=kind.base)
        records[name] = column.reshape((count, *kind.shape))
    return records


_UPDATE = "read it with a newer ttftprof: pip install --upgrade ttftprof"


def filesystem_of(path: Path) -> str:
    """File-system type under `path` by the longest mount point in /proc/self/mountinfo."""
    best, kind = "", ""
    target = str(path.resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, after = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind


class Writer:
    """Appends facts to a new recording.

    Raises `OutputError` when the file cannot be made, exists, or the disk is full; after that error
    everything committed before it is safe in the file.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        _create(path, overwrite)
        self.filesystem = filesystem_of(path.parent)
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._prepare()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _prepare(self) -> None:
        wal = self.filesystem not in _NO_WAL and not self.filesystem.startswith("fuse")
        self._db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'TRUNCATE'}")
        self._db.execute("PRAGMA synchronous=NORMAL" if wal else "PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA cache_size=-2048")
        self._db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        self._db.execute(f"PRAGMA user_version={VERSION}")
        self._db.executescript(_SCHEMA)
        self._db.execute("BEGIN")
        for stream, dtype in STREAMS.items():
            self._db.execute(
                "INSERT INTO layouts VALUES(?, ?)", (stream, json.dumps(layout_of(dtype)))
            )
        self.set_meta("complete", False)
        self.commit()

    def _failure(self, error: sqlite3.Error) -> OutputError:
        full = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        if full or "full" in str(error):
            return OutputError(
                f"the disk under {self.path} is full or failing ({error})",
                "what was recorded so far is in the file; record again with -o on another disk",
            )
        return OutputError(f"{self.path} cannot be written: {error}", "choose another -o FILE")

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def set_meta(self, key: str, value: Any) -> None:
        self._execute(
            "INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, json.dumps(value, sort_keys=True))
        )

    def add_batch(self, stream: str, records: Records) -> None:
        if not len(records):
            return
        stamp = "start_ns" if stream == "events" else "ns"
        codec, data = pack(records)
        self._execute(
            "INSERT INTO batches VALUES(?, ?, ?, ?, ?)",
            (stream, int(records[stamp][0]), len(records), codec, data),
        )

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
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def close(self, complete: bool) -> None:
        """Marks the recording (in)complete and folds the log into the one file."""
        try:
            self.set_meta("complete", complete)
            self.commit()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            raise self._failure(error) from error
        finally:
            self._db.close()

    def abandon(self) -> None:
        """Closes after a failed write, keeping what was committed."""
        self._db.close()


def _create(path: Path, overwrite: bool) -> None:
    """Makes an empty file that only its owner may read: the invoking user, under sudo."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if overwrite:
            path.unlink(missing_ok=True)
        fd = os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise OutputError(
            f"{path} exists", "choose another -o FILE, or add --force to replace it"
        ) from error
    except OSError as error:
        raise OutputError(
            f"{path} cannot be created: {os.strerror(error.errno or errno.EIO)}",
            "choose a folder that exists and is writable with -o FILE",
        ) from error
    with os.fdopen(fd, "rb"):
        owner = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
        if os.geteuid() == 0 and owner[0] and owner[1]:
            os.fchown(fd, int(owner[0]), int(owner[1]))


class Reader:
    """A recording opened to be read; nothing in it is trusted.

    Raises `RecordingError`: no such file, not a recording, damaged, of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise RecordingError(f"{path} does not exist or is no file", "ls *.ttft")
        self._check_magic()
        try:
            self._db = _open_read(path)
            self._check_version()
            self._layouts = {
                str(stream): dtype_of(json.loads(layout))
                for stream, layout in self._db.execute("SELECT stream, layout FROM layouts")
            }
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def _check_magic(self) -> None:
        with self.path.open("rb") as file:
            head = file.read(16)
        if not head:
            raise RecordingError(f"{self.path} is empty", "record again; nothing was ever written")
        if head != b"SQLite format 3\0":
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
                _UPDATE,
            )

    def _damaged(self, error: Exception) -> RecordingError:
        return RecordingError(
            f"{self.path} is damaged or was cut short ({error})",
            f"sqlite3 {self.path} .recover shows what is left",
        )

    def _rows(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        try:
            # No `yield from`: left early, it would close a cursor of a closed database.
            for row in self._db.execute(query, values):
                yield row  # noqa: UP028
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    @property
    def meta(self) -> dict[str, Any]:
        try:
            return {k: json.loads(v) for k, v in self._rows("SELECT key, value FROM meta")}
        except (ValueError, TypeError) as error:
            raise self._damaged(error) from error

    @property
    def complete(self) -> bool:
        return bool(self.meta.get("complete", False))

    def batches(self, stream: str) -> Iterator[Records]:
        """The packed arrays of a stream, in the order they were written."""
        dtype = self._layouts.get(stream)
        if dtype is None:
            return
        query = "SELECT count, codec, data FROM batches WHERE stream = ? ORDER BY rowid"
        for count, codec, data in self._rows(query, stream):
            if not isinstance(data, bytes) or not isinstance(count, int) or not 0 <= count < 1 << 32:
                raise self._damaged(ValueError("a batch row is malformed"))
            yield unpack(codec, data, dtype, count)

    def stream(self, stream: str) -> Records:
        """A whole stream as one array; empty, with this version's layout, if there is none."""
        parts = list(self.batches(stream))
        if not parts:
            return np.empty(0, self._layouts.get(stream, STREAMS[stream]))
        return np.concatenate(parts)

    def facts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(ns, fact) of one kind, oldest row first."""
        query = "SELECT ns, fact FROM facts WHERE kind = ? ORDER BY rowid"
        for ns, text in self._rows(query, kind):
            try:
                yield int(ns), json.loads(text)
            except (ValueError, TypeError) as error:
                raise self._damaged(error) from error

    def fact_kinds(self) -> list[str]:
        return [str(k) for (k,) in self._rows("SELECT DISTINCT kind FROM facts ORDER BY kind")]

    def sources(self) -> list[Source]:
        return [Source(*map(str, row)) for row in self._rows("SELECT * FROM sources ORDER BY name")]

    def lost(self) -> dict[str, int]:
        return {str(p): int(n) for p, n in self._rows("SELECT place, count FROM lost WHERE count")}

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_read(path: Path) -> sqlite3.Connection:
    """Read-only; a leftover log of a killed recorder is taken into account where possible."""
    uri = path.resolve().as_uri()
    try:
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True)
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A log that cannot be opened (read-only folder): the main file alone.
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
    return db
