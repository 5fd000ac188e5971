"""Hooks of MkDocs: which pages there are, their text, and llms.txt.

Generated pages: generated/api-*.md (api.py), generated/commands.md (build/site-parts/commands.md, by commands.py),
generated/dashboard.md, which frames build/site-parts/dashboard.html (`flashtile report`), and a page for each source
file that a page links to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api
import layout

HERE = Path(__file__).resolve().parent
PARTS = layout.ROOT / "build" / "site-parts"
DASHBOARD = """---
hide: [navigation, toc]
search:
  exclude: true
---
# Dashboard

Everything that was measured, by device. [On a page of its own](../dashboard-page.html).

<iframe class="dashboard" src="dashboard-page.html" title="Everything that was measured"></iframe>
"""
_texts: dict[str, str] = {}


class SourceFile(File):
    """A page that shows a source file, under the file's own name."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # The anchors of headings are those that GitHub makes
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slugify(case="lower")}
    config.nav = layout.navigation(config.nav, layout.pages())
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    docs = Path(config.docs_dir)
    kept = [one for one in files if one.src_dir is None or Path(one.src_dir) != docs]
    for name in layout.pages():
        kept.append(_placed(File(name, str(layout.ROOT), config.site_dir, False), layout.address(name)))
    named = [name for name in layout.names(config.nav) if layout.is_shown_as_page(name)]
    for name in dict.fromkeys((*layout.linked_files(), *named)):
        path = layout.ROOT / name
        if layout.is_shown_as_page(name):
            text = layout.source_page(name, path.read_text(encoding="utf-8"))
            level = InclusionLevel.INCLUDED if name in named else InclusionLevel.NOT_IN_NAV
            shown = SourceFile.generated(config, name, content=text, inclusion=level)
            kept.append(_placed(shown, layout.address(name)))
        else:
            kept.append(File(name, str(layout.ROOT), config.site_dir, False))
    generated = {"dashboard.md": DASHBOARD, "commands.md": _part("commands.md")}
    generated |= {name: api.page(package, layout.ROOT / "src") for package, name in api.PACKAGES.items()}
    for name, text in generated.items():
        kept.append(
            _placed(File.generated(config, f"generated/{name}", content=text), layout.address(f"generated/{name}"))
        )
    kept.append(File.generated(config, "dashboard-page.html", content=_part("dashboard.html")))
    kept += [
        File.generated(config, f"site/{path.name}", abs_src_path=str(path))
        for path in (HERE / "style.css", HERE / "dashboard.js")
    ]
    return Files(kept)


def _placed(file: File, address: str) -> File:
    file.dest_uri = address
    return file


def _part(name: str) -> str:
    if not (PARTS / name).exists():
        raise PluginError(f"build/site-parts/{name} is missing: `make site` makes it")
    return (PARTS / name).read_text(encoding="utf-8")


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    _texts[page.file.src_uri] = text
    return layout.markdown(text)


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Writes llms.txt once all pages are read, so the navigation is kept until then."""
    config.extra["navigation"] = nav
    return nav


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes llms.txt, the list of pages with what each begins with, and llms-full.txt, the text of all of them."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines.append("The text of all pages, logs and sources left out, is in [llms-full.txt](llms-full.txt).")
    whole = []
    for entry in config.extra["navigation"].items:
        pages = [one for one in entry.children if isinstance(one, Page)] if isinstance(entry, Section) else [entry]
        lines += ["", f"## {entry.title}", ""]
        for page in pages:
            text = _texts[page.file.src_uri]
            lines.append(f"- [{page.title}]({page.file.url}){_beginning(text)}")
            if entry.title != layout.LOGS and page.file.src_uri.endswith(".md"):
                whole.append(f"<!-- {page.file.src_uri} -->\n\n{text.strip()}\n")
    site = Path(config.site_dir)
    # Without a public address the map of the site is empty
    for name in ("sitemap.xml", "sitemap.xml.gz"):
        (site / name).unlink()
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def _beginning(text: str) -> str:
    """Returns the first sentence of a page's first paragraph."""
    paragraphs = (" ".join(one.split()) for one in text.split("\n\n"))
    found = next((one for one in paragraphs if re.match(r"[A-Z`]", one) and not one.startswith("```")), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found)
    sentence = re.match(r".*?\.(?= |$)", plain)
    return f": {(sentence[0] if sentence else plain).rstrip(':')}" if plain else ""
