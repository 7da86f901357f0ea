"""The one door to NVIDIA's management library, and questions that are put through it often.

Guarantees: every call passes here; what a device or driver does not support is told once and not
asked again; a lost device is an exception of its own; a call that does not return can be seen from
another thread (`Door.since_ns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ttftprof.sources.gpu import DeviceLost


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or one instance of a partitioned one (MIG), whose `parent` is the GPU's index."""

    index: int
    handle: Any = field(repr=False)
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A call that is made again and again, with its arguments and the room for its answer: what
    the binding's own function makes anew each time costs ten times the call.

    `good_for`: the bits of `Valid` that its answer is a part of.
    """

    call: str
    device: int
    function: Callable[..., int]
    arguments: tuple[Any, ...]
    good_for: int = 0


class Door:
    """Every call passes here. `told(call, device, reason)` is called once for each that is refused.

    One thread at a time; each thread that calls has a door of its own.
    """

    def __init__(
        self,
        library: Any,
        told: Callable[[str, int, str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._library = library
        self.told = told
        self._clock = clock
        self._refused: set[tuple[Any, ...]] = set()
        self.call = ""
        self.since_ns = 0  # since when `call` is under way; 0: none is

    # -- calls by the binding ---------------------------------------------------------------

    def call_it(self, call: str, *arguments: Any) -> Any:
        """What `call` answers. Raises the library's `NVMLError`."""
        self.call, self.since_ns = call, self._clock()
        try:
            return getattr(self._library, call)(*arguments)
        finally:
            self.since_ns = 0

    def ask(self, call: str, device: Device | None, *arguments: Any) -> Any:
        """What `call` answers, or None if it is refused. Raises `DeviceLost`."""
        index = -1 if device is None else device.index
        key = (call, index, *arguments[:1])  # the first argument says what is asked for
        if key in self._refused:
            return None
        first = () if device is None else (device.handle,)
        try:
            return self.call_it(call, *first, *arguments)
        except self._library.NVMLError as error:
            if self._is_final(index, error):
                self._refused.add(key)
                self.told(call, index, str(error))
            return None

    # -- calls of the same library, made often ----------------------------------------------

    def question(
        self, call: str, device: Device, *arguments: Any, good_for: int = 0
    ) -> Question | None:
        """None, and told, if this driver's library has no such call. Only after `nvmlInit`."""
        try:
            function = getattr(self._library.nvmlLib, call)
        except AttributeError:
            self.told(call, device.index, "Function Not Found")
            return None
        return Question(call, device.index, function, (device.handle, *arguments), good_for)

    def put(self, questions: Iterable[Question]) -> list[tuple[Question, int]]:
        """Those that failed, with the call's own result: nothing is raised, as that is dear."""
        failed = []
        clock = self._clock
        for question in questions:
            self.call, self.since_ns = question.call, clock()
            result = question.function(*question.arguments)
            if result:
                failed.append((question, result))
        self.since_ns = 0
        return failed

    def is_refused(self, question: Question, result: int) -> bool:
        """Of a result that is none: whether it makes no sense to ask again, which is told. Raises
        `DeviceLost`."""
        error = self._library.NVMLError(result)
        final = self._is_final(question.device, error)
        if final:
            self.told(question.call, question.device, str(error))
        return final

    def _is_final(self, index: int, error: Any) -> bool:
        """Whether it makes no sense to ask again. Raises `DeviceLost`."""
        number, library = int(getattr(error, "value", 0)), self._library
        if number in (library.NVML_ERROR_GPU_IS_LOST, library.NVML_ERROR_RESET_REQUIRED):
            raise DeviceLost(index, str(error))
        return number not in (
            library.NVML_ERROR_NOT_FOUND,  # no sample newer than the last
            library.NVML_ERROR_NO_DATA,
            library.NVML_ERROR_NOT_READY,
            library.NVML_ERROR_TIMEOUT,
            library.NVML_ERROR_UNKNOWN,
        )
