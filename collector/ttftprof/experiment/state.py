"""The state a run begins in: made so, then verified by what the kernel and the server say of it.

Every wish ends in a `Check`, met or not; nothing here raises because a state could not be had. A
run with a check that was not met is kept and left out of every verdict.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ttftprof import residency
from ttftprof.engines.catalog import looks_like_weights
from ttftprof.events import kernel_dev
from ttftprof.sources import drm, nvml
from ttftprof.sources.gpu import DeviceLost, GpuAbsent, Vendor
from ttftprof.sources.mounts import read_ahead_kb

COLD_SHARE, CACHED_SHARE = 0.01, 0.99
GPU_SLACK_BYTES = 64 << 20  # contexts and displays breathe
_DROP_PATIENCE_S = 2.0
_CACHED_TEMPLATE_SHARE, _CACHED_TEMPLATE_TOKENS = 0.25, 16
_KEPT_SHARE = 0.5  # engines keep whole blocks of a prompt only, and never its last token
_UNLOAD_TIMEOUT_S = 30.0
_HTTP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One part of a run's state: what was wanted, what was found, and who said so."""

    what: str
    wanted: str
    found: str
    met: bool
    how: str


# -- page cache -----------------------------------------------------------------------------------


def drop_files(paths: Sequence[str]) -> None:
    """Asks the kernel to forget the files' pages, without root: posix_fadvise(DONTNEED)."""
    for path in paths:
        with suppress(OSError), _opened(path) as file:
            os.fsync(file)  # dirty pages cannot be dropped
            size = os.fstat(file).st_size
            how = residency.how_to_ask(file)
            residency.drop(file, [(0, size)], how, _DROP_PATIENCE_S)


def fill_files(paths: Sequence[str]) -> None:
    """Brings what is absent of the files into the page cache."""
    for path in paths:
        with suppress(OSError), _opened(path) as file:
            size = os.fstat(file).st_size
            how = residency.how_to_ask(file)
            residency.read_back(file, residency.absent(file, size, how))


def check_cache(paths: Sequence[str], wanted: str) -> Check:
    """`wanted`: cold, cached, or any, which is met by all and told nevertheless. Told by
    cachestat(2), or mincore(2) before Linux 6.5."""
    what = "page cache of the model's files"
    if not paths:
        return Check(what, wanted, "its files are not known", False, "name them in server.files")
    cached = total = 0
    how = ""
    try:
        for path in paths:
            with _opened(path) as file:
                state = residency.state_of(file, os.fstat(file).st_size)
            cached, total, how = cached + state.cached_pages, total + state.total_pages, state.how
    except OSError as error:
        return Check(
            what, wanted, f"cannot be told: {error.strerror or error}", wanted == "any", ""
        )
    share = cached / total if total else 0.0
    met = {"cold": share <= COLD_SHARE, "cached": share >= CACHED_SHARE, "any": True}[wanted]
    return Check(what, wanted, f"{share * 100:.1f} % cached", met, how)


class _opened:
    """A read-only descriptor; a class, because a generator would hide OSError's cause."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


# -- prompt cache ---------------------------------------------------------------------------------


def check_prompt_cache(
    told: Iterable[tuple[int | None, int | None]], busted: bool, resident: bool
) -> Check | None:
    """`told`: (tokens taken from the server's prompt cache, tokens of the prompt) of each answer.

    Where it was to be busted, the worst answer took the most from it, but for a chat template's
    own first tokens, which are the same in every prompt; where the server tells nothing, the
    prompt's own beginning is proof enough (None). Where it was to be kept by a resident model,
    the worst took the least, and somebody must tell.
    """
    known = [(cached, whole) for cached, whole in told if cached is not None and whole]
    wanted = "missed" if busted else "used" if resident else "any"
    if not known:
        if wanted != "used":
            return None
        return Check("prompt cache", wanted, "the server does not tell", False, "the answer")
    cached, whole = (min if wanted == "used" else max)(known, key=lambda one: one[0] / one[1])
    met = {
        "missed": cached <= max(_CACHED_TEMPLATE_TOKENS, _CACHED_TEMPLATE_SHARE * whole),
        "used": cached >= _KEPT_SHARE * whole,
        "any": True,
    }[wanted]
    return Check("prompt cache", wanted, f"{cached} of {whole} tokens", met, "the answer")


# -- readahead ------------------------------------------------------------------------------------


def readahead_switches(paths: Iterable[str], sysfs: Path = Path("/sys")) -> dict[str, str]:
    """{sysfs file: its value now} for the backing devices of these files."""
    found: dict[str, str] = {}
    for path in paths:
        with suppress(OSError):
            dev = Path(path).stat().st_dev
            switch = sysfs / f"class/bdi/{os.major(dev)}:{os.minor(dev)}/read_ahead_kb"
            if not switch.exists():
                block = sysfs / f"dev/block/{os.major(dev)}:{os.minor(dev)}"
                holder = block / "queue" if (block / "queue").exists() else block / "../queue"
                switch = holder / "read_ahead_kb"
            found[str(switch.resolve(strict=True))] = switch.read_text().strip()
    return found


def set_readahead(switches: Iterable[str], kb: str) -> Check:
    """Sets every switch and reads it back."""
    shown: set[str] = set()
    try:
        for switch in switches:
            Path(switch).write_text(kb)
            shown.add(Path(switch).read_text().strip())
    except OSError as error:
        return Check("read-ahead", f"{kb} KiB", error.strerror or str(error), False, "sysfs")
    met = shown == {kb}
    return Check("read-ahead", f"{kb} KiB", " and ".join(sorted(shown)) or "none", met, "sysfs")


def readahead_of(path: str) -> int | None:
    """KiB of the file's mount, or None."""
    with suppress(OSError):
        dev = Path(path).stat().st_dev
        return read_ahead_kb(kernel_dev(os.major(dev), os.minor(dev)))
    return None


# -- GPU memory -----------------------------------------------------------------------------------


class GpuMemory:
    """Used bytes of every device, and whether they came back to where they began."""

    def __init__(self, vendor: Vendor | None = None) -> None:
        self._vendor = vendor or nvml.find() or drm.find()
        self._devices: list[int] = []
        if self._vendor is not None:
            try:
                self._devices = [int(device["index"]) for device in self._vendor.open()]
            except GpuAbsent:
                self._vendor = None
        self.base = self.begin = self.used_bytes()

    def used_bytes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for device in self._devices:
            with suppress(DeviceLost):
                assert self._vendor is not None
                used = self._vendor.look(device, -1).values.get("used_bytes")
                if used is not None:
                    found[device] = used
        return found

    def check_base(self, patience_s: float = 5.0, since_begin: bool = False) -> Check | None:
        """That no model is left in it; None where there is no device to ask, or no base is known.
        `since_begin`: held against what was used before there was a server of ours."""
        base = self.begin if since_begin else self.base
        if not base:
            return None
        until = time.monotonic() + patience_s
        while True:
            now = self.used_bytes()
            above = {d: used - base.get(d, 0) for d, used in now.items()}
            worst = max(above.values(), default=0)
            lost = sorted(set(base) - set(now))
            if (worst <= GPU_SLACK_BYTES and not lost) or time.monotonic() > until:
                break
            time.sleep(0.05)
        if lost:
            found = f"device {lost[0]} does not tell any more"
            return Check("GPU memory", "back to base", found, False, "driver")
        met = worst <= GPU_SLACK_BYTES
        return Check("GPU memory", "back to base", f"{worst / 1e6:+.0f} MB", met, "driver")

    def rebase(self) -> None:
        """What is used now is the base: nothing of ours is loaded."""
        self.base = self.used_bytes()

    def forget_base(self) -> None:
        """Nobody knows what is used without a model."""
        self.base = {}


# -- the server's own word ------------------------------------------------------------------------


class ServerApi:
    """What a server lets one ask and tell it about its models, whichever it is.

    `kind`: llama-router, ollama, llama-swap, or plain (nothing beyond answering).
    """

    def __init__(self, address: tuple[str, int], base_path: str = "", key: str = "") -> None:
        self._address = address
        self._base = base_path
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.kind = "plain"
        self.version = ""

    def recognise(self) -> None:
        """Finds out who answers."""
        self.kind, self.version = "plain", ""
        version = self._get("/api/version")
        models = self._get("/models")
        if isinstance(version, Mapping) and "version" in version:
            self.kind, self.version = "ollama", f"ollama {version['version']}"
        elif _has_status(models):
            self.kind = "llama-router"
        elif isinstance(self._get("/running"), Mapping):
            self.kind = "llama-swap"
        properties = self._get("/props")
        if isinstance(properties, Mapping) and properties.get("build_info"):
            self.version = f"llama.cpp {properties['build_info']}"

    def models(self) -> list[str]:
        """The models that the server names."""
        found = self._get("/v1/models")
        data = found.get("data") if isinstance(found, Mapping) else None
        return [str(m["id"]) for m in data or () if isinstance(m, Mapping) and "id" in m]

    def loaded(self) -> set[str] | None:
        """The models in memory, by the server's word; None if it has none to give."""
        if self.kind == "ollama":
            found = self._get("/api/ps")
            running = found.get("models") if isinstance(found, Mapping) else None
            return None if running is None else {str(m.get("name")) for m in running}
        if self.kind == "llama-router":
            found = self._get("/models")
            if not _has_status(found):
                return None
            return {str(m["id"]) for m in found["data"] if m["status"].get("value") == "loaded"}
        if self.kind == "llama-swap":
            found = self._get("/running")
            running = found.get("running") if isinstance(found, Mapping) else None
            return None if running is None else {str(m.get("model")) for m in running}
        return None

    def unload(self, model: str) -> bool:
        """Has the model evicted and waits until it is gone; False if the server cannot do that."""
        if self.kind == "ollama":
            self._post("/api/generate", {"model": model, "keep_alive": 0})
        elif self.kind == "llama-router":
            self._post("/models/unload", {"model": model})
        elif self.kind == "llama-swap":
            self._post(f"/api/models/unload/{quote(model, safe='')}", {})
        else:
            return False
        until = time.monotonic() + _UNLOAD_TIMEOUT_S
        while time.monotonic() < until:
            loaded = self.loaded()
            if loaded is None or not _names(loaded, model):
                return loaded is not None
            time.sleep(0.02)
        return False

    def check_loaded(self, model: str, wanted: bool) -> Check | None:
        """Whether the model is in memory; None where the server does not tell."""
        loaded = self.loaded()
        if loaded is None:
            return None
        found = _names(loaded, model)
        words = {True: "loaded", False: "unloaded"}
        return Check(
            f"model {model}", words[wanted], words[found], found == wanted, f"{self.kind} API"
        )

    def _get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def _post(self, path: str, body: Any) -> Any:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None) -> Any:
        """The JSON of an answer; None for anything else. Never raises for what the server does."""
        connection = http.client.HTTPConnection(*self._address, timeout=_HTTP_TIMEOUT_S)
        try:
            headers = dict(self._headers)
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, self._base + path, body, headers)
            response = connection.getresponse()
            text = response.read(1 << 22)
            return json.loads(text) if response.status < 400 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def _has_status(models: Any) -> bool:
    data = models.get("data") if isinstance(models, Mapping) else None
    if not isinstance(data, list) or not data:
        return False
    return all(isinstance(m, Mapping) and isinstance(m.get("status"), Mapping) for m in data)


def _names(loaded: Iterable[str], model: str) -> bool:
    """Ollama adds the tag that was left out."""
    return any(name in (model, f"{model}:latest") for name in loaded)


def weights_beside(paths: Iterable[str]) -> tuple[str, ...]:
    """Files that hold weights, and the other shards in their folders."""
    found: dict[str, None] = {}
    for path in paths:
        found[path] = None
        if Path(path).suffix == ".safetensors":
            for other in sorted(Path(path).parent.glob("*.safetensors")):
                if looks_like_weights(str(other)):
                    found[str(other)] = None
    return tuple(found)
