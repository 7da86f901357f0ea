"""Folders of files as a machine's kernel shows them, kept as one text each."""

from __future__ import annotations

from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"


def unpack(name: str, root: Path) -> None:
    """`PATH: text`, `PATH:` with indented lines below it, `PATH -> TARGET` (a link)."""
    path: Path | None = None
    for line in (FIXTURES / f"{name}.txt").read_text().splitlines():
        if line.startswith("    ") and path is not None:
            with path.open("a") as file:
                file.write(line[4:] + "\n")
        elif " -> " in line and not line.startswith("#"):
            link, _, target = line.partition(" -> ")
            (root / link).parent.mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(target)
        elif line and not line.startswith("#"):
            head, _, text = line.rpartition(": ") if ": " in line else (line[:-1], "", "")
            path = root / head
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n" if text else "")
