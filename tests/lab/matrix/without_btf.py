"""Keeps what was recorded on a kernel without BTF for tests/unit/test_without_btf.py.

python -m lab.matrix.without_btf RESULTS
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from pathlib import Path

KEPT = Path(__file__).parents[2] / "fixtures" / "without_btf"
NAMES = ("counts", "switch")


def main(results: Path) -> None:
    KEPT.mkdir(exist_ok=True)
    for name in ("kernel", "doctor", *NAMES):
        shutil.copy(results / f"{name}.json", KEPT)
    for name in NAMES:
        report = json.loads((results / f"{name}.report.json").read_text())
        packed(KEPT / f"{name}.report.json.xz", json.dumps(report).encode())
        packed(KEPT / f"{name}.ttft.xz", (results / f"{name}.ttft").read_bytes())


def packed(path: Path, content: bytes) -> None:
    path.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
