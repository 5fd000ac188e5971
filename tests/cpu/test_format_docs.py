"""tools/format_docs.py: what it wraps, and what it leaves as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import format_docs  # noqa: E402

LONG = " ".join(["word"] * 40)


def rendered(text: str) -> str:
    """Returns the page as HTML, with white space as a browser sees it."""
    page = MarkdownIt("commonmark").enable("table").render(text)
    return re.sub(r"\s+", " ", re.sub(r"\s+(?=</)", "", page))


@pytest.mark.parametrize(
    "text",
    [
        f"| a | b |\n|---|---|\n| {LONG} | {LONG} |\n",
        f"```\n{LONG}\n\n{LONG}\n```\n",
        f"Text:\n\n    {LONG}\n",
        f"# {LONG}\n",
        f"<!-- {LONG} -->\n",
        f"<!--\n{LONG}\n-->\n",
        f"<!-- bench:folder/name:table -->\n{LONG}\n\n{LONG}\n<!-- /bench:folder/name:table -->\n",
        f"![{LONG}](figure.png)\n",
        f"[name]: https://example.com/{'x' * 130}\n",
        "Short lines\nstay where they are broken.\n",
        f"A line that ends in two spaces  \nbreaks there: {LONG}\n",
    ],
    ids=lambda text: text.split("\n")[0][:24],
)
def test_what_stays_as_it_is(text: str) -> None:
    assert format_docs.wrap(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}\n",
        f"- {LONG}\n- {LONG}\n  {LONG}\n\n  {LONG}\n  - {LONG}\n\n{LONG}\n",
        f"10. {LONG}\n",
        f"{LONG[:115]} - no list, 3 * 4 + 5 > 6 # 7. {LONG[:98]} 8. {LONG}\n",
        f"{LONG[:110]} `code that must not be broken` {LONG[:80]} [text of a link](docs/map.md), {LONG}\n",
        f"{LONG[:110]} ``a ` b c d e f g h i`` and [`name`](x.md)s {LONG}\n",
    ],
    ids=["paragraph", "list", "number", "markers", "code", "ticks"],
)
def test_what_is_wrapped(text: str) -> None:
    wrapped = format_docs.wrap(text)
    assert wrapped != text
    assert max(map(len, wrapped.splitlines())) <= format_docs.WIDTH
    assert rendered(wrapped) == rendered(text)
    assert format_docs.wrap(wrapped) == wrapped
    for whole in ("`code that must not be broken`", "[text of a link](docs/map.md),", "``a ` b c d e f g h i``"):
        assert (whole in text) == (whole in wrapped)


def test_items_keep_their_indentation() -> None:
    wrapped = format_docs.wrap(f"- {LONG}\n    - {LONG}\n").splitlines()
    assert [len(line) - len(line.lstrip()) for line in wrapped] == [0, 2, 4, 6]


@pytest.mark.parametrize("page", format_docs.pages(ROOT), ids=lambda page: page.name)
def test_pages_say_the_same(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrapped = format_docs.wrap(text)
    assert rendered(wrapped) == rendered(text)
    assert format_docs.wrap(wrapped) == wrapped


def test_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "log").mkdir(parents=True)
    page = tmp_path / "docs" / "log" / "one.md"
    page.write_text(f"{LONG}\n", encoding="utf-8")
    assert format_docs.main(["--check", "--root", str(tmp_path)]) == 1
    assert "docs/log/one.md" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == f"{LONG}\n"
    assert format_docs.main(["--root", str(tmp_path)]) == 0
    assert format_docs.main(["--check", "--root", str(tmp_path)]) == 0
    assert len(page.read_text(encoding="utf-8").splitlines()) == 2
