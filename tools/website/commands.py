"""Writes the page of the command line, from the commands' own options.

python tools/website/commands.py PAGE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from flashtile.cli.main import app


def page() -> str:
    """Returns the Markdown of the page."""
    parts = ["# Command line", "`python -m flashtile` is the same as `flashtile`."]
    for name, command in _commands("flashtile", typer.main.get_command(app)):
        parts += [f"## {name}", _prose(command.help or "")]
        if rows := [_row(one) for one in command.params if not getattr(one, "hidden", False)]:
            parts.append("\n".join(("| option | meaning | default |", "|---|---|---|", *rows)))
    return "\n\n".join(parts) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields every command below this one, or the command itself where it has none, with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, below in sorted(command.commands.items()):
        yield from _commands(f"{name} {word}", below)


def _row(option: Any) -> str:
    is_option = option.param_type_name == "option"
    words = (*option.opts, *option.secondary_opts) if is_option else (option.name,)
    default = option.default
    if default is None or default is False or callable(default):
        shown = ""
    else:
        shown = f"`{', '.join(map(str, default)) if isinstance(default, tuple | list) else default}`"
    meaning = _prose(" ".join((getattr(option, "help", "") or "").split())).replace("|", "\\|")
    return f"| {', '.join(f'`{word}`' for word in words)} | {meaning} | {shown} |"


def _prose(text: str) -> str:
    return text.replace("\b", "").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
