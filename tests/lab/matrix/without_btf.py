"""Keeps what was recorded on a kernel without BTF for tests/unit/test_without_btf.py.

python -m lab.matrix.without_btf RESULTS
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from lab.golden import keep, without_folders

KEPT = Path(__file__).parents[2] / "fixtures" / "without_btf"
NAMES = ("counts", "switch")


def main(results: Path) -> None:
    KEPT.mkdir(exist_ok=True)
    for name in ("kernel", "doctor", *NAMES):
        (KEPT / f"{name}.json").write_text(
            json.dumps(_document(results / f"{name}.json"), indent=1)
        )
    for name in NAMES:
        report = json.dumps(_document(results / f"{name}.report.json"))
        (KEPT / f"{name}.report.json.xz").write_bytes(lzma.compress(report.encode()))
        keep(results / f"{name}.ttft", KEPT / f"{name}.ttft.xz", _is_weights)


def _is_weights(path: str) -> bool:
    return path.endswith((".gguf", ".weights"))


def _document(path: Path) -> Any:
    return without_folders(json.loads(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
