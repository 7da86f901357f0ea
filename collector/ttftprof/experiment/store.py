"""Where an experiment is kept: a folder with one SQLite file and a recording for each run.

Guarantees: a run that ended is in the file before the next one begins, and survives kill -9; the
schedule is fixed when the folder is made, so that what is left to do is told by what is there; no
run is stored twice; two experiments cannot write into one folder at once. An attempt that was
interrupted stays on record as one.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ttftprof.caller import sudo_caller
from ttftprof.errors import OutputError, RecordingError, UsageError
from ttftprof.recording import filesystem_of

APPLICATION_ID = 0x54544645  # "TTFE"
VERSION = 1
_FILE, _LOCK, _RUNS = "experiment.sqlite", ".lock", "runs"
_NO_WAL = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "virtiofs"}

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE schedule(
    run INTEGER PRIMARY KEY, block INTEGER NOT NULL, scenario TEXT NOT NULL,
    variant TEXT NOT NULL, warmup INTEGER NOT NULL);
CREATE TABLE attempts(
    attempt INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL REFERENCES schedule(run),
    began_unix_ns INTEGER NOT NULL);
CREATE TABLE results(
    run INTEGER PRIMARY KEY REFERENCES schedule(run), attempt INTEGER NOT NULL UNIQUE,
    ended_unix_ns INTEGER NOT NULL, result TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """One run of the schedule. `block`: the repetition it belongs to; its runs are paired."""

    run: int
    block: int
    scenario: str
    variant: str
    warmup: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A run that ended, with what came out (`runner.RunResult` as JSON)."""

    slot: Slot
    result: Mapping[str, Any]


