"""Samples of Python code laid over the phases: shares, errors, stacks, waits, and the verdict."""

from __future__ import annotations

import io
from math import sqrt
from typing import Any

import pytest

from ttftprof.errors import RecordingError
from ttftprof.events import Wait
from ttftprof.model import PythonTime, Request
from ttftprof.reports import python as python_report
from unit.recordings import A_GGUF, B_GGUF, MS, PythonSpans, Scene, ms, python_segment

PID, WORKER, LOOP = 100, 101, 102
HZ = 20
IMPORT = [
    ("serve.py", "<module>", 3),
    ("<frozen importlib._bootstrap>", "_find_and_load", 1),
    ("torch/__init__.py", "<module>", 9),
]
LOAD = [("serve.py", "<module>", 5), ("safetensors/torch.py", "load_file", 311)]
RUN = [("serve.py", "serve", 8), ("torch/nn/modules/linear.py", "Linear.forward", 134)]
IDLE = [
    ("python3.11/asyncio/base_events.py", "BaseEventLoop._run_once", 1),
    ("python3.11/selectors.py", "EpollSelector.select", 2),
]
OWN = [("serve.py", "<module>", 5), ("serve.py", "spin", 6)]


def asked(*segments: tuple[int, dict[str, Any]], until: float = 2_000) -> Scene:
    """A resident request from 0 ms to its first token, all of it `prefill`."""
    scene = Scene().process(PID, "python").request(PID, at=0, token=until)
    scene.file(A_GGUF, "/models/a.gguf").held(PID, A_GGUF)
    for stamp, fact in segments:
        scene.fact("python_stacks", stamp, fact)
    return scene


def time_of(scene: Scene) -> PythonTime:
    (time,) = scene.only_request().python
    return time


def shares(time: PythonTime) -> dict[str, float]:
    return {s.category: round(s.share, 3) for s in time.shares}


def test_shares_are_those_of_the_samples() -> None:
    time = time_of(asked(python_segment(PID, [(PID, 0, 1500, RUN), (PID, 1500, 2000, IMPORT)])))
    assert (time.phase, time.samples, time.rate_hz, time.covered) == ("prefill", 40, HZ, 1.0)
    assert shares(time) == {"generate": 0.75, "imports": 0.25}
    first, second = time.shares
    assert [s.error for s in time.shares] == pytest.approx([sqrt(0.75 * 0.25 / 40)] * 2, rel=0.03)
    assert (first.estimated_ns, second.estimated_ns) == (1500 * MS, 500 * MS)
    assert second.packages == ("torch",)
    assert sum(s.samples for s in time.shares) == time.samples


def test_what_was_never_missed_may_be() -> None:
    (share,) = time_of(asked(python_segment(PID, [(PID, 0, 2000, RUN)]))).shares
    assert share.share == 1
    assert 0.02 < share.error < 0.03


def test_code_that_nobody_knows_holds_nothing_up_while_it_is_blocked() -> None:
    """A script that waits for its C++ threads."""
    scene = asked(python_segment(PID, [(PID, 0, 2000, OWN)])).wait(PID, 0, 1000, Wait.PIPE)
    assert shares(time_of(scene)) == {"idle": 0.5, "other": 0.5}


def test_what_was_not_watched_is_said() -> None:
    time = time_of(asked(python_segment(PID, [(PID, 1000, 2000, RUN)])))
    assert time.samples == 20
    assert time.covered == pytest.approx(0.5)
    assert shares(time) == {"generate": 1.0}


def test_segments_with_a_gap_are_one_story() -> None:
    time = time_of(
        asked(
            python_segment(PID, [(PID, 0, 900, RUN)]),
            python_segment(PID, [(PID, 1100, 2000, IMPORT)]),
        )
    )
    assert time.samples == 36
    assert shares(time) == {"generate": 0.5, "imports": 0.5}


def test_a_thread_that_only_waits_for_work_takes_nothing() -> None:
    scene = asked(python_segment(PID, [(PID, 0, 2000, IDLE), (WORKER, 0, 2000, RUN)]))
    assert shares(time_of(scene.thread(PID, WORKER, -1))) == {"generate": 1.0}


def test_all_idle_is_idle() -> None:
    time = time_of(asked(python_segment(PID, [(PID, 0, 2000, IDLE)])))
    assert shares(time) == {"idle": 1.0}
    assert time.stacks == ()


def test_the_thread_that_runs_wins_over_one_that_is_blocked() -> None:
    scene = asked(python_segment(PID, [(PID, 0, 2000, IMPORT), (WORKER, 0, 2000, RUN)]))
    scene.thread(PID, WORKER, -1).wait(PID, 0, 1000, Wait.LOCK)
    scene.wait(PID, 1000, 2000, Wait.LOCK, tid=WORKER)
    assert shares(time_of(scene)) == {"generate": 0.5, "imports": 0.5}


