"""The report for people: whole against a golden file, within any width, harmless, adding up.

    TTFTPROF_REFRESH_GOLDEN=1 .venv/bin/pytest tests/unit/test_report_terminal.py

rewrites the golden file; look at the difference before it is committed.
"""

from __future__ import annotations

import io
import os
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from ttftprof.model import PHASES, Report, SourceState
from ttftprof.reports import flame
from ttftprof.reports.flame import PHASE_PAINT
from ttftprof.reports.safe import clip, clip_middle, clip_path, plain
from ttftprof.reports.terminal import write
from unit import report_samples as samples

GOLDEN = Path(__file__).parents[1] / "golden" / "report_80.txt"
WIDTHS = (60, 80, 100, 140, 200)
SGR = re.compile(r"\x1b\[[0-9;]*m")
DEMO = (samples.cold(), samples.reswitch(), samples.warm())


def shown(
    *reports: Report,
    width: int = 80,
    colour: bool = False,
    compact: bool = False,
    everything: bool = False,
) -> str:
    """The text, checked for what holds of every report."""
    out = io.StringIO()
    write(reports, out, width, colour, compact=compact, everything=everything)
    text = out.getvalue()
    assert text.endswith("\n")
    bare = SGR.sub("", text)
    for line in bare.split("\n"):
        assert cell_len(line) <= width, line
        assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs") for c in line), repr(line)
    if not colour:
        assert bare == text
    return text


@given(st.integers(20, 180), st.booleans())
def test_a_legend_tears_no_name_from_its_block(width: int, colour: bool) -> None:
    lines = flame.legend(PHASES, width, colour).plain.split("\n")
    assert all(len(line) <= width for line in lines)
    told = [item for line in lines for item in re.findall(r"(..) (\w+)(?:  |$)", line)]
    assert [name for _, name in told] == list(PHASES)
    assert colour or len({block for block, _ in told}) == len(PHASES)


# -- the whole ------------------------------------------------------------------------------------


def test_golden_report_at_80_columns() -> None:
    text = shown(*DEMO)
    if os.environ.get("TTFTPROF_REFRESH_GOLDEN"):
        GOLDEN.write_text(text, "utf-8")
    assert text == GOLDEN.read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
def test_colour_changes_no_word(width: int) -> None:
    def words(text: str) -> list[str]:
        letters = "".join(c if c.isalnum() or c in ".,%/" else " " for c in SGR.sub("", text))
        return [word for word in letters.split() if word]

    assert words(shown(*DEMO, width=width, colour=True)) == words(shown(*DEMO, width=width))


def test_nothing_stands_before_the_report_when_all_is_well() -> None:
    assert shown(samples.cold()).startswith("cold · llama-server")
    assert "!" not in shown(*DEMO)


def test_losses_stand_first() -> None:
    lines = shown(samples.incomplete(), width=200).split("\n")
    assert lines[0].startswith("! lost 1,234 × events ring full: ")
    assert lines[1].startswith("! recording is incomplete")
    assert lines[2] == "! block absent: the kernel has no block_rq_issue; no request sizes"
    assert lines[3] == "! gpu degraded"


def test_compact_is_one_line_a_request() -> None:
    lines = shown(*DEMO, compact=True).rstrip("\n").split("\n")
    assert [line.split()[0] for line in lines[:4]] == ["recording", "cold", "reswitch", "warm"]
    assert len(lines) == 5


def test_overview_bars_share_one_scale() -> None:
    lines = shown(*DEMO, compact=True, width=140).split("\n")
    fills = "".join(PHASE_PAINT[phase].fill for phase in PHASES) + "╏"
    lengths = [len(re.findall(rf"[{re.escape(fills)}]", line)) for line in lines[1:4]]
    assert lengths[1] / lengths[0] == pytest.approx(669 / 1562, abs=0.02)
    assert lengths[2] / lengths[0] == pytest.approx(276 / 1562, abs=0.02)


# -- what it says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_printed_table_adds_up_to_the_ttft(width: int) -> None:
    """Every printed row adds up to its total, the totals to the TTFT, the percentages to 100."""
    text = shown(samples.cold(), width=width)
    assert re.search(r"total .* 1562\.314", text)
    if width < 80:  # in bands: rows continue below
        return
    table = text[text.index("phase ×") : text.index("~ init is")].split("\n")
    totals, shares = [], []
    for line in table[2:-3]:
        *parts, total, share = map(float, re.findall(r"\d+\.\d+", line))
        assert sum(parts) == pytest.approx(total, abs=1e-6)
        totals.append(total)
        shares.append(share)
    assert len(totals) == 7
    assert sum(totals) == pytest.approx(1562.314, abs=1e-6)
    assert sum(shares) == pytest.approx(100.0)


def test_absent_is_na_and_never_zero() -> None:
    text = shown(samples.cold(), width=200)
    (library,) = [line for line in text.split("\n") if "libggml" in line]
    assert library.count("n/a") == 4
    row = shown(samples.incomplete(), compact=True).split("\n")[-3]
    assert row.split()[:3] == ["n/a", "n/a", "incomplete"]


def test_weights_stand_first_among_files() -> None:
    text = shown(samples.cold())
    assert text.index("model-b.gguf") < text.index("libggml")


def test_a_request_without_first_token_says_so() -> None:
    text = shown(samples.incomplete())
    assert "no first token while recorded, 2.060 s seen" in text
    assert "TTFT 2" not in text


def test_no_request_says_what_to_do() -> None:
    text = shown(samples.empty())
    assert "no request for text was seen" in text
    assert "ttftprof record" in text


def test_without_probes_the_relay_is_the_way_to_requests() -> None:
    sources = (SourceState("sockets", "absent", "no probes"), SourceState("files", "degraded", "x"))
    text = shown(replace(samples.empty(), sources=sources))
    assert "Sources that worked: nothing; in part: files." in text
    assert "--relay PORT" in text


def test_sources_for_file_systems_that_no_file_lay_on_did_not_work_for_this() -> None:
    sources = (
        SourceState("files", "ok"),
        SourceState("nfs", "ok", "no file lies on nfs or nfs4"),
        SourceState("fuse", "ok"),
    )
    text = shown(replace(samples.empty(), sources=sources))
    assert "Sources that worked: files, fuse." in text


def test_what_is_not_known_of_a_curve_is_explained_where_it_is() -> None:
    cold = samples.cold()
    assert "· not known at that moment" not in shown(cold)
    late = replace(cold.series[-1], ns=cold.series[-1].ns[20:], values=cold.series[-1].values[20:])
    lines = shown(replace(cold, series=(*cold.series[:-1], late))).split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("in page cache"))
    assert "·" in lines[at]
    assert lines[at + 1].strip() == "· not known at that moment"


@pytest.mark.parametrize("width", WIDTHS)
def test_advice_is_whole_and_broken_between_items(width: int) -> None:
    advice = ("FADV_SEQUENTIAL", "MAP_POPULATE", "MADV_WILLNEED")
    cold = samples.cold()
    request = replace(cold.requests[0], files=(samples.weights(advice=advice),))
    text = shown(replace(cold, requests=(request,)), width=width)
    assert all(item in text for item in advice)


def test_phases_too_short_to_draw_are_marked_and_named() -> None:
    text = shown(samples.cold())
    assert "╏ too short to draw: ready_gap 9.130 ms" in text


def test_nothing_is_drawn_of_no_time() -> None:
    assert "no time passed" in shown(samples.instant())


def test_only_the_slowest_of_many_are_detailed() -> None:
    many = samples.many(500)
    text = shown(many)
    assert len(re.findall(r"^request \d", text, re.MULTILINE)) == 3
    assert "460 faster requests are not shown" in text
    everything = shown(many, everything=True)
    assert len(re.findall(r"^request \d", everything, re.MULTILINE)) == 500


def test_fills_tell_phases_apart_without_colour() -> None:
    assert set(PHASE_PAINT) == set(PHASES)
    assert len({paint.fill for paint in PHASE_PAINT.values()}) == len(PHASES)
    assert len({paint.colour for paint in PHASE_PAINT.values()}) == len(PHASES)


# -- whatever comes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", samples.HOSTILE_NAMES, ids=range(len(samples.HOSTILE_NAMES)))
@pytest.mark.parametrize("width", [60, 80, 140])
def test_hostile_names_are_harmless(name: str, width: int) -> None:
    for colour in (False, True):
        text = shown(samples.hostile(name), width=width, colour=colour)
        assert len(text) < 60_000


def test_markup_is_shown_as_it_is() -> None:
    assert "[bold]not markup[/bold]" in shown(samples.hostile(samples.HOSTILE_NAMES[3]), width=140)


@given(st.text(max_size=80), st.integers(0, 60))
def test_clipped_text_fits(text: str, width: int) -> None:
    safe = plain(text)
    for clipped in (clip(safe, width), clip_middle(safe, width), clip_path(safe, width)):
        assert cell_len(clipped) <= width


def test_paths_lose_folders_before_their_name() -> None:
    path = "/srv/models/llama/3/model-b.gguf"
    assert clip_path(path, 40) == path
    assert clip_path(path, 28) == "/srv/models/…/model-b.gguf"
    assert clip_path(path, 9) == "mode…gguf"


@given(
    st.lists(samples.any_report(), min_size=1, max_size=2), st.sampled_from(WIDTHS), st.booleans()
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_report_is_shown_within_its_width(
    reports: list[Report], width: int, colour: bool
) -> None:
    shown(*reports, width=width, colour=colour)
    shown(*reports, width=width, colour=colour, compact=True)