class Store:
    """One experiment's folder. `create` or `resume` to write, `read` to look."""

    def __init__(self, folder: Path, db: sqlite3.Connection, lock: int | None) -> None:
        self.folder = folder
        self._db = db
        self._lock = lock

    # -- opening

    @classmethod
    def exists(cls, folder: Path) -> bool:
        return (folder / _FILE).exists()

    @classmethod
    def create(
        cls, folder: Path, plan: Mapping[str, Any], digest: str, slots: Iterable[Slot]
    ) -> Self:
        """A new experiment. The file takes its name once the schedule is in it. `plan` holds what
        may be written down, `digest` tells the whole of it."""
        try:
            (folder / _RUNS).mkdir(parents=True, exist_ok=True)
            caller = sudo_caller()
            if caller is not None:  # whose recorders are root no more when they are armed
                os.chown(folder / _RUNS, caller.uid, caller.gid, follow_symlinks=False)
            lock = _locked(folder)
            partial = folder / f"{_FILE}.partial"
            partial.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be made: {error.strerror}", "choose another folder with -o"
            ) from error
        with _told_as_output(folder):
            db = sqlite3.connect(partial, isolation_level=None)
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={VERSION}")
            db.executescript(_SCHEMA)
            db.execute("BEGIN")
            db.execute("INSERT INTO meta VALUES('plan', ?)", (json.dumps(plan),))
            db.execute("INSERT INTO meta VALUES('digest', ?)", (json.dumps(digest),))
            db.executemany(
                "INSERT INTO schedule VALUES(:run, :block, :scenario, :variant, :warmup)",
                map(asdict, slots),
            )
            db.execute("COMMIT")
            db.close()
            partial.rename(folder / _FILE)
            return cls(folder, _opened(folder, writable=True), lock)

    @staticmethod
    def set_aside(folder: Path, name: Path) -> None:
        """Renames the folder, unless somebody writes into it: its next run would go astray."""
        with _told_as_output(folder):
            lock = _locked(folder)
            try:
                folder.rename(name)
            finally:
                os.close(lock)

    @classmethod
    def resume(cls, folder: Path, plan: Mapping[str, Any], digest: str) -> Self:
        """The experiment that the folder holds, if its plan is this one."""
        lock = _locked(folder)
        store = cls(folder, _opened(folder, writable=True), lock)
        if store.meta("digest") != digest:
            changes = ", ".join(_changes(store.plan, json.loads(json.dumps(plan))))
            other = changes or "what is not written down"
            store.close()
            raise UsageError(
                f"{folder} holds an experiment with another plan (other: {other})",
                "give another folder with -o, or --fresh to begin anew",
            )
        return store

    @classmethod
    def read(cls, folder: Path) -> Self:
        if not cls.exists(folder):
            raise UsageError(
                f"{folder} holds no experiment", "give the folder that ttftprof bench wrote"
            )
        return cls(folder, _opened(folder, writable=False), None)

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is there

    @property
    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = self.meta("plan")
        return found

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def slots(self) -> list[Slot]:
        """The whole schedule, in its order."""
        rows = self._db.execute("SELECT * FROM schedule ORDER BY run")
        return [Slot(run, block, s, v, bool(w)) for run, block, s, v, w in rows]

    def kept(self) -> list[Kept]:
        """The runs that ended, in the order in which they were made."""
        rows = self._db.execute(
            "SELECT schedule.*, result FROM results JOIN schedule USING(run) ORDER BY attempt"
        )
        return [
            Kept(Slot(run, block, s, v, bool(w)), json.loads(result))
            for run, block, s, v, w, result in rows
        ]

    def left(self) -> list[Slot]:
        """What is still to be run."""
        done = {run for (run,) in self._db.execute("SELECT run FROM results")}
        return [slot for slot in self.slots() if slot.run not in done]

    def interrupted(self) -> int:
        """Attempts that began and never ended."""
        (count,) = self._db.execute(
            "SELECT count(*) FROM attempts WHERE attempt NOT IN (SELECT attempt FROM results)"
        ).fetchone()
        return int(count)

    def recording(self, run: int) -> Path:
        return self.folder / _RUNS / f"{run:05d}.ttft"

    # -- writing

    def set_meta(self, key: str, value: Any) -> None:
        with _told_as_output(self.folder):
            self._db.execute(
                "INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value=excluded.value",
                (key, json.dumps(value)),
            )

    def begin(self, slot: Slot) -> int:
        """Notes that a run begins; the number of this attempt."""
        with _told_as_output(self.folder):
            cursor = self._db.execute(
                "INSERT INTO attempts(run, began_unix_ns) VALUES(?, ?)", (slot.run, time.time_ns())
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def end(self, slot: Slot, attempt: int, result: Mapping[str, Any]) -> None:
        """Keeps a run. It is safe when this returns."""
        with _told_as_output(self.folder):
            self._db.execute(
                "INSERT INTO results VALUES(?, ?, ?, ?)",
                (slot.run, attempt, time.time_ns(), json.dumps(result)),
            )


def _changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield name


def _opened(folder: Path, writable: bool) -> sqlite3.Connection:
    path = folder / _FILE
    try:
        # Also to look: what a kill cut short in the file has to be taken back first. SQLite opens
        # what it may not write for reading only.
        db = sqlite3.connect(f"file:{path}?mode=rw", uri=True, isolation_level=None)
        db.execute(f"PRAGMA query_only={int(not writable)}")
        (identity,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if identity != APPLICATION_ID:
            raise RecordingError(f"{path} is no experiment", "give a folder of ttftprof bench")
        if version > VERSION:
            raise RecordingError(
                f"{path} was written by a newer ttftprof", "pip install --upgrade ttftprof"
            )
        if writable:
            kind = filesystem_of(folder)
            wal = kind not in _NO_WAL and not kind.startswith("fuse")
            db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'TRUNCATE'}")
            db.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error as error:
        raise RecordingError(f"{path} cannot be read: {error}", "is it a whole copy?") from error
    return db


def _locked(folder: Path) -> int:
    fd = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise OutputError(
            f"another ttftprof bench writes into {folder}", "wait for it, or choose another folder"
        ) from error
    return fd


@contextmanager
def _told_as_output(folder: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise OutputError(
            f"{folder} cannot be written: {error}",
            "make room or mend the permissions, then run the same command: it goes on from here",
        ) from error