def test_two_that_run_share_the_moment() -> None:
    scene = asked(python_segment(PID, [(PID, 0, 2000, IMPORT), (WORKER, 0, 2000, RUN)]))
    time = time_of(scene.thread(PID, WORKER, -1))
    assert shares(time) == {"generate": 0.5, "imports": 0.5}
    assert sum(s.samples for s in time.shares) == time.samples == 40


def test_a_blocked_call_is_told_where_nothing_runs() -> None:
    """torch.compile waits for its workers, which are other processes."""
    waiting = [("torch/_inductor/async_compile.py", "wait", 1), ("python3.11/threading.py", "w", 1)]
    scene = asked(python_segment(PID, [(PID, 0, 2000, waiting), (LOOP, 0, 2000, IDLE)]))
    scene.thread(PID, LOOP, -1).wait(PID, 0, 2000, Wait.LOCK)
    scene.wait(PID, 0, 2000, Wait.NETWORK, tid=LOOP)
    assert shares(time_of(scene)) == {"compile": 1.0}


def test_a_dead_thread_holds_nothing_up() -> None:
    """py-spy goes on telling the last stack of a thread that has ended."""
    scene = asked(python_segment(PID, [(WORKER, 0, 2000, RUN), (PID, 0, 2000, IDLE)]))
    scene.thread(PID, WORKER, -1).thread_ended(PID, WORKER, 1000, since=-1)
    assert shares(time_of(scene)) == {"generate": 0.5, "idle": 0.5}


def test_another_process_is_not_asked() -> None:
    assert asked(python_segment(7, [(7, 0, 2000, RUN)])).only_request().python == ()


def test_the_most_frequent_stacks_first_whatever_their_lines() -> None:
    other_line = [*RUN[:-1], (RUN[-1][0], RUN[-1][1], 999)]
    spans: PythonSpans = [
        (PID, 0, 400, IMPORT),
        (PID, 400, 1200, RUN),
        (PID, 1200, 2000, other_line),
    ]
    first, second = time_of(asked(python_segment(PID, spans))).stacks
    assert first.samples == 32
    assert first.frames == ("serve.py:serve", "torch/nn/modules/linear.py:Linear.forward")
    assert (second.category, second.samples) == ("imports", 8)


def test_who_waited_for_storage_and_for_which_file() -> None:
    scene = asked(python_segment(PID, [(PID, 0, 1000, LOAD), (PID, 1000, 2000, RUN)]))
    scene.wait(PID, 100, 400, Wait.STORAGE, ino=A_GGUF).wait(PID, 1100, 1150, Wait.STORAGE)
    scene.wait(PID, 1200, 1900, Wait.LOCK)
    first, second = time_of(scene).waits
    assert (first.category, first.frame) == ("weights", "safetensors/torch.py:load_file:311")
    assert (first.path, first.wait_ns) == ("/models/a.gguf", 300 * MS)
    assert (second.category, second.path, second.wait_ns) == ("generate", None, 50 * MS)


@pytest.mark.parametrize(
    "broken",
    [
        {"rate_hz": 0},
        {"frames": []},
        {"spans": [[1, 2, 3]]},
        {"spans": [[1, 0, 5, 99]]},
        {"end_ns": -1},
        {"pid": "x"},
        {"stacks": [[-1]]},
    ],
)
def test_a_damaged_segment_is_a_damaged_recording(broken: dict[str, Any]) -> None:
    stamp, fact = python_segment(PID, [(PID, 0, 2000, RUN)])
    with pytest.raises(RecordingError):
        asked((stamp, fact | broken)).report()


# -- what is concluded ----------------------------------------------------------------------------


def watched(spans: PythonSpans) -> Request:
    return asked(python_segment(PID, spans)).only_request()


def test_the_verdict_names_what_most_samples_found() -> None:
    request = watched([(PID, 0, 1500, IMPORT), (PID, 1500, 2000, OWN)])
    assert "prefill: 75 ± 7 % of 40 samples" in request.verdict.explanation
    assert "importing Python modules (torch)" in request.verdict.explanation
    action = next(a for a in request.verdict.actions if "compileall" in a.change)
    assert action.expected_gain_ns == 1500 * MS
    assert any(e.source == "python_stacks" and e.value == 30 for e in request.verdict.evidence)


@pytest.mark.parametrize(
    "spans",
    [
        [(PID, 0, 2000, OWN)],  # nothing that the tables know
        [(PID, 0, 600, IMPORT), (PID, 600, 2000, OWN)],  # 30 ± 7 %: may be less than a quarter
        [(PID, 0, 400, IMPORT)],  # eight samples
        [(PID, 0, 2000, IDLE)],
    ],
)
def test_no_verdict_from_too_little(spans: PythonSpans) -> None:
    assert "samples found" not in watched(spans).verdict.explanation


def test_the_report_says_samples_and_errors() -> None:
    request = watched([(PID, 0, 1500, IMPORT), (PID, 1500, 2000, RUN)])
    first, *rest = python_report.lines(request)
    assert first == "prefill, by 40 samples: imports 75 ± 7 % (torch), generate 25 ± 7 % (torch)"
    assert any("torch/__init__.py:<module>" in line for line in rest)


