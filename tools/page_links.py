"""The links of README.md and docs/: every relative link must lead to a file, and every anchor to a heading.

make_docs.py calls `complaints`. Links to other hosts are not followed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<words>.+?) *$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def complaints(page: Path, text: str) -> Iterator[str]:
    """The links of a page that lead nowhere. `text` is its present contents."""
    for match in LINK.finditer(CODE.sub("", text)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        if not file.exists():
            yield f"link to {match['target']}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in _anchors(text if file == page else file.read_text()):
            yield f"link to {match['target']}: no such heading"


@functools.cache
def _anchors(text: str) -> frozenset[str]:
    """The anchors that GitHub gives to the headings of a page; a repeated one gets a number."""
    found: set[str] = set()
    for match in HEADING.finditer(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["words"]).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return frozenset(found)
