"""One NVIDIA device, asked for the same numbers again and again at the least cost.

Every call has its arguments made once, and its answer always lands at the same place; what lies
there is read by one unpacking. The layouts are nvml.h's, which are its ABI.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Self

from ttftprof.gpu_rows import Valid
from ttftprof.sources.gpu import Found
from ttftprof.sources.nvml_door import Device, Door, Question

_COMPUTING = "nvmlDeviceGetComputeRunningProcesses_v3"
_DRAWING = "nvmlDeviceGetGraphicsRunningProcesses_v3"
_MEMORY_2 = 0x02000028  # nvmlMemory_v2: version 2, 40 bytes
_STATE_EVERY = 5  # looks, while memory changes: a load is to be known with its link and clocks
_DRAWING_EVERY = 10  # turns, where none did
_RECEIVED, _SENT = 198, 197  # NVML_FI_DEV_PCIE_COUNT_…_BYTES, of the whole device, as it sees them
_TRAFFIC = int(Valid.RX | Valid.TX)
_PSTATE = int(Valid.PSTATE)
_PSTATES = 16  # NVML_PSTATE_UNKNOWN is 32
_INSUFFICIENT_SIZE = 7
_ROOM = 16  # processes, at first
_NOT_AVAILABLE = (1 << 64) - 1
Tell = Callable[[str, dict[str, Any]], None]  # a fact's kind, and the fact
_Row = tuple[str, tuple[int, ...], str, Valid]


class _Answers(ctypes.Structure):
    """Where the answers land, in the order of a row."""

    _fields_ = (
        ("version", ctypes.c_uint),  # nvmlMemory_v2_t
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
        ("busy_percent", ctypes.c_uint),  # nvmlUtilization_t
        ("memory_busy_percent", ctypes.c_uint),
        ("pstate", ctypes.c_uint),
        ("link_gen", ctypes.c_uint),
        ("link_width", ctypes.c_uint),
        ("core_mhz", ctypes.c_uint),
        ("memory_mhz", ctypes.c_uint),
        ("throttle", ctypes.c_ulonglong),
        ("persistence", ctypes.c_uint),
    )


# All but the last, as the numbers of a row; of a word that a byte holds, the lowest.
_NUMBERS = struct.Struct("<32xQB7xB3xB3xB3xII4xQ")
_PSTATE_AT = 2

# (call, what else it is given, where the answer goes, what it is good for)
_MEMORY = (("nvmlDeviceGetMemoryInfo_v2", (), "version", Valid.USED),)
# nvmlMemory_t (total, free, used), so placed that its `used` is where version 2 has it.
_PLAIN_MEMORY = (("nvmlDeviceGetMemoryInfo", (), "reserved", Valid.USED),)
_DOES = (("nvmlDeviceGetUtilizationRates", (), "busy_percent", Valid.BUSY),)
_IS_IN = (
    ("nvmlDeviceGetPerformanceState", (), "pstate", Valid.PSTATE),
    ("nvmlDeviceGetCurrPcieLinkGeneration", (), "link_gen", Valid.LINK),
    ("nvmlDeviceGetCurrPcieLinkWidth", (), "link_width", Valid.LINK),
    ("nvmlDeviceGetClockInfo", (1,), "core_mhz", Valid.CLOCKS),  # NVML_CLOCK_SM
    ("nvmlDeviceGetClockInfo", (2,), "memory_mhz", Valid.CLOCKS),  # NVML_CLOCK_MEM
    ("nvmlDeviceGetCurrentClocksThrottleReasons", (), "throttle", Valid.THROTTLE),
)
_PERSISTENCE = (("nvmlDeviceGetPersistenceMode", (), "persistence", Valid(0)),)


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("stamp_us", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


_COUNTS = struct.Struct("<8xq12xIQ28xIQ")  # stamp, result and bytes received; result and bytes sent


class Traffic:
    """The link's bytes per second, from running counts with a stamp of their own.

    Newer drivers and devices have them.
    """

    def __init__(self, door: Door, device: Device) -> None:
        self._fields = (_FieldValue * 2)(_FieldValue(_RECEIVED), _FieldValue(_SENT))
        room = 2, ctypes.byref(self._fields)
        self.question = door.question("nvmlDeviceGetFieldValues", device, *room)
        self._before = 0, 0, 0
        self.is_counted = self.question is not None

    def answered(self) -> tuple[int, int] | None:
        """(received, sent) a second since the count before; None if there is none, or no news."""
        us, no_received, received, no_sent, sent = _COUNTS.unpack_from(self._fields)
        if no_received or no_sent:
            self.is_counted = False
            return None
        before_us, received_before, sent_before = self._before
        self._before = us, received, sent
        passed_us = us - before_us
        if not before_us or passed_us <= 0 or received < received_before or sent < sent_before:
            return None  # the first, not renewed yet, or wrapped
        return (
            (received - received_before) * 1_000_000 // passed_us,
            (sent - sent_before) * 1_000_000 // passed_us,
        )


class _Listing:
    """The processes that one call tells, in room that is kept."""

    _ROW = struct.Struct("<I4xQ8x")  # nvmlProcessInfo_t: pid, bytes, instances

    def __init__(self, door: Door, call: str, device: Device) -> None:
        self._door, self._call, self._device = door, call, device
        self._count = ctypes.c_uint()
        self._most, self._room = 0, ctypes.create_string_buffer(0)
        self.questions: tuple[Question, ...] = ()
        self._make_room(_ROOM)

    def _make_room(self, processes: int) -> None:
        self._most = processes
        self._room = ctypes.create_string_buffer(self._ROW.size * processes)
        arguments = ctypes.byref(self._count), self._room
        question = self._door.question(self._call, self._device, *arguments)
        self.questions = () if question is None else (question,)

    def ask(self) -> bytes | None:
        """The rows as they are, to be compared; None if they are not told."""
        if not self.questions:
            return None
        self._count.value = self._most
        for question, result in self._door.put(self.questions):
            if result == _INSUFFICIENT_SIZE:  # the next look has more room
                self._make_room(2 * max(self._most, self._count.value))
            elif self._door.is_refused(question, result):
                self.questions = ()
            return None
        return self._room.raw[: self._ROW.size * self._count.value]

    @classmethod
    def read(cls, rows: bytes) -> list[tuple[int, int | None]]:
        """(host pid, bytes); a container or WSL may not tell the bytes."""
        found = cls._ROW.iter_unpack(rows)
        return [(pid, None if used == _NOT_AVAILABLE else used) for pid, used in found]


class Processes:
    """Whose the memory is. What computes by Vulkan is among those that draw; one that does both is
    told by either with all of its memory."""

    def __init__(self, door: Door, device: Device) -> None:
        self._computing = _Listing(door, _COMPUTING, device)
        self._drawing = _Listing(door, _DRAWING, device)
        self._door, self._device = door, device
        self._untold = False  # they were once listed without their memory
        self._drew = False
        self._before: tuple[bytes | None, bytes | None] | None = None

    @property
    def questions(self) -> tuple[Question, ...]:
        return self._computing.questions

    def ask(self, all_kinds: bool) -> dict[int, int] | None:
        """{host pid: bytes}; None if they are not told, or are as they were."""
        computing, drawing = self._computing.ask(), None
        if all_kinds or self._drew:
            drawing = self._drawing.ask()
            self._drew = bool(drawing)
        before, self._before = self._before, (computing, drawing or None)
        if self._before == before or (computing is None and not drawing):
            return None
        listed = _Listing.read((computing or b"") + (drawing or b""))
        told = {pid: used for pid, used in listed if used is not None}
        if computing and not told and not self._untold:
            self._untold = True
            self._door.told(_COMPUTING, self._device.index, "their memory is not told")
        return told


class _Round(NamedTuple):
    """What is asked at one look, and what the answers are good for."""

    questions: tuple[Question, ...]
    good_for: int

    @classmethod
    def of(cls, questions: Iterable[Question]) -> Self:
        kept = tuple(questions)
        return cls(kept, reduce(or_, (question.good_for for question in kept), 0))


class AskedDevice:
    """The numbers of one device. All methods are called in one thread."""

    def __init__(
        self,
        door: Door,
        device: Device,
        has_memory_2: bool,
        persists: bool | None,
        tell: Tell,
    ) -> None:
        self._door, self._device, self._put = door, device, door.put
        self._answers = _Answers(version=_MEMORY_2)
        self.traffic = Traffic(door, device)
        self._processes = Processes(door, device)
        self._answers.persistence = self._persists = int(bool(persists))
        self._tell = tell
        memory = self._asked(_MEMORY if has_memory_2 else _PLAIN_MEMORY)
        counts = [self.traffic.question] if self.traffic.question is not None else []
        is_in = (*_IS_IN, *(() if persists is None else _PERSISTENCE))
        self._memory, self._state = _Round.of(memory), _Round.of(self._asked(is_in))
        self._all = _Round.of([*memory, *self._asked(_DOES), *counts, *self._state.questions])
        self._used = -1  # at the last look
        self._moved = False  # it had changed since the one before
        self._since_state = 0  # looks

    def _asked(self, table: Iterable[_Row]) -> list[Question]:
        questions = []
        for call, given, place, good_for in table:
            room = ctypes.byref(self._answers, getattr(_Answers, place).offset)
            arguments = *given, room
            question = self._door.question(call, self._device, *arguments, good_for=int(good_for))
            if question is not None:
                questions.append(question)
        return questions

    def questions(self, turn: int) -> tuple[Question, ...]:
        """What a look at that turn asks while memory rests."""
        if turn < 0:
            return self._memory.questions
        return self._all.questions + self._processes.questions

    def look(self, turn: int) -> Found:
        """Memory; at a turn all else, too. Raises `DeviceLost`."""
        asked = self._all if turn >= 0 else self._memory
        failed = self._put(asked.questions)
        valid = self._without(asked, failed) if failed else asked.good_for
        used, moves = self._answers.used, self._moved
        self._moved = used != self._used
        self._used = used
        if turn < 0 and not self._moved and not moves:
            return valid, (used, 0, 0, 0, 0, 0, 0, 0, 0, 0), None
        return self._look_on(turn, valid)

    def _look_on(self, turn: int, valid: int) -> Found:
        """Whose the memory is, at a turn and where it changes or did at the look before, for a
        driver may tell of the process a little later; there the state, too, if it is long ago."""
        self._since_state = 0 if turn >= 0 else self._since_state + 1
        if self._since_state >= _STATE_EVERY:
            failed = self._put(self._state.questions)
            valid |= self._without(self._state, failed)
            self._since_state = 0
        rates = self._traffic() if turn >= 0 and self.traffic.is_counted else None
        processes = self._processes.ask(turn >= 0 and not turn % _DRAWING_EVERY)
        if self._answers.persistence != self._persists:
            self._note_persistence()
        numbers = _NUMBERS.unpack_from(self._answers)
        if numbers[_PSTATE_AT] >= _PSTATES:
            valid &= ~_PSTATE
        if rates is None:
            return valid, (*numbers, 0, 0), processes
        return valid | _TRAFFIC, (*numbers, *rates), processes

    def _note_persistence(self) -> None:
        self._persists = self._answers.persistence
        fact = {"index": self._device.index, "on": bool(self._persists)}
        self._tell("gpu_persistence", fact)

    def _traffic(self) -> tuple[int, int] | None:
        rates = self.traffic.answered()
        if not self.traffic.is_counted and self.traffic.question is not None:
            self._forget(self.traffic.question)
        return rates

    def _without(self, asked: _Round, failed: Iterable[tuple[Question, int]]) -> int:
        """The bits of `Valid` that the answers are good for: of a pair, if both came."""
        valid = asked.good_for
        for question, result in failed:
            valid &= ~question.good_for
            if self._door.is_refused(question, result):
                self._forget(question)
        return valid

    def _forget(self, refused: Question) -> None:
        """Half a pair is good for nothing, either."""
        if refused is self.traffic.question:
            self.traffic.is_counted = False
        self._memory, self._state, self._all = (
            _Round.of(q for q in asked.questions if not _goes_with(q, refused))
            for asked in (self._memory, self._state, self._all)
        )


def _goes_with(question: Question, refused: Question) -> bool:
    return question is refused or bool(question.good_for & refused.good_for)
