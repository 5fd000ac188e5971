"""Enforces that a docstring is a sentence with a subject: exits 1 and names every one that begins as a fragment, or
whose first paragraph has no full stop.

A docstring is read alone, in a hover or in `help()`. "Of one key and value" leaves open what is meant; "Returns the
bytes of one key and value" does not. A name or a shape alone, such as "aten::mm" or "(rows, columns)", is no sentence
and needs no stop.

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
    r"(?:Also|And|As|Because|Behind|But|By|Faster|For|From|How|In|Its|Likewise|Not|Of|On|Or|Over|Per|Than|That|The one"
    r"|The same|Their|Those|To|Until|What|When|Where|Whether|Which|Whose|Why|With|Without)\b"
)
IS_SENTENCE = re.compile(r"[A-Z`]")
HAS_STOP = re.compile(r"[.!?:][\"'`)]*\Z")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_fragment(text: str) -> bool:
    """True if a docstring begins as a fragment, or is a sentence whose first paragraph has no stop."""
    paragraph = text.split("\n\n")[0].rstrip()
    return bool(FRAGMENT.match(text) or (IS_SENTENCE.match(text) and not HAS_STOP.search(paragraph)))


def fragments(path: Path) -> list[tuple[int, str]]:
    """Returns the line and first words of every docstring of the file that is a fragment."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and is_fragment(text):
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
