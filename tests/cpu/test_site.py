"""tools/website: navigation, addresses and the generated reference, without the packages of `make site`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashtile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "website"))
import api
import layout

REPOSITORY = layout.ROOT


def nav() -> list[dict[str, Any]]:
    """The navigation of mkdocs.yml, read without a YAML package: two levels, one entry a line."""
    sections: list[dict[str, Any]] = []
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    for line in text[text.index("\nnav:\n") + 6 :].splitlines():
        match = re.fullmatch(r'(?P<indent> {2}| {6})- "?(?P<title>[^"]+?)"?:(?: (?P<page>\S+))?', line)
        assert match, f"mkdocs.yml: nav has a line of another form: {line!r}"
        page = [] if match["page"] in (None, "[]") else match["page"]
        if match["indent"] == "  ":
            sections.append({match["title"]: page})
        else:
            next(iter(sections[-1].values())).append({match["title"]: page})
    return sections


def test_the_navigation_reaches_every_page_once() -> None:
    found = layout.names(layout.navigation(nav(), layout.pages()))
    assert len(found) == len(set(found))
    assert set(layout.pages()) <= set(found)
    generated = {f"generated/{name}" for name in (*api.PACKAGES.values(), "dashboard.md", "commands.md")}
    assert generated == {name for name in found if name.startswith("generated/")}
    assert [name for name in found if name not in generated and not (REPOSITORY / name).is_file()] == []


def test_pages_that_it_does_not_name_are_added() -> None:
    sections = [{"Home": "README.md"}, {layout.OTHERS: [{"One": "docs/one.md"}]}, {layout.LOGS: []}]
    pages = ["README.md", "docs/one.md", "docs/two.md", "docs/log/one.md"]
    assert layout.navigation(sections, pages) == [
        {"Home": "README.md"},
        {layout.OTHERS: [{"One": "docs/one.md"}, "docs/two.md"]},
        {layout.LOGS: ["docs/log/one.md"]},
    ]
    with pytest.raises(ValueError, match=r"mkdocs\.yml: nav has no section 'What was tried'"):
        layout.navigation(sections[:2], pages)


def test_every_linked_file_is_in_the_site_and_in_git() -> None:
    found = layout.linked_files()
    assert {"src/flashtile/backends/tiled.py", "results/nvidia-h200/triton_tiles.csv"} <= set(found)
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *found], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if tracked.returncode == 0:
        assert [name for name in found if name not in tracked.stdout.split("\0")] == []


def test_addresses_differ() -> None:
    generated = [f"generated/{name}" for name in (*api.PACKAGES.values(), "dashboard.md", "commands.md")]
    names = [*layout.pages(), *layout.linked_files(), *generated]
    addresses = [layout.address(name) for name in names]
    assert len(set(addresses)) == len(names)
    assert layout.address("README.md") == "index.html"
    assert layout.address("docs/log/sm90.md") == "log/sm90.html"
    assert layout.address("examples/serve.py") == "source/examples/serve.py.html"


def test_lists_and_tables_stand_apart_from_what_is_before_them() -> None:
    text = "Functions:\n- one\n  more\n- two\n- three\n<!-- a -->\n| x |\n```\ntext\n- no item\n```\n"
    shown = "Functions:\n\n- one\n  more\n- two\n- three\n\n<!-- a -->\n\n| x |\n```\ntext\n- no item\n```\n"
    assert layout.markdown(text) == shown


def test_a_notebook_becomes_a_page() -> None:
    page = layout.source_page("examples/tour.ipynb", (REPOSITORY / "examples/tour.ipynb").read_text(encoding="utf-8"))
    assert page.startswith("---\ntitle: tour.ipynb\n")
    assert "\n## A tour of flashtile\n" in page
    assert "```python\nimport torch\n" in page
    assert '<div class="output"><div class="flashtile-explain"><div class="scroll"><table>' in page
    assert "<style>" not in page


def test_a_source_file_with_fences_stays_one_block() -> None:
    page = layout.source_page("one.py", '"""\n````\n"""\n')
    assert page.endswith('`````python\n"""\n````\n"""\n`````\n')


@pytest.mark.parametrize("package", api.PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    module = __import__(package, fromlist=["__all__"])
    headings = re.findall(r"^## (\w+)$", api.page(package, REPOSITORY / "src"), re.MULTILINE)
    assert sorted(headings) == sorted(name for name in module.__all__ if name != "__version__")


def test_signatures_are_those_of_the_functions() -> None:
    page = api.page("flashtile", REPOSITORY / "src")
    for name in flashtile.__all__:
        function = getattr(flashtile, name)
        if not inspect.isfunction(function):
            continue
        shown = page.split(f"## {name}\n\n```python\n")[1].split("```")[0]
        names = [one for one in inspect.signature(function).parameters if one != "unknown"]
        assert [one for one in names if not re.search(rf"\b{one}\b", shown)] == [], name
        assert "unknown" not in shown


def test_docstrings_become_markdown() -> None:
    text = """Says <what> `a*b` is, with [0] and a * b; docs/limits.md has the rest.

    a, b   the first | two,
           of a kind
    c      the third

        run(a)
    """
    assert api.prose(text) == (
        "Says &lt;what> `a*b` is, with \\[0\\] and a \\* b; [limits](../docs/limits.md) has the rest.\n\n"
        "| argument | meaning |\n|---|---|\n| `a`, `b` | the first \\| two, of a kind |\n| `c` | the third |\n\n"
        "```python\nrun(a)\n```"
    )
