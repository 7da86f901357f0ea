"""Plans: what they say, and how their faults are told."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from ttftprof.experiment import plan as plans
from ttftprof.experiment.evaluate import plan_from_json
from ttftprof.experiment.plan import EXAMPLE, Plan, PlanError, variants_of
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
    ("change", "line", "says"),
    [
        (("runs = 12 ", 'runs = "x"'), 5, "experiment.runs must be a whole number, not 'x'"),
        (("runs = 12 ", "runs = 0"), 5, "give a number from 1 to 10000"),
        (("gap_s = 0.5", "gap_s = inf"), 8, "experiment.gap_s is inf"),
        (('"resident"]', '"resident", "warmish"]'), 9, "has 'warmish'; choose from cold-switch"),
        (('"resident"]', '"resident", "restart"]'), 9, "give server.command or server.restart"),
        (('api = "auto"', 'api = "tgi"'), 17, "choose from auto, openai, ollama"),
        (("http://127.0.0.1:8080", "https://x"), 15, "what is encrypted cannot be recorded"),
        (('["small", "large"]', '["small", "small"]'), 16, "names something twice"),
        (("max_tokens = 8", "max_token = 8"), 27, "is not known; workload has prompt_tokens"),
        (("readahead = [128, 1024]", 'readahead = ["128k", "1M"]'), 34, "give KiB"),
        (("readahead = [128, 1024]", "readahead = [128]"), 34, "give at least 2"),
        (("readahead = [128, 1024]", "ctx = [128, 256]"), 34, "give server.command"),
        (('"readahead=1024"', '"readahead=4096"'), 38, "this plan has readahead=1024"),
        (('direction = "lower"', 'direction = "down"'), 41, "choose from lower, higher"),
        (('at_least = "10%"', 'at_least = "much"'), 42, 'give a share such as "15%"'),
        (("readahead = [128, 1024]", 'readahead = ["²", "128"]'), 34, "give KiB"),
        (("readahead = [128, 1024]", 'argv = ["", "it\'s"]'), 34, "is no command"),
        (("http://127.0.0.1:8080", "http://[::1"), 15, "Invalid IPv6 URL"),
        (('baseline = "resident"', 'baseline = "residnt"'), 12, "choose from cold-switch"),
    ],
)
def test_a_fault_is_told_with_its_line(change: tuple[str, str], line: int, says: str) -> None:
    assert change[0] in EXAMPLE
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


def test_files_of_a_model_are_paths() -> None:
    assert "of a must be a path" in faults(f"{MINIMAL}files = {{ a = 5 }}\n")
