"""One wait against another: numbers that add up, the right phase blamed, circumstances told."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, given, settings

from ttftprof import analysis, diff
from ttftprof.cli.diff import command
from ttftprof.diff import Comparison, Wait, circumstances, compare, length_ns
from ttftprof.errors import UsageError
from ttftprof.model import ProcessTrack, Report, Series, Spans, Tracks
from ttftprof.reports import diff_terminal, diff_words, html
from unit import report_samples as samples
from unit.recordings import router_switch


def wait(report: Report) -> Wait:
    return Wait(report, report.requests[0])


def cold_against_warm() -> Comparison:
    return compare(wait(samples.warm()), wait(samples.cold()))


def text_of(*comparisons: Comparison, width: int = 100) -> str:
    out = io.StringIO()
    diff_terminal.write(comparisons, out, width, colour=False)
    return out.getvalue()


def test_the_first_phase_that_grew_beyond_noise_is_named_not_the_biggest() -> None:
    comparison = cold_against_warm()
    assert comparison.noise_ns == 27_600_000
    # evict grew first (61 ms), but is less than a fifth of all growth; so is launch.
    assert comparison.blamed == "load"
    text = text_of(comparison)
    assert "first to grow: load, +812.0 ms (0 s → 812.0 ms), most of it storage_wait" in text
    assert "more than 27.60 ms (10 % of the base's wait" in " ".join(text.split())


def test_nothing_grew_against_itself() -> None:
    comparison = compare(wait(samples.cold()), wait(samples.cold()))
    assert comparison.blamed is None
    assert comparison.growth_ns == 0
    assert comparison.circumstances == ()
    text = text_of(comparison)
    assert "no phase grew beyond noise" in text
    assert "nothing else that is known was different" in text


def test_growth_within_noise_blames_nobody() -> None:
    report = samples.warm()
    request = report.requests[0]
    *before, last = request.phases
    longer = replace(last, end_ns=last.end_ns + 20_000_000)
    other = replace(request, phases=(*before, longer), first_token_ns=longer.end_ns)
    assert compare(wait(report), Wait(report, other)).blamed is None


@given(samples.any_report(), samples.any_report())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_printed_differences_add_up(base: Report, other: Report) -> None:
    assume(base.requests and other.requests)
    comparison = compare(wait(base), wait(other))
    cells = diff_words.difference_us(comparison)
    exact = sum(map(sum, (c.values() for c in comparison.other_cells.values())))
    exact -= sum(map(sum, (c.values() for c in comparison.base_cells.values())))
    assert abs(sum(map(sum, cells)) * 1_000 - exact) <= 1_000
    for width in (60, 120):
        assert all(len(line) <= 4 * width for line in text_of(comparison, width=width).split("\n"))


def test_circumstances_name_arguments_context_kernel_mount_and_read_ahead() -> None:
    base, other = samples.cold(), samples.cold()
    mount = replace(other.requests[0].mounts[0], options="rw,noatime", read_ahead_kb=4096)
    request = replace(other.requests[0], mounts=(mount,))
    other = replace(
        other,
        host={**other.host, "kernel": "7.0.1"},
        requests=(request,),
        tracks=_served_by("/opt/llama-server", "-c", "8192", "--port", "1", "--no-mmap"),
    )
    base = replace(
        base, tracks=_served_by("/opt/llama-server", "--ctx-size", "4096", "--port", "2")
    )
    found = {c.name: (c.base, c.other) for c in compare(wait(base), wait(other)).circumstances}
    assert found == {
        "kernel": ("6.18.44", "7.0.1"),
        "mount options": ("rw,relatime", "rw,noatime"),
        "read-ahead, KiB": ("128", "4096"),
        "context size": ("4096", "8192"),
        "argument --no-mmap": (None, "given"),
    }


def _served_by(*argv: str) -> Tracks:
    begin, end = samples.BEGAN_NS, samples.BEGAN_NS + 10**11
    running = Series("threads_running", "threads", None, (), ())
    front = ProcessTrack(1, "1 router", ("router",), begin, end, running, (), 0, Spans("calls"))
    server = replace(front, tgid=2, argv=argv, start_ns=begin + 1)
    return Tracks(processes=(front, server))


def test_words_and_negative_numbers_are_no_options() -> None:
    report = replace(samples.cold(), tracks=_served_by("x", "serve", "-n", "-1", "--a=b=c"))
    told = circumstances(wait(report))
    assert told["argument (words)"] == "serve"
    assert told["argument -n"] == "-1"
    assert told["argument --a"] == "b=c"


def test_the_quickest_is_the_base_and_the_slowest_is_explained() -> None:
    report = samples.many(20)
    quick, slow = diff.quickest(report), diff.slowest(report)
    lengths = [length_ns(r) for r in report.requests]
    assert quick is not None
    assert slow is not None
    assert (length_ns(quick), length_ns(slow)) == (min(lengths), max(lengths))
    assert diff.quickest(samples.incomplete()) is None


@pytest.mark.parametrize("name", samples.HOSTILE_NAMES, ids=range(len(samples.HOSTILE_NAMES)))
def test_hostile_names_stay_text(name: str) -> None:
    comparison = compare(wait(samples.cold()), wait(samples.hostile(name)))
    text = text_of(comparison)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_the_page_of_a_comparison_stands_before_the_recordings() -> None:
    out = io.StringIO()
    html.write_comparison([cold_against_warm()], out)
    text = out.getvalue()
    assert text.index('class="card comparison"') < text.index('class="recording"')
    assert "first to grow: load" in text


def test_each_wait_of_a_page_has_a_timeline_of_its_own_that_begins_with_its_request() -> None:
    """Also where both are of one recording."""
    many = samples.many(3)
    one, two, three = (Wait(many, request) for request in many.requests)
    out = io.StringIO()
    html.write_comparison([compare(two, one), compare(two, three)], out)
    text = out.getvalue()
    chosen = re.findall(r'class="recording" data-recording="\d" data-subject="(\d)"', text)
    assert chosen == ["1", "0", "2"]
    names = [f"many, request {w.request.id}" for w in (two, one, three)]
    assert re.findall(r'<h1 id="name-\d"><bdi>([^<]+)</bdi>', text) == names
    assert '"linked":true' in text


def test_the_command(tmp_path: Path) -> None:
    path = str(router_switch().write(tmp_path / "run.ttft"))
    done = CliRunner().invoke(command, [path, path, "--width", "80"])
    assert done.exit_code == 0, done.output
    assert "against" in done.output
    done = CliRunner().invoke(command, [path, path, "--html", str(tmp_path / "d.html")])
    assert done.exit_code == 0, done.output
    assert "comparison" in (tmp_path / "d.html").read_text("utf-8")


def test_a_recording_against_itself_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = router_switch().write(tmp_path / "run.ttft")
    read: list[Path] = []
    analyse = analysis.analyse

    def counted(path: Path) -> Report:
        read.append(path)
        return analyse(path)

    monkeypatch.setattr(analysis, "analyse", counted)
    done = CliRunner().invoke(command, [str(path)] * 3)
    assert done.exit_code == 0, done.output
    assert read == [path]


def test_a_request_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    path = str(router_switch().write(tmp_path / "run.ttft"))
    done = CliRunner().invoke(command, [path, path, "--request", "99"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.message.endswith("has no request '99'")
    assert done.exception.next_step.startswith("it has: 1")
