"""The files of the repository that the site shows, and where: no text twice, and no address outside of the site.

Pages keep their paths of the repository as names, so that the relative links in them hold. A link to a source file
leads to a page that shows it; a link to any other file leads to a copy of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FRONT = "README.md"
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
# Where pages go that the navigation does not name
OTHERS = "Reference"
LOGS = "What was tried"
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".h": "cpp"}

_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^(?:[-*+]|\d+\.) ")
_COMMENT = re.compile(r"^<!--.*-->$")


def pages(root: Path = ROOT) -> list[str]:
    """Returns the paths of all pages that are written by hand."""
    docs = sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md"))
    return [FRONT, *(name for name in TOP if (root / name).exists()), *docs]


def linked_files(root: Path = ROOT) -> list[str]:
    """Returns the paths of the other files that pages link to or show as images. A link that leads out of the
    repository or to nothing is left out: the strict build names it."""
    found = set()
    for name in pages(root):
        for target in _LINK.findall((root / name).read_text(encoding="utf-8")):
            path = (root / name).parent / target
            if "://" not in target and path.suffix != ".md" and path.is_file() and path.resolve().is_relative_to(root):
                found.add(path.resolve().relative_to(root).as_posix())
    return sorted(found)


def address(name: str) -> str:
    """Returns the path of a page in the built site."""
    if name == FRONT:
        return "index.html"
    path = PurePosixPath(name)
    if path.suffix != ".md":
        return f"source/{name}.html"
    if path.parts[0] in ("docs", "generated"):
        path = path.relative_to(path.parts[0])
    return path.with_suffix(".html").as_posix().lower()


def is_shown_as_page(name: str) -> bool:
    return PurePosixPath(name).suffix in (".ipynb", *LANGUAGES)


def source_page(name: str, text: str) -> str:
    """Returns the Markdown of a page that shows a source file. The search leaves it out."""
    head = f"---\ntitle: {PurePosixPath(name).name}\nsearch:\n  exclude: true\n---\n# {PurePosixPath(name).name}\n\n"
    if name.endswith(".ipynb"):
        return f"{head}The notebook `{name}`.\n\n{_notebook(json.loads(text))}"
    return f"{head}The file `{name}`.\n\n{fenced(text, LANGUAGES[PurePosixPath(name).suffix])}"


def fenced(text: str, language: str = "text") -> str:
    """Returns a block of code whose fence is longer than any in the text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text + "``")))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _notebook(notebook: dict[str, Any]) -> str:
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # The page has its title already
            parts.append(re.sub(r"^# ", "## ", text))
        elif text.strip():
            parts.append(fenced(text, "python"))
        parts += [_output(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    """Returns the HTML of an output in the look of the page around it, or its text where it has no HTML."""
    data = output.get("data", {})
    if "text/html" in data:
        html = re.sub(r"<style>.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        # An empty line would end the HTML
        return f'<div class="output">{" ".join(html.split())}</div>'
    return fenced("".join(output.get("text", data.get("text/plain", []))))


def markdown(text: str) -> str:
    """Returns a page's text for Python-Markdown, which differs from GitHub's in two points: a list that follows a
    paragraph needs an empty line before it, and so does a table that follows a comment."""
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        is_code ^= bool(_FENCE.match(line))
        before = lines[-1] if lines else ""
        if is_code:
            lines.append(line)
        elif _COMMENT.match(line):
            lines += ["", line, ""]
        elif _ITEM.match(line) and before and not _ITEM.match(before) and not before.startswith(" "):
            lines += ["", line]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def navigation(sections: list[dict[str, Any]], found: list[str]) -> list[dict[str, Any]]:
    """Returns the navigation with the pages that it does not name, those of docs/log/ in a section of their own."""
    named = set(names(sections))
    rest = [name for name in found if name not in named]
    more = {LOGS: [name for name in rest if name.startswith("docs/log/")]}
    more[OTHERS] = [name for name in rest if name not in more[LOGS]]
    titles = [title for section in sections for title in section]
    if missing := [title for title in more if title not in titles]:
        raise ValueError(f"mkdocs.yml: nav has no section {missing[0]!r}")
    return [
        {title: [*entry, *more[title]] if title in more else entry}
        for section in sections
        for title, entry in section.items()
    ]


def names(navigation: Any) -> list[str]:
    """Returns the pages that a navigation names, in their order."""
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation.values() if isinstance(navigation, dict) else navigation
    return [name for entry in entries for name in names(entry)]
