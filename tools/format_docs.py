"""Wrap the prose of README.md, CONTRIBUTING.md, CHANGELOG.md, examples/README.md and docs/ to 120 characters a line.

Only a paragraph with a longer line is wrapped again. Tables, code, headings, comments, HTML, link definitions and
what is generated between `<!-- name -->` and `<!-- /name -->` stay as they are. Code spans, links and comments inside a
sentence are never broken, and no line begins with a character that Markdown would read as a list, a quote or a heading.

python tools/format_docs.py [--check] [--root FOLDER]
    --check    change nothing; exit 1 where a line is too long
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

WIDTH = 120
# Code spans, links, images and comments are words of their own
WORD = re.compile(r"(?:(?P<tick>`+)(?!`).*?(?<!`)(?P=tick)(?!`)|!?\[[^\[\]]*\]\([^()\s]*\)|<!--.*?-->|\S)+")
OPENING = re.compile(r"<!-- (?P<name>[a-z]+)\b[^>]*-->$")
FENCE = re.compile(r"\s*(?P<fence>```+|~~~+)")
ITEM = re.compile(r"(?P<marker>\s*(?:[-*+]|\d+[.)])\s+)(?=\S)")
VERBATIM = re.compile(r"\s*(?:#|\||<|>|!\[[^\]]*\]\([^)]*\)$|\[[^\]]+\]:|(?:[-*_] ?){3,}$|=+$)")
# What must not begin a line of a paragraph
STARTS_BLOCK = re.compile(r"[-+*=>#|<~]|\d+[.)]$|:-|!\[|\[[^\]]+\]:")


def pages(root: Path) -> list[Path]:
    named = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
    return [path for path in (*named, *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def wrap(text: str, width: int = WIDTH) -> str:
    """Returns the page with its long paragraphs wrapped."""
    return "".join(f"{line}\n" for line in _lines(text.splitlines(), width))


def _lines(lines: Sequence[str], width: int) -> Iterator[str]:
    index, is_in_list = 0, False
    while index < len(lines):
        end = _end_of_verbatim(lines, index, is_in_list)
        if end == index:
            item = ITEM.match(lines[index])
            is_in_list = item is not None or (is_in_list and lines[index].startswith(" "))
            end = _end_of_paragraph(lines, index)
            yield from _paragraph(lines[index:end], item["marker"] if item else "", width)
        else:
            is_in_list = is_in_list and all(not line or line.startswith(" ") for line in lines[index:end])
            yield from lines[index:end]
        index = end


def _end_of_verbatim(lines: Sequence[str], start: int, is_in_list: bool) -> int:
    """Returns the line after the block that begins here and stays as it is, or `start` where a paragraph begins."""
    line = lines[start]
    fence, opening = FENCE.match(line), OPENING.match(line)
    if fence:
        return _after(lines, start, lambda other: other.strip().startswith(fence["fence"]))
    if opening and any(other.startswith(f"<!-- /{opening['name']}") for other in lines[start + 1 :]):
        return _after(lines, start, lambda other: other.startswith(f"<!-- /{opening['name']}"))
    if line.lstrip().startswith("<!--") and "-->" not in line:
        return _after(lines, start, lambda other: "-->" in other)
    is_code = line.startswith("    ") and not is_in_list
    return start + 1 if not line.strip() or is_code or VERBATIM.match(line) else start


def _after(lines: Sequence[str], start: int, is_last: Callable[[str], bool]) -> int:
    return next((index + 1 for index in range(start + 1, len(lines)) if is_last(lines[index])), len(lines))


def _end_of_paragraph(lines: Sequence[str], start: int) -> int:
    end = start + 1
    while end < len(lines) and not (
        not lines[end].strip() or VERBATIM.match(lines[end]) or FENCE.match(lines[end]) or ITEM.match(lines[end])
    ):
        end += 1
    return end


def _paragraph(lines: Sequence[str], marker: str, width: int) -> Iterator[str]:
    """Yields the lines of a paragraph or list item, wrapped if one of them is too long."""
    if all(len(line) <= width for line in lines) or any(line.endswith(("  ", "\\")) for line in lines[:-1]):
        yield from lines
        return
    first = marker or lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    others = " " * len(first)
    line = first
    for word in _words(" ".join(part.strip() for part in (lines[0][len(first) :], *lines[1:]))):
        if line.strip() and line != first and len(line) + 1 + len(word) > width:
            yield line
            line = others
        line += word if line in (first, others) else f" {word}"
    yield line


def _words(text: str) -> Iterator[str]:
    """Yields what may stand at the beginning of a line: words, each with those after it that may not."""
    words: list[str] = []
    for match in WORD.finditer(text):
        if words and STARTS_BLOCK.match(match[0]):
            words[-1] += f" {match[0]}"
        else:
            words.append(match[0])
    yield from words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Wrap the prose of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a line is too long")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(arguments)
    status = 0
    for page in pages(options.root):
        before = page.read_text(encoding="utf-8")
        after = wrap(before)
        if after == before:
            continue
        name = page.relative_to(options.root)
        if options.check:
            print(f"{name}: lines over {WIDTH} characters; run `make format`", file=sys.stderr)
            status = 1
        else:
            page.write_text(after, encoding="utf-8")
            print(f"{name}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
