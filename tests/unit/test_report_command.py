"""`ttftprof report`: options, widths, colour, several files, a reader that goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from click.testing import CliRunner, Result

from conftest import unsupported
from lab.long_recording import write_long
from ttftprof import analysis
from ttftprof.analysis import OneByOne
from ttftprof.cli import output
from ttftprof.cli.report import command
from ttftprof.errors import OutputError, RecordingError, Unsupported, UsageError
from ttftprof.model import Report, Request
from ttftprof.recording import Writer
from ttftprof.reports import json as json_report
from unit import report_samples as samples
from unit.recordings import router_switch

NOBODY = 65534
REPORTS = {
    "cold": samples.cold,
    "warm": samples.warm,
    "instant": samples.instant,
    "empty": samples.empty,
    "never_ended": samples.never_ended,
}


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that the analysis reads as the samples of their names."""
    monkeypatch.setattr(
        "ttftprof.analysis.analyse", lambda path, drawn, choice: REPORTS[path.stem]()
    )
    monkeypatch.setattr(
        "ttftprof.analysis.analyse_one_by_one", lambda path: one_by_one(REPORTS[path.stem]())
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in REPORTS:
        (tmp_path / f"{name}.ttft").touch()
    return tmp_path


def one_by_one(report: Report) -> OneByOne:
    rest = replace(report, requests=(), series=())
    return OneByOne(rest, iter(report.requests), lambda: report.series)


def run(folder: Path, *arguments: str) -> Result:
    paths = [str(folder / a) if a.endswith(".ttft") else a for a in arguments]
    return CliRunner().invoke(command, paths, standalone_mode=False)


def printed(folder: Path, *arguments: str) -> str:
    result = run(folder, *arguments)
    assert result.exception is None, result.exception
    return result.output


def test_text_is_100_wide_and_plain_into_a_pipe(recordings: Path) -> None:
    text = printed(recordings, "cold.ttft")
    assert "\x1b" not in text
    assert max(map(len, text.split("\n"))) <= 100
    assert "├──" in text


def test_colour_on_demand(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in printed(recordings, "cold.ttft", "--color", "always")
    assert "\x1b[" not in printed(recordings, "cold.ttft", "--color", "never")


def test_one_file_is_one_object_and_several_are_lines(recordings: Path) -> None:
    one = json.loads(printed(recordings, "cold.ttft", "--format", "json"))
    assert one["requests"][0]["ttft_ns"] == 1_562_314_159
    lines = printed(recordings, "cold.ttft", "warm.ttft", "--format", "json").splitlines()
    assert [json.loads(line)["recording"]["path"] for line in lines] == ["cold.ttft", "warm.ttft"]


def test_compact_is_short(recordings: Path) -> None:
    assert len(printed(recordings, "--compact", "cold.ttft", "warm.ttft").splitlines()) == 4


def test_one_request_alone(recordings: Path) -> None:
    text = printed(recordings, "instant.ttft", "--request", "2")
    assert "request 2" in text
    assert "request 1" not in text
    document = json.loads(printed(recordings, "instant.ttft", "--request", "2", "--format", "json"))
    assert [request["id"] for request in document["requests"]] == ["2"]


@pytest.mark.parametrize(("identity", "ended"), [
    ("1", "failed before a first token"), ("start 1", "not seen to its end"),
])  # fmt: skip
def test_one_alone_is_shown_whatever_it_is_and_nothing_beside_it(
    identity: str, ended: str, recordings: Path
) -> None:
    chosen = ("never_ended.ttft", "--request", identity)
    text = printed(recordings, *chosen)
    assert f"{ended}, 1.562 s seen" in text
    assert text.count("verdict: ") == 1
    assert "error and no text" not in text
    document = json.loads(printed(recordings, *chosen, "--format", "json"))
    assert [r["id"] for r in (*document["requests"], *document["starts"])] == [identity]
    error = run(recordings, "never_ended.ttft", "--request", "9").exception
    assert isinstance(error, UsageError)
    assert "1, start 1" in error.next_step or "start 1, 1" in error.next_step


@pytest.mark.parametrize("width", ["59", "201", "0", "-3"])
def test_a_width_out_of_range_is_refused(recordings: Path, width: str) -> None:
    error = run(recordings, "cold.ttft", "--width", width).exception
    assert isinstance(error, UsageError)
    assert error.exit_code == 2


def test_an_unknown_request_is_told_which_there_are(recordings: Path) -> None:
    error = run(recordings, "instant.ttft", "--request", "9").exception
    assert isinstance(error, UsageError)
    assert "0, 1, 2" in error.next_step
    error = run(recordings, "empty.ttft", "--request", "9").exception
    assert isinstance(error, UsageError)


@pytest.mark.parametrize("command_line", [
    ["report"], ["report", "--format", "json"], ["dump"], ["diff", "also-absent.ttft"],
    ["export", "--to", "csv", "-o", "-"],
])  # fmt: skip
@pytest.mark.parametrize("what", ["absent.ttft", "."])
def test_what_is_no_recording_is_told_with_a_next_step(
    command_line: list[str], what: str, tmp_path: Path
) -> None:
    done = ttftprof(*command_line, str(tmp_path / what))
    assert done.returncode == RecordingError.exit_code
    assert "does not exist or is no file\n  next: " in done.stderr


def ttftprof(*arguments: str, shell: str = '"$@"', **environment: str) -> CompletedProcess[str]:
    """The program itself, started by a shell that may do things to its output."""
    program = [sys.executable, "-m", "ttftprof", *arguments]
    return subprocess.run(
        ["bash", "-c", shell, "bash", *program],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_a_reader_that_goes_away_is_no_failure() -> None:
    done = ttftprof("doctor", shell='"$@" | head -c 1 >/dev/null; exit "${PIPESTATUS[0]}"')
    assert done.stderr == ""
    assert done.returncode in (0, Unsupported.exit_code)


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    path = router_switch().write(tmp_path / "a.ttft")
    for name in ("report", "dump"):
        done = ttftprof(name, str(path), shell='"$@" >&-')
        assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_of_ascii_gets_what_looks_alike(tmp_path: Path) -> None:
    path = router_switch().write(tmp_path / "a.ttft")
    done = ttftprof("report", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "?" not in done.stdout
    assert "#load#" in done.stdout


def test_errors_and_trees_have_signs_of_ascii_too() -> None:
    assert "80 ± 4 %, −2, └▌".encode("ascii", "ttftprof") == b"80 ~ 4 %, -2, `:"


def test_help_gives_examples() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    assert "ttftprof report cold.ttft warm.ttft" in text
    assert "JSON Lines" in " ".join(text.split())


_PIPED = """
import sys
sys.path.insert(0, {tests!r})
import ttftprof.analysis
from ttftprof.cli import main
from unit import report_samples
ttftprof.analysis.analyse = lambda path, drawn, choice: report_samples.many(500)
main(["report", "--all", {path!r}])
"""


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "many.ttft"
    path.touch()
    script = _PIPED.format(tests=str(Path(__file__).parents[1]), path=str(path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.read(10)
        program.stdout.close()
        assert b"Traceback" not in program.stderr.read()


def test_importing_the_command_loads_neither_rich_nor_numpy() -> None:
    script = (
        "import sys, ttftprof.cli.report, ttftprof.reports; "
        "print([m for m in ('rich', 'numpy', 'ttftprof.analysis') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"


def test_a_recording_is_never_replaced_by_what_is_made_of_one(
    recordings: Path, tmp_path: Path
) -> None:
    """As `report --html *.ttft` would."""
    path = tmp_path / "precious.ttft"
    Writer(path).close(complete=True)
    before = path.read_bytes()
    for page in (path, tmp_path / "link"):
        if not page.exists():
            page.symlink_to(path)
        result = run(recordings, "cold.ttft", "--html", str(page))
        assert isinstance(result.exception, OutputError)
        assert "is a recording" in result.exception.message
    assert path.read_bytes() == before


def test_a_page_goes_through_a_link_and_into_a_pipe(recordings: Path, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    assert run(recordings, "cold.ttft", "--html", str(link)).exception is None
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run(recordings, "cold.ttft", "--html", str(pipe)).exception is None
        assert reader.stdout
        assert reader.stdout.read().startswith("<!doctype html>")
    assert pipe.is_fifo()
    with pytest.raises(OutputError, match="is a folder"), output.text_file(tmp_path):
        pass


def test_a_link_that_another_user_planted_is_not_followed(recordings: Path, tmp_path: Path) -> None:
    """In a folder as /tmp; a rename would go past the kernel's own protection."""
    if os.geteuid() != 0:
        unsupported("only root can make a link of another user")
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.write_text("precious")
    link, way_there = shared / "page.html", tmp_path / "link.html"
    link.symlink_to(victim)
    way_there.symlink_to(link)
    os.lchown(link, NOBODY, NOBODY)
    for page in (link, way_there):
        refused = run(recordings, "cold.ttft", "--html", str(page)).exception
        assert isinstance(refused, OutputError)
        assert "another user made" in refused.message
    assert victim.read_text() == "precious"
    os.lchown(link, 0, 0)
    assert run(recordings, "cold.ttft", "--html", str(link)).exception is None
    assert victim.read_text().startswith("<!doctype html>")


def test_a_link_to_itself_is_said(recordings: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.html").symlink_to("loop.html")
    refused = run(recordings, "cold.ttft", "--html", str(tmp_path / "loop.html")).exception
    assert isinstance(refused, OutputError)
    assert "leads to itself" in refused.message


def test_a_page_into_a_descriptor_and_memory(recordings: Path, tmp_path: Path) -> None:
    with (tmp_path / "page.html").open("w+") as page:
        page.write("<!-- before -->")
        page.flush()
        number = page.fileno()
        with output.text_file(Path(f"/dev/fd/{number}")) as out:
            out.write("there")
        assert os.path.samestat(os.fstat(number), (tmp_path / "page.html").stat())
    assert (tmp_path / "page.html").read_text() == "there"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        path = Path(memory) / "precious.ttft"
        Writer(path).close(complete=True)
        result = run(recordings, "cold.ttft", "--html", str(path))
        assert isinstance(result.exception, OutputError)


@pytest.mark.parametrize("option", [("--format", "json"), ("--compact",), ("--all",)])
def test_a_page_and_another_output_are_refused(recordings: Path, option: tuple[str, ...]) -> None:
    page = recordings / "page.html"
    result = run(recordings, "cold.ttft", "--html", str(page), *option)
    assert isinstance(result.exception, UsageError)
    assert " ".join(option) in result.exception.message
    assert not page.exists()


def test_the_umask_decides_who_may_read_what_is_made_to_be_shared(recordings: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            assert run(recordings, "cold.ttft", "--html", str(recordings / "p.html")).exit_code == 0
        finally:
            os.umask(before)
        assert (recordings / "p.html").stat().st_mode & 0o777 == mode


def test_a_page_on_standard_output(recordings: Path) -> None:
    assert printed(recordings, "cold.ttft", "--html", "-").startswith("<!doctype html>")


def test_json_that_is_written_one_by_one_is_that_of_the_whole(tmp_path: Path) -> None:
    path = write_long(tmp_path / "long.ttft", 6_000, requests=3)
    whole = analysis.analyse(path, drawn=False)
    assert len(whole.requests) == 3
    assert whole.series
    text = printed(tmp_path, "long.ttft", "--format", "json")
    document = json_report.as_json(whole)
    assert text == json.dumps(document, separators=(",", ":")) + "\n"


def test_json_is_whole_or_not_there(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> OneByOne:
        def requests() -> Iterator[Request]:
            yield from samples.cold().requests
            raise RecordingError(f"{path} is damaged", "record again")

        return OneByOne(replace(samples.cold(), requests=()), requests(), lambda: ())

    monkeypatch.setattr(analysis, "analyse_one_by_one", broken)
    result = run(recordings, "cold.ttft", "--format", "json")
    assert isinstance(result.exception, RecordingError)
    assert result.output == ""
