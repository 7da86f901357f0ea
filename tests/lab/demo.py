"""The demo: three requests to a real llama-server, each recorded from outside, side by side.

The recorder is a separate process, started for each request and stopped by its first token, as a
person would do it. Run by scripts/demo, which installs everything first.
"""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from lab.llama_server import ROOT, LlamaServer, Reply, ServerFailed
from lab.make_model import make_model
from lab.page_cache import StillCached, drop_cache, fill_cache

MODELS = ROOT / ".engine/models"
RECORDINGS = ROOT / "demo-recordings"  # unless the command line names another folder
TTFTPROF = Path(sys.executable).with_name("ttftprof")
MODEL_SEEDS = {"model-a": 1, "model-b": 2}
MODEL_SIZE_MB = 300
MODEL_LAYERS = 12
PROMPT = "Explain in one sentence why the sky is blue."
ARM_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0


class DemoFailed(Exception):
    """A step of the demo did not work; the message says which."""


def say(message: str) -> None:
    print(f"[demo] {message}", file=sys.stderr, flush=True)


def model_file(name: str) -> Path:
    return MODELS / f"{name}.gguf"


def make_models() -> None:
    MODELS.mkdir(parents=True, exist_ok=True)
    for name, seed in MODEL_SEEDS.items():
        if not model_file(name).exists():
            say(f"making {name}: {MODEL_SIZE_MB} MB of random weights")
            make_model(model_file(name), size_mb=MODEL_SIZE_MB, layers=MODEL_LAYERS, seed=seed)


def record(server: LlamaServer, model: str, output: Path) -> Path:
    """Records one request to `model` as `output`, which replaces an older one."""
    ready = output.with_name(f".{output.stem}.ready")
    for old in output.parent.glob(f"{output.name}*"):
        old.unlink()
    ready.unlink(missing_ok=True)
    command: list[str | Path] = [TTFTPROF, "record", "--pid", str(server.pid), "-o", output]
    command += ["--ready-file", ready, "--first-tokens", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as recorder:
        try:
            wait_armed(recorder, ready)
            reply = server.chat(model, PROMPT)
            finish(recorder)
        finally:
            stop(recorder)
            ready.unlink(missing_ok=True)
    report_client(output.stem, reply)
    if not output.exists():
        raise DemoFailed(f"ttftprof record wrote no {output}")
    return output


def wait_armed(recorder: subprocess.Popen[bytes], ready: Path) -> None:
    deadline = time.monotonic() + ARM_TIMEOUT_S
    while not ready.exists():
        if recorder.poll() is not None:
            raise DemoFailed(f"ttftprof record ended early with status {recorder.returncode}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"ttftprof record was not armed within {ARM_TIMEOUT_S:.0f} s")
        time.sleep(0.01)


def finish(recorder: subprocess.Popen[bytes]) -> None:
    """Waits for the recorder to see the first token and stop by itself."""
    try:
        status = recorder.wait(FINISH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DemoFailed("ttftprof record did not notice the first token") from None
    if status:
        raise DemoFailed(f"ttftprof record ended with status {status}")


def stop(recorder: subprocess.Popen[bytes]) -> None:
    """Ends a recorder that still runs, so that its file is whole if that is possible."""
    if recorder.poll() is None:
        recorder.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            recorder.wait(FINISH_TIMEOUT_S)
        recorder.kill()


def report_client(stem: str, reply: Reply) -> None:
    say(f"{stem}: first token after {reply.ttft_ns / 1e6:.0f} ms, as its client saw it")


def run(folder: Path) -> list[Path]:
    make_models()
    folder.mkdir(exist_ok=True)
    log_path = folder / "server.log"
    log_path.unlink(missing_ok=True)
    fill_cache(model_file("model-a"))
    say("starting llama-server in router mode with model-a")
    with LlamaServer.router(MODELS, log_path=log_path) as server:
        server.chat("model-a", PROMPT)
        say("recording a cold switch to model-b, none of it in the page cache")
        drop_cache(model_file("model-b"))
        recordings = [record(server, "model-b", folder / "cold.ttft")]
        say("recording the switch back to model-a, all of it in the page cache")
        recordings.append(record(server, "model-a", folder / "reswitch.ttft"))
        say("recording a request to model-a, which is loaded")
        recordings.append(record(server, "model-a", folder / "warm.ttft"))
    return recordings


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDINGS
    try:
        recordings = run(folder)
    except (DemoFailed, ServerFailed, StillCached, OSError) as error:
        sys.exit(f"demo: {error}")
    status = subprocess.run([TTFTPROF, "report", *recordings], check=False).returncode
    say("the recordings, for report, dump and your own questions:")
    for recording in recordings:
        print(f"  {recording}")
    sys.exit(status)


if __name__ == "__main__":
    main()
