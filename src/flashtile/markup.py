"""HTML in flashtile's look: the colours of light and dark, tables, escaped text. Used by `explain` in notebooks, by
`flashtile info --html` and by `flashtile report`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

# Contrast of text is at least 4.5 to 1 on both backgrounds
VARIABLES = """
--ft-back: #ffffff; --ft-card: #f6f7f9; --ft-text: #1b1f24; --ft-soft: #57606a; --ft-line: #d5dae0;
--ft-accent: #b04a00; --ft-good: #00684a; --ft-bad: #a3241f; --ft-code: #eef0f3; color-scheme: light;
"""
DARK_VARIABLES = """
--ft-back: #14171b; --ft-card: #1d2127; --ft-text: #e7eaee; --ft-soft: #a3acb7; --ft-line: #363c45;
--ft-accent: #ff9a5c; --ft-good: #4fd1a5; --ft-bad: #ff8f88; --ft-code: #252a32; color-scheme: dark;
"""
_TABLE = """
%(scope)s { font: 14px/1.45 system-ui, sans-serif; color: var(--ft-text); background: var(--ft-back); }
%(scope)s table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0; }
%(scope)s caption { text-align: left; font-weight: 600; padding: .2rem .6rem .4rem 0; }
%(scope)s th, %(scope)s td {
  text-align: left; padding: .22rem .7rem; border-bottom: 1px solid var(--ft-line); vertical-align: top;
}
%(scope)s thead th { color: var(--ft-soft); font-weight: 600; }
%(scope)s .numeric thead th:not(:first-child) { text-align: right; }
%(scope)s td.number { text-align: right; white-space: nowrap; }
%(scope)s .scroll { overflow-x: auto; max-width: 100%%; }
%(scope)s .good { color: var(--ft-good); }
%(scope)s .bad { color: var(--ft-bad); }
%(scope)s .soft { color: var(--ft-soft); }
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def style(scope: str) -> str:
    """The style of everything inside of the scope, light or dark as the reader's system is set."""
    return (
        f"{scope} {{{VARIABLES}}}\n@media (prefers-color-scheme: dark) {{ {scope} {{{DARK_VARIABLES}}} }}"
        + _TABLE % {"scope": scope}
    )


def table(
    header: Sequence[str],
    lines: Iterable[Sequence[object]],
    caption: str = "",
    is_numeric: bool = True,
    cell_class: str = "number",
) -> str:
    """Returns a table whose first column names the line. Cells are escaped, except those that are `Raw`. `cell_class`:
    the class of the cells of a numeric table."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = []
    for first, *rest in lines:
        kind = f' class="{cell_class}"' if is_numeric else ""
        cells = "".join(f"<td{kind}>{cell if isinstance(cell, Raw) else escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{first if isinstance(first, Raw) else escape(first)}</th>{cells}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    kind = ' class="numeric"' if is_numeric else ""
    return f'<div class="scroll"><table{kind}>{title}{top}<tbody>{"".join(body)}</tbody></table></div>'


class Raw(str):
    """Text that is HTML already."""


def fragment(name: str, body: str) -> str:
    """A part of another page, such as the output of a notebook's cell, with its own style."""
    return f'<div class="{name}"><style>{style("." + name)}</style>{body}</div>'


def page(title: str, body: str, extra_style: str = "", script: str = "") -> str:
    """A whole page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style(':root')}{extra_style}</style>\n</head>\n<body>\n{body}\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )
