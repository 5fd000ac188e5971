"""The commands. Each one parses its options here and leaves the work to its own module."""

from __future__ import annotations

from typing import Annotated

import typer

from flashtile.cli import info as info_command
from flashtile.version import __version__

app = typer.Typer(name="flashtile", help="IO-aware attention for PyTorch.", no_args_is_help=True, add_completion=False)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"flashtile {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    return None


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False) -> None:
    """What was found on this machine, what works here, and why the rest does not."""
    info_command.show(as_json)
