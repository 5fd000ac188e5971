"""The command line of the tools that write a source file: without arguments they write it, with `--check` they fail if
the file is another."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "flashtile"


def main(file: Path, text: str) -> int:
    if "--check" not in sys.argv[1:]:
        file.write_text(text)
        return 0
    if file.read_text() == text:
        return 0
    print(f"{file.name} is stale: run tools/{Path(sys.argv[0]).name}")
    return 1