def test_folded_stacks_add_up_to_the_samples() -> None:
    out = io.StringIO()
    report = asked(python_segment(PID, [(PID, 0, 1500, IMPORT), (PID, 1500, 2000, IDLE)])).report()
    python_report.write_folded(report, out)
    lines = [line.rsplit(" ", 1) for line in out.getvalue().splitlines()]
    assert sum(int(number) for _, number in lines) == 2_000 * MS
    parts = {name.split(";", 1)[1]: int(number) for name, number in lines}
    assert parts["prefill;idle"] == 500 * MS
    frozen = "<frozen\N{NO-BREAK SPACE}importlib._bootstrap>:_find_and_load"
    imported = f"prefill;imports;serve.py:<module>;{frozen};torch/__init__.py:<module>"
    assert parts[imported] == 1_500 * MS


# -- phases of a server without marked calls ------------------------------------------------------

BUILD = [("serve.py", "<module>", 5), ("torch/nn/modules/linear.py", "Linear.__init__", 9)]
TOKENS = [("serve.py", "<module>", 5), ("tokenizers/__init__.py", "encode", 9)]


def lazy(*, before: bool = False, watched: bool = True) -> Scene:
    """It imports, maps weights at 600 ms, copies them until 1000, tokenises and runs from 1200."""
    scene = Scene().process(PID, "python").request(PID, at=0, token=1_600)
    if before:
        scene.file(B_GGUF, "/models/other.safetensors").held(PID, B_GGUF)
        scene.request(PID, at=-40, token=-20, end=-10, ports=(8_080, 50_001))
    scene.file(A_GGUF, "/models/a.safetensors").opened(PID, A_GGUF, 590).mapped(PID, A_GGUF, 600)
    scene.file_row(A_GGUF, 610, added_pages=10).file_row(A_GGUF, 950, added_pages=900)
    spans: PythonSpans = [
        (PID, 0, 550, IMPORT), (PID, 550, 700, BUILD), (PID, 700, 1_000, LOAD),
        (PID, 1_000, 1_200, TOKENS), (PID, 1_200, 1_600, RUN),
    ]  # fmt: skip
    if watched:
        scene.fact("python_stacks", *python_segment(PID, spans))
    return scene


def phases_of(request: Request) -> list[tuple[str, float, float]]:
    return [(p.phase, ms(p.start_ns), ms(p.end_ns)) for p in request.phases]


@pytest.mark.parametrize("before", [False, True])
def test_samples_tell_load_init_and_prefill(before: bool) -> None:
    """Each edge lies half a period, 25 ms, before the look that found it passed."""
    request = lazy(before=before).report().requests[-1]
    assert phases_of(request) == [
        ("launch", 0, 600),
        ("load", 600, 975),
        ("init", 975, 1_175),
        ("prefill", 1_175, 1_600),
    ]
    assert request.switched
    assert next(f.path for f in request.files if f.is_weights) == "/models/a.safetensors"
    load, init = request.phases[1:3]
    assert load.basis == init.basis == "inferred"
    assert [(e.source, e.value) for e in init.evidence] == [("python_stacks", 25 * MS)]
    busy = {t.phase: t.shares[0].category for t in request.python}
    assert busy == {"launch": "imports", "load": "weights", "init": "tokenizer",
                    "prefill": "generate"}  # fmt: skip


def test_without_samples_the_files_alone_tell_of_the_load() -> None:
    request = lazy(watched=False).only_request()
    assert phases_of(request) == [
        ("unexplained", 0, 600),
        ("load", 600, 950),
        ("prefill", 950, 1_600),
    ]


@pytest.mark.parametrize(("imports_until", "phase"), [(310, "launch"), (290, "unexplained")])
def test_a_launch_inside_a_process_that_runs_is_seen_in_its_code(
    imports_until: float, phase: str
) -> None:
    """Importing for half of the time before the load, or only waiting."""
    waits = [("serve.py", "<module>", 5), ("python3.13/http/server.py", "do_POST", 9)]
    spans: PythonSpans = [(PID, 0, imports_until, IMPORT), (PID, imports_until, 700, waits)]
    scene = lazy(watched=False).fact("python_stacks", *python_segment(PID, spans))
    request = scene.only_request()
    assert phases_of(request)[0] == (phase, 0, 600)
    assert "the new server process" not in request.verdict.explanation


def test_weights_mapped_before_are_no_load() -> None:
    scene = Scene().process(PID, "python").request(PID, at=1_700, token=2_000)
    scene.file(A_GGUF, "/models/a.safetensors").mapped(PID, A_GGUF, 600)
    scene.fact("python_stacks", *python_segment(PID, [(PID, 1_700, 2_000, RUN)]))
    request = scene.only_request()
    assert not request.switched
    assert phases_of(request) == [("prefill", 1_700, 2_000)]
