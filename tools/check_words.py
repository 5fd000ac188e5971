"""Enforces that a docstring is a sentence with a subject: exits 1 and names every one that begins as a fragment.

A docstring is read alone, in a hover or in `help()`. "Of one key and value" leaves open what is meant; "Returns the
bytes of one key and value" does not.

python tools/check_words.py [file or folder ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/flashtile", "tools", "examples")
FRAGMENT = re.compile(
    r"(?:Also|And|As|Because|Behind|But|By|For|From|How|In|Its|Likewise|Not|Of|On|Or|Over|Per|Than|That|The one"
    r"|The same|Their|Those|To|Until|What|When|Where|Whether|Which|Whose|Why|With|Without)\b"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(path: Path) -> list[tuple[int, str]]:
    """Returns the line and first words of every docstring of the file that begins as a fragment."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and FRAGMENT.match(text):
            found.append((node.body[0].lineno, " ".join(text.split()[:6])))
    return sorted(found)


def sources(places: Iterable[Path]) -> list[Path]:
    """Returns the files, and those in the folders."""
    return sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*.py")))


def main() -> int:
    places = [Path(name) for name in sys.argv[1:]] or [ROOT / name for name in FOLDERS]
    problems = [f"{path}:{line}: {words} ..." for path in sources(places) for line, words in fragments(path)]
    print("\n".join(problems) if problems else "words: clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
