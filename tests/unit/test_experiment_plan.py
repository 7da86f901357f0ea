"""Plans: what they say, and how their faults are told."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ttftprof.experiment import plan as plans
from ttftprof.experiment.evaluate import plan_from_json
from ttftprof.experiment.plan import (
    EXAMPLE,
    Expectation,
    Plan,
    PlanError,
    Server,
    Workload,
    variants_of,
)
from ttftprof.experiment.scenarios import SCENARIOS
from ttftprof.experiment.schedule import slots_of

MINIMAL = '[server]\nurl = "127.0.0.1:8080"\nmodels = ["a", "b"]\n'


def plan(text: str) -> Plan:
    return plans.from_mapping(tomllib.loads(text), "plan.toml", text)


def faults(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        plan(text)
    assert caught.value.next_step
    assert caught.value.exit_code == 2
    return caught.value.message


def test_the_example_is_a_plan() -> None:
    made = plan(EXAMPLE)
    assert [v.name for v in variants_of(made)] == ["readahead=128", "readahead=1024"]
    assert made.expectations[0].at_least == 0.1
    for name in SCENARIOS:  # every scenario is named in it
        assert name in EXAMPLE


TABLES = {"experiment": Plan, "server": Server, "workload": Workload, "expect": Expectation}


def in_comments() -> Iterator[tuple[str, str, Any]]:
    """(table, field, value) of the fields that the example has in comments."""
    table = ""
    for line in EXAMPLE.splitlines():
        if header := re.match(r"\[+(\w+)", line):
            table = header[1]
        elif re.match(r"# \w+ = ", line):
            ((name, value),) = tomllib.loads(line[2:]).items()
            yield table, name, value


def test_the_example_has_every_field_and_no_other() -> None:
    raw = tomllib.loads(EXAMPLE)
    raw["expect"] = raw["expect"][0]
    given = {(table, name) for table in TABLES for name in raw[table]}
    optional = [(table, name) for table, name, _ in in_comments()]
    assert len(set(optional)) == len(optional)
    assert given.isdisjoint(optional)
    known = {
        (table, field.name)
        for table, kind in TABLES.items()
        for field in fields(kind)
        if "check" in field.metadata
    }
    assert given | set(optional) == known


@pytest.mark.parametrize(("table", "name", "value"), list(in_comments()), ids=str)
def test_a_field_in_a_comment_is_what_its_comment_says(table: str, name: str, value: Any) -> None:
    """It can be written so; and where it does not tell its default, it is the default."""
    (field,) = [f for f in fields(TABLES[table]) if f.name == name]
    taken = field.metadata["check"](value)
    lines = re.findall(rf"^# {name} = .*$", EXAMPLE, re.MULTILINE)
    (line,) = [one for one in lines if tomllib.loads(one[2:])[name] == value]
    if "default:" not in line and name != "command":
        assert taken == field.default


def test_little_is_needed() -> None:
    made = plan(MINIMAL)
    assert made.server.url == "http://127.0.0.1:8080"
    assert made.server.target == "a"
    assert made.server.other == "b"
    assert made.scenarios == ("cold-switch", "re-switch", "resident")
    assert [v.name for v in variants_of(made)] == ["as given"]


def test_a_plan_survives_being_stored() -> None:
    made = plan(EXAMPLE)
    assert plan_from_json(json.loads(json.dumps(made.public()))) == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("runs = 12 ", 'runs = "x"'), "experiment.runs must be a whole number, not 'x'"),
        (("runs = 12 ", "runs = 0"), "give a number from 1 to 10000"),
        (("gap_s = 0.5", "gap_s = inf"), "experiment.gap_s is inf"),
        (('"resident"]', '"resident", "warmish"]'), "has 'warmish'; choose from cold-switch"),
        (('"resident"]', '"resident", "restart"]'), "give server.command or server.restart"),
        (('# api = "auto"', 'api = "tgi"'), "choose from auto, openai, ollama"),
        (("http://127.0.0.1:8080", "https://x"), "what is encrypted cannot be recorded"),
        (('["small", "large"]', '["small", "small"]'), "names something twice"),
        (("max_tokens = 8", "max_token = 8"), "is not known; workload has prompt_tokens"),
        (("readahead = [128, 1024]", 'readahead = ["128k", "1M"]'), "give KiB"),
        (("readahead = [128, 1024]", "readahead = [128]"), "give at least 2"),
        (("readahead = [128, 1024]", "ctx = [128, 256]"), "give server.command"),
        (('"readahead=1024"', '"readahead=4096"'), "this plan has readahead=1024"),
        (('direction = "lower"', 'direction = "down"'), "choose from lower, higher"),
        (('at_least = "10%"', 'at_least = "much"'), 'give a share such as "15%"'),
        (("readahead = [128, 1024]", 'readahead = ["²", "128"]'), "give KiB"),
        (("readahead = [128, 1024]", 'argv = ["", "it\'s"]'), "is no command"),
        (("http://127.0.0.1:8080", "http://[::1"), "Invalid IPv6 URL"),
        (('baseline = "resident"', 'baseline = "residnt"'), "choose from cold-switch"),
    ],
)
def test_a_fault_is_told_with_its_line(change: tuple[str, str], says: str) -> None:
    before, found, _ = EXAMPLE.partition(change[0])
    assert found
    line = before.count("\n") + 1
    message = faults(EXAMPLE.replace(*change))
    assert f"plan.toml line {line}: " in message
    assert says in message


def test_all_faults_are_told_at_once() -> None:
    message = faults(EXAMPLE.replace("runs = 12", "runs = 0").replace("seed = 1 ", "seed = -1 "))
    assert "experiment.runs" in message
    assert "experiment.seed" in message


def test_what_is_missing_is_named() -> None:
    assert "server.url is missing" in faults('[server]\nmodels = ["a"]\n')
    assert "needs two models" in faults('[server]\nurl = "h:1"\nmodels = ["a"]\n')
    assert "is no table of a plan" in faults(MINIMAL + "[workloads]\n")


def test_a_file_that_is_no_toml_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("[server]\nurl =\n")
    with pytest.raises(PlanError, match="line 2"):
        plans.read_toml(path)
    with pytest.raises(PlanError, match="cannot be read"):
        plans.read_toml(tmp_path / "none.toml")


COMMAND = MINIMAL + 'command = ["srv", "--dir", "{disk}"]\n'


def test_one_factor_is_varied_at_a_time() -> None:
    made = plan(COMMAND + '[vary]\nmmap = ["on", "off"]\ndisk = ["/nas", "/ssd"]\n')
    names = [(v.name, v.changed) for v in variants_of(made)]
    assert names == [("mmap=on, disk=/nas", None), ("mmap=off", "mmap"), ("disk=/ssd", "disk")]
    assert variants_of(made)[2].settings == {"mmap": "on", "disk": "/ssd"}


def test_a_placeholder_must_stand_somewhere() -> None:
    assert "{disc} stands nowhere" in faults(COMMAND + '[vary]\ndisc = ["/a", "/b"]\n')


def test_the_order_is_the_seeds_and_every_block_is_whole() -> None:
    made = plan(EXAMPLE)
    slots = slots_of(made)
    assert slots == slots_of(plan(EXAMPLE))
    assert slots != slots_of(plan(EXAMPLE.replace("seed = 1 ", "seed = 2 ")))
    assert [s.run for s in slots] == list(range(1, 13 * 6 + 1))
    for block in range(13):
        own = [(s.scenario, s.variant) for s in slots if s.block == block]
        assert len(own) == len(set(own)) == 6
        assert {s.warmup for s in slots if s.block == block} == {block == 0}
    orders = {tuple((s.scenario, s.variant) for s in slots if s.block == b) for b in range(13)}
    assert len(orders) > 10


def test_runs_that_share_a_server_stay_together() -> None:
    made = plan(COMMAND + '[vary]\nmmap = ["on", "off"]\ndisk = ["/nas", "/ssd"]\n')
    slots = slots_of(made)
    for block in range(made.warmups + made.runs):
        variants = [s.variant for s in slots if s.block == block]
        changes = sum(a != b for a, b in pairwise(variants))
        assert changes == 2


def test_without_recording_files_must_be_named() -> None:
    text = MINIMAL + "[experiment]\nrecord = false\nscenarios = ['cold-switch', 'resident']\n"
    assert "name them in server.files" in faults(text)
    files = "files = { a = '/a.gguf' }\n[experiment]"
    assert not plan(text.replace("[experiment]", files)).record


def test_secrets_of_a_plan_are_not_written_down() -> None:
    secret = "sk-verysecret"
    made = plan(
        MINIMAL
        + f"command = ['llama-server', '--api-key', '{secret}', '--port', '8080']\n"
        + f"env = {{ HF_TOKEN = '{secret}' }}\n"
    )
    written = json.dumps(made.public())
    assert secret not in written
    assert "--port" in written
    other = MINIMAL + "command = ['llama-server', '--api-key', 'sk-other', '--port', '8080']\n"
    assert plan(other).public()["server"]["command"] == made.public()["server"]["command"]
    assert plan(other).digest() != made.digest()


def test_an_address_in_brackets_stays_one() -> None:
    assert plan(MINIMAL.replace("127.0.0.1", "[::1]")).server.address == ("::1", 8080)


def test_a_server_that_is_stopped_must_be_started_again() -> None:
    stop = MINIMAL + "stop = ['systemctl', 'stop', 'llama']\n"
    assert "nothing starts again" in faults(stop)
    assert plan(stop + "restart = ['systemctl', 'start', 'llama']\n").server.stop[1] == "stop"


def test_files_of_a_model_are_paths() -> None:
    assert "of a must be a path" in faults(f"{MINIMAL}files = {{ a = 5 }}\n")
