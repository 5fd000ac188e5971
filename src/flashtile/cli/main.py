"""The commands. cli/options.py and lab/options.py have their options; each command's own module does the work.

Nothing here imports torch: the help and the errors of the parser come at once. `flashtile_command` starts this module
without running flashtile's `__init__`, and a command runs it later, by `importing`.
"""

from __future__ import annotations

import errno
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand

from flashtile.cli.options import CheckOptions, CompileOptions, ExplainOptions, RanksOptions, SimulateOptions
from flashtile.lab.options import BenchOptions, LadderOptions, ProfileOptions
from flashtile.version import __version__

BAD_INPUT = 2
app = typer.Typer(name="flashtile", help="IO-aware attention for PyTorch.", no_args_is_help=True, add_completion=False)


distributed_app = typer.Typer(help="Attention over many ranks.", no_args_is_help=True)
app.add_typer(distributed_app, name="distributed")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"flashtile {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    return None


@contextmanager
def importing() -> Iterator[None]:
    """Imports the library and then what the body imports, which takes seconds: an interrupt meanwhile ends the process
    at once, without a traceback."""
    package = sys.modules["flashtile"]
    if hasattr(package, "attention"):  # the process has imported it
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        yield
    except (ValueError, NotImplementedError) as error:  # a variable of the environment that says nonsense
        if not getattr(error, "names_argument", False):
            raise
        sys.exit(f"flashtile: {error}")
    signal.signal(signal.SIGINT, handler)


def _command(
    name: str, kind: type[Any], group: typer.Typer = app, **settings: Any
) -> Callable[[Callable[[Any], None]], None]:
    """Makes a command of a function of its options, which are the fields of `kind`."""

    def add(function: Callable[[Any], None]) -> None:
        def command(**given: Any) -> None:
            function(kind(**given))

        hints, signature = get_type_hints(kind, include_extras=True), inspect.signature(kind)
        parameters = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        group.command(name, help=function.__doc__, **settings)(command)

    return add


def _run(prepare: Callable[[], Callable[[], int]]) -> NoReturn:
    """Prepares a job and runs it. Ends with the status of the job, or with BAD_INPUT and a message: for options that
    make no job, and for files that cannot be written on the way."""
    from flashtile.errors import Unsupported
    from flashtile.runtime.nvrtc import CompileError

    try:
        job = prepare()
    except (ValueError, TypeError, Unsupported, CompileError) as error:
        _refuse(str(error), error)
    try:
        status = job()
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _refuse(f"A result could not be written: {error}", error)
    raise typer.Exit(status)


def _refuse(text: str, error: Exception) -> NoReturn:
    typer.secho(text, err=True, fg=typer.colors.RED)
    raise typer.Exit(BAD_INPUT) from error


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page instead of tables.")] = None,
) -> None:
    """Show what was found on this machine, what works here, and why the rest does not."""
    with importing():
        from flashtile.cli import info as info_command
    _run(lambda: info_command.prepare(as_json, html))


@app.command()
def cache(
    is_clear: Annotated[bool, typer.Option("--clear", help="Remove all kernels, after a question.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="Beside --clear: ask nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show where compiled kernels are kept, how many and of which versions, or remove them."""
    with importing():
        from flashtile.cli import cache as cache_command
    _run(lambda: cache_command.prepare(is_clear, is_sure, as_json))


@_command("explain", ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Say which backend and kernel would run a call, and why each other one would not. Needs no GPU."""
    with importing():
        from flashtile.cli import explain as explain_command
    _run(lambda: explain_command.prepare(options))


@_command("compile", CompileOptions)
def compile_kernels(options: CompileOptions) -> None:
    """Compile kernels ahead of time, without a GPU, and show registers, spills, shared memory and occupancy."""
    with importing():
        from flashtile.cli import compile as compile_command
    _run(lambda: compile_command.prepare(options))


@_command("check", CheckOptions)
def check(options: CheckOptions) -> None:
    """Run random problems on every backend and compare with fp64 and with each other. Exits 1 if one disagrees."""
    with importing():
        from flashtile.cli import check as check_command
    _run(lambda: check_command.prepare(options, sys.argv[1:]))


@_command("bench", BenchOptions)
def bench(options: BenchOptions) -> None:
    """Benchmark attention against its peers: CSV, plots and ratios."""
    with importing():
        from flashtile.lab.bench import command as bench_command
        from flashtile.lab.tiles import command as tiles_command
    has_tiles = options.has_tiles and options.compare is None
    _run(lambda: (tiles_command if has_tiles else bench_command).prepare(options, sys.argv[1:]))


@_command("ladder", LadderOptions)
def ladder(options: LadderOptions) -> None:
    """Check, time and profile the kernel of each optimisation step, beside SDPA."""
    with importing():
        from flashtile.lab.ladder import command as ladder_command
    _run(lambda: ladder_command.prepare(options, sys.argv[1:]))


@_command("simulate", SimulateOptions, distributed_app)
def simulate(options: SimulateOptions) -> None:
    """Predict time, overlap and memory of context parallel attention for many GPUs, from measured kernel times."""
    with importing():
        from flashtile.cli import distributed as distributed_command  # imports Dynamo, which takes seconds
    _run(lambda: distributed_command.prepare(options, sys.argv[1:]))


@_command("check", RanksOptions, distributed_app)
def check_ranks(options: RanksOptions) -> None:
    """Check attention over processes of this machine against the float64 oracle of one process, by the error rule."""
    with importing():
        from flashtile.cli import distributed as distributed_command  # imports Dynamo, which takes seconds
    _run(lambda: distributed_command.prepare_check(options, sys.argv[1:]))


class _WordsCommand(TyperCommand):
    """A command whose arguments never begin with a dash, so that options may follow a `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [argument for argument in args if argument != "--"])


@_command("profile", ProfileOptions, cls=_WordsCommand)
def profile(options: ProfileOptions) -> None:
    """Read the hardware counters of the kernels of a call with Nsight Compute: ours, torch's or others'."""
    with importing():
        from flashtile.lab.profile import command as profile_command
    _run(lambda: profile_command.prepare(options, sys.argv[1:]))


@app.command()
def report(
    results: Annotated[
        Path | None,
        typer.Option(help="Holds a folder for each device. Default: flashtile-results, else results."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page from all results: interactive curves, ratios, rooflines, the ladder, counters. No network."""
    with importing():
        from flashtile.lab.report import command as report_command
    _run(lambda: report_command.prepare(results, out))
