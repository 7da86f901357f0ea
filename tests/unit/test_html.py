"""The HTML page as text: whole in itself, harmless, and with the numbers of the JSON report."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from ttftprof import scale
from ttftprof.cli.report import command
from ttftprof.model import ACTIVITIES, PHASES, PhaseShare, Report, WaitSplit
from ttftprof.reports import html, markdown, terminal, words
from ttftprof.reports import json as json_report
from unit import report_samples as samples
from unit.recordings import (
    GIB,
    MIB,
    MS,
    NEW,
    PythonSpans,
    gpu_switch,
    python_segment,
    router_switch,
)


class Page(HTMLParser):
    """Elements, attributes and the text of scripts and styles of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inline.append((*self._open, data))


def page(*reports: Report) -> str:
    out = io.StringIO()
    html.write(reports, out)
    return out.getvalue()


def data_of(text: str) -> dict[str, Any]:
    for tag, attributes, body in Page(text).inline:
        if tag == "script" and attributes.get("type") == "application/json":
            loaded: dict[str, Any] = json.loads(body)
            return loaded
    raise AssertionError("no data")


def on_gpus() -> Report:
    """A switch with parts, driver calls and two devices."""
    scene = gpu_switch().gpu(0).gpu(1)
    for at, used, busy in ((90, 4, 0), (160, 0, 0), (210, 3, 10), (520, 4, 60), (700, 4, 97)):
        scene.gpu_row(at, 0, used_bytes=used * GIB, busy_percent=busy)
        scene.gpu_row(at, 1, used_bytes=GIB, busy_percent=0)
    return scene.report()


ACTIVITY_PARTS = ("storage", "fault", "copy", "transfer")  # the text has them as activities
ALL = [
    on_gpus,
    samples.cold,
    samples.reswitch,
    samples.warm,
    samples.empty,
    samples.incomplete,
    samples.instant,
    samples.many,
]


@pytest.mark.parametrize("made", ALL, ids=lambda made: made.__name__)
def test_the_page_needs_nothing_else(made: Any) -> None:
    found = Page(page(made()))
    for tag, attributes in found.tags:
        assert not {"src", "srcset", "onclick", "onload", "style"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")


def test_the_policy_names_exactly_what_is_inline() -> None:
    found = Page(page(samples.cold()))
    policy = next(a["content"] or "" for t, a in found.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    for tag, attributes, body in found.inline:
        if attributes.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("name", samples.HOSTILE_NAMES, ids=range(len(samples.HOSTILE_NAMES)))
def test_a_hostile_name_adds_no_element_and_no_invisible_character(name: str) -> None:
    text = page(samples.hostile(name))
    tags = [tag for tag, _ in Page(text).tags]
    harmless = [tag for tag, _ in Page(page(samples.hostile("harmless"))).tags]
    assert not name or tags == harmless
    assert tags.count("script") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text)
    data_of(text)


def test_a_name_of_4_kb_is_cut() -> None:
    longest = max(len(s) for s in re.findall(r"x+", page(samples.hostile("x" * 4096))))
    assert longest <= 1_000


@pytest.mark.parametrize("made", [samples.cold, on_gpus], ids=["cold", "gpus"])
def test_every_number_in_the_tables_is_the_json_and_the_text_reports(
    made: Callable[[], Report],
) -> None:
    report = made()
    told, text = page(report), io.StringIO()
    terminal.write([report], text, 120, colour=False)
    request = json_report.as_json(report)["requests"][0]
    cells = re.findall(r'<td class="number" data-ns="(\d+)">([^<]*)</td>', told)
    shown = {(int(ns), words) for ns, words in cells}
    for phase in request["phases"]:
        lasted = phase["end_ns"] - phase["start_ns"]
        assert (lasted, scale.duration(lasted)) in shown
        for part in phase["parts"]:
            spent = scale.duration(part["spent_ns"])
            assert (part["spent_ns"], spent) in shown
            assert part["part"] in ACTIVITY_PARTS or f"{part['part']} {spent}" in text.getvalue()
    for device in request["gpu"]:
        for value in (
            scale.size(device["memory_before_bytes"]),
            scale.size(device["memory_after_bytes"]),
            scale.duration(device["busy_ns"]),
        ):
            assert f'<td class="number">{value}</td>' in told
            assert value in text.getvalue()
    assert f'class="value" data-ns="{request["ttft_ns"]}"' in told


def test_what_left_the_cache_has_a_column_where_there_is_some() -> None:
    cold = samples.cold()
    assert ">evicted<" not in page(cold)
    file = samples.weights(evicted_bytes=7_700_000, read_by_others_bytes=0)
    told = page(replace(cold, requests=(replace(cold.requests[0], files=(file,)),)))
    assert ">evicted<" in told
    assert f">{scale.size(7_700_000)}<" in told
    assert ">read by others<" not in told


def _waited_over_nfs() -> Report:
    cold = samples.cold()
    split = WaitSplit(queue_ns=3 * MS, wire_ns=600 * MS, client_ns=7 * MS)
    shares = (
        PhaseShare("load", 300_000_000, 610 * MS, split),
        PhaseShare("prefill", 14_572_800, 90 * MS, WaitSplit(wire_ns=90 * MS)),
        PhaseShare("init", 0, 0, WaitSplit()),
    )
    file = samples.weights(storage_wait_ns=700 * MS, by_phase=shares)
    return replace(cold, requests=(replace(cold.requests[0], files=(file,)),))


def test_storage_waits_are_split_by_file_and_phase_as_in_the_json_report() -> None:
    report = _waited_over_nfs()
    text = page(report)
    table = text[text.index('class="waits"') :]
    table = table[: table.index("</table>")]
    titles = re.findall(r"</svg>([^<]+)</th>", table[: table.index("<tbody>")])
    assert titles == ["queue", "wire + server", "client"]  # nothing waited at a device
    told = [
        [int(ns) for ns in re.findall(r'data-ns="(\d+)"', row)]
        for row in table.split("<tr>")
        if "</th><td" in row
    ]
    (file,) = json_report.as_json(report)["requests"][0]["files"]
    expected = [
        [p["storage_wait_ns"], *(p["wait_split"][n] for n in ("queue_ns", "wire_ns", "client_ns"))]
        for p in file["by_phase"]
        if p["storage_wait_ns"]
    ]
    assert told == expected
    assert all(row[0] == sum(row[1:]) for row in told)
    assert 'class="waits"' not in page(samples.warm())


def test_what_python_code_did_is_drawn_by_category() -> None:
    weights, idle = ("torch/serialization.py", "load", 9), ("python3.11/threading.py", "wait", 1)
    main = ("server.py", "main", 1)
    spans: PythonSpans = [
        (NEW, 200, 350, [main, weights]),
        (NEW, 350, 400, [idle]),
        (NEW, 400, 500, [main, weights]),
    ]
    report = router_switch().fact("python_stacks", *python_segment(NEW, spans)).report()
    drawn = data_of(page(report))
    (calls,) = [c for p in drawn["recordings"][0]["processes"] for c in p["python"]]
    assert calls["label"] == f"Python of thread {NEW}"
    assert calls["names"] == ["weights"]
    assert calls["d"] == [150 * MS, 100 * MS]
    assert drawn["python"]["weights"] == "reading weights"


def test_parts_and_gpus_are_drawn_with_the_json_reports_times() -> None:
    report = on_gpus()
    document = json_report.as_json(report)
    drawn = data_of(page(report))["recordings"][0]
    origin = drawn["start_ns"]
    parts = [
        [(name, start + origin, end + origin, spent) for name, start, end, spent, *_ in phase[5]]
        for phase in drawn["subjects"][0]["phases"]
    ]
    assert parts == [
        [(p["part"], p["start_ns"], p["end_ns"], p["spent_ns"]) for p in phase["parts"]]
        for phase in document["requests"][0]["phases"]
    ]
    assert {name for phase in parts for name, *_ in phase} >= {"context", "kv_alloc", "warmup"}
    curves = [(s["name"], s["path"]) for s in drawn["series"]]
    for path in ("GPU 0", "GPU 1"):
        assert {("gpu_memory_bytes", path), ("gpu_busy", path)} <= set(curves)
    (copied,) = [s for s in drawn["series"] if s["name"] == "transfer_bytes"]
    assert copied["v"][-1] == 160 * MIB
    (calls,) = [p["driver_calls"] for p in drawn["processes"] if p["driver_calls"]["d"]]
    assert sum(calls["b"] if "b" in calls else calls["d"]) == 135 * MS
    assert "cuGraphInstantiate" in calls["names"]


def test_every_phase_and_activity_has_a_colour() -> None:
    style = html.asset("report.css")
    for name in (*PHASES, *ACTIVITIES):
        assert f" --{name}: #" in style
        assert f".fill-{name} {{ fill: var(--{name}); }}" in style


# As machado2009 simulates them, severity 1.0: linear RGB to what is seen.
_SEEN_BY = {
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
}


def _lab(rgb: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIE L*a*b* (D65) of linear RGB."""
    to_xyz = [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _colours(theme: str, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """{name: linear RGB}"""
    style = html.asset("report.css")
    light, dark = style.split(':root[data-theme="dark"]')
    own = {}
    for name in names:
        told = [re.search(rf" --{name}: #([0-9a-f]{{6}})", part) for part in (light, dark)]
        chosen = told[1] if theme == "dark" and told[1] else told[0]
        assert chosen
        encoded = np.array([int(chosen[1][i : i + 2], 16) / 255 for i in (0, 2, 4)])
        linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
        own[name] = linear
    return own


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", [None, *_SEEN_BY])
@pytest.mark.parametrize("names", [PHASES, ACTIVITIES], ids=["phases", "activities"])
def test_colours_stay_apart_for_every_eye(
    theme: str, eyes: str | None, names: tuple[str, ...]
) -> None:
    """Distance in L*a*b*; what is next to each other in a switch keeps more."""
    seen = {
        name: _lab(np.array(_SEEN_BY[eyes]) @ rgb if eyes else rgb)
        for name, rgb in _colours(theme, names).items()
    }
    apart = {
        (one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for one, other in combinations(names, 2)
    }
    assert min(apart.values()) > 8, min(apart, key=lambda pair: apart[pair])
    if names is PHASES:
        assert min(apart[pair] for pair in pairwise(PHASES[:-1])) > 15, apart


def test_the_printed_table_adds_up_to_the_printed_whole() -> None:
    text = page(samples.cold())
    matrix = text[
        text.index('class="matrix"') : text.index("</table>", text.index('class="matrix"'))
    ]
    body, foot = matrix[: matrix.index("<tfoot")], matrix[matrix.index("<tfoot") :]
    totals = [
        round(float(t) * 1000) for t in re.findall(r'total" data-ns="\d+">([\d.]+)</td>', body)
    ]
    whole = re.search(r'whole">([\d.]+)<', foot)
    assert whole
    assert sum(totals) == round(float(whole[1]) * 1000) == 1_562_314


def test_the_drawing_has_the_json_reports_times() -> None:
    report = samples.cold()
    document = json_report.as_json(report)
    drawn = data_of(page(report))
    recording = drawn["recordings"][0]
    for subject, request in zip(recording["subjects"], document["requests"], strict=True):
        origin = recording["start_ns"]
        told = [
            (drawn["phases"][code], start + origin, end + origin)
            for code, start, end, *_ in subject["phases"]
        ]
        assert told == [(p["phase"], p["start_ns"], p["end_ns"]) for p in request["phases"]]
        busy = subject["activities"].get("b") or subject["activities"]["d"]
        assert sum(busy) == request["ttft_ns"]


def test_what_is_missing_stands_first() -> None:
    text = page(samples.incomplete())
    first = text.index('class="warnings"')
    assert first < text.index('class="card headline"')
    assert len(words.warnings(samples.incomplete())) == text[first:].split("</ul>")[0].count("<li>")


def test_what_never_came_is_called_so_in_every_output() -> None:
    """A start that was not seen to its end is no start that took so long; nor is a failed wait."""
    told = samples.never_ended()
    text, note = io.StringIO(), io.StringIO()
    terminal.write([told], text, 100, colour=False, everything=True)
    markdown.write(told, note)
    for words_of_it in ("not seen to its end", "failed before a first token"):
        assert words_of_it in page(told)
        assert words_of_it in text.getvalue()
        assert words_of_it in note.getvalue()
    assert ">to start<" not in page(told)
    assert page(told).count(" *</td>") == 2
    compact = io.StringIO()
    terminal.write([told], compact, 100, colour=False, compact=True, everything=True)
    rows = compact.getvalue().splitlines()[1:3]
    assert [re.split(" {2,}", row)[2:4] for row in rows] == [
        ["n/a", "incomplete"],
        ["n/a", "error"],
    ]
    able = replace(told.starts[0], outcome="ok")
    assert ">to start<" in page(replace(told, starts=(able,)))


def test_many_requests_make_no_heavy_page() -> None:
    text = page(samples.many(500))
    assert text.count("data-row=") == 500
    assert text.count('class="phases"') == 40
    assert len(text) < 1_500_000


def test_the_command_writes_a_page_of_several_recordings(tmp_path: Path) -> None:
    demo = [router_switch().write(tmp_path / f"{name}.ttft") for name in ("one", "two")]
    out = tmp_path / "out.html"
    done = CliRunner().invoke(command, [*map(str, demo), "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert len(data_of(out.read_text("utf-8"))["recordings"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.ttft", "out.html", "two.ttft"]


@given(samples.any_report())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_report_makes_a_page(report: Report) -> None:
    data_of(page(report))
