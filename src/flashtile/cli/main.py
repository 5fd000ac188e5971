"""The commands. Options are parsed here; each command's own module does the work.

Nothing here imports torch: the help and the errors of the parser come at once. `flashtile_command` starts this module
without running flashtile's `__init__`, and a command runs it later, by `importing`.
"""

from __future__ import annotations

import dataclasses
import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from flashtile.lab.defaults import LADDER_HEAD_DIM, PROFILE_PROVIDERS
from flashtile.version import __version__

if TYPE_CHECKING:
    from flashtile.lab.bench.command import Options as BenchOptions

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


@app.command()
def explain(
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(help="Key heads. Default: as many as --heads.")] = None,
    seqlen_q: Annotated[int, typer.Option(help="Queries of each sequence.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys of each sequence. Default: as many as --seqlen-q.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head dimension of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Head dimension of v. Default: --head-dim.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    is_causal: Annotated[bool, typer.Option("--causal", help="With a causal mask from the bottom right.")] = False,
    is_top_left: Annotated[bool, typer.Option("--causal-top-left", help="With one from the top left.")] = False,
    window: Annotated[str | None, typer.Option(help="left,right of a sliding window; -1 = unbounded.")] = None,
    mask: Annotated[str | None, typer.Option(help="Shape of a boolean mask, such as 1,1,4096,4096.")] = None,
    bias: Annotated[str | None, typer.Option(help="Shape of a bias.")] = None,
    softcap: Annotated[float, typer.Option(help="Softcap; 0 = none.")] = 0.0,
    has_alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    has_sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False,
    dropout_p: Annotated[float, typer.Option(help="Probability of dropout.")] = 0.0,
    is_varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences: attention_varlen.")] = False,
    is_cache: Annotated[bool, typer.Option("--cache", help="Over a cache with lengths: attention_kvcache.")] = False,
    page_size: Annotated[int | None, typer.Option(help="Keys in pages of so many rows; a cache if not packed.")] = None,
    is_deterministic: Annotated[bool, typer.Option("--deterministic", help="With deterministic=True.")] = False,
    direction: Annotated[str, typer.Option("--pass", help="fwd or fwd+bwd.")] = "fwd",
    layout: Annotated[str | None, typer.Option(help="bhsd or bshd. Default: the function's.")] = None,
    backend: Annotated[str | None, typer.Option(help="The backend that is asked for. Default: the fastest.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help='A GPU that need not be here, such as sm_90, A100 or "RTX 4090"; or cpu.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page instead.")] = None,
) -> None:
    """Say which backend and kernel would run a call, and why each other one would not. Needs no GPU."""
    with importing():
        from flashtile.cli import explain as explain_command
    options = explain_command.Options(
        batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, is_causal, is_top_left, window, mask,
        bias, softcap, has_alibi, has_sinks, dropout_p, is_varlen, is_cache, page_size, is_deterministic, direction,
        layout, backend, gpu, as_json, html,
    )  # fmt: skip
    _run(lambda: explain_command.prepare(options))


@app.command("compile")
def compile_kernels(
    arch: Annotated[
        list[str] | None, typer.Option(help="Such as sm_90 or H100; may be repeated. Default: the GPUs found.")
    ] = None,
    all_of_it: Annotated[
        bool, typer.Option("--all", help="Every architecture the compiler supports, and variants with options.")
    ] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16 or bf16; may be repeated. Default: all.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="May be repeated. Default: all in the kernel table.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Kernels compiled in parallel. Default: one per core.")] = None,
    embed: Annotated[
        Path | None, typer.Option(help="Also write the kernels to this folder, as a build with FLASHTILE_ARCHS does.")
    ] = None,
) -> None:
    """Compile kernels ahead of time, without a GPU, and show registers, spills, shared memory and occupancy."""
    with importing():
        from flashtile.cli import compile as compile_command
    options = compile_command.Options(arch or (), all_of_it, dtype or (), head_dim or (), as_json, jobs, embed)
    _run(lambda: compile_command.prepare(options))


@app.command()
def check(
    problems: Annotated[
        int | None, typer.Option(help="Number of problems. Default: 200, or as many as --seconds allows.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="End after this time, whatever is running.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the problems. Default: a random one, which is shown.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Names, separated by commas. Default: all for the device.")
    ] = None,
    direction: Annotated[str, typer.Option("--pass", help="forward, backward or both.")] = "both",
    is_decode: Annotated[bool, typer.Option("--decode", help="Few queries over caches alone, most in pages.")] = False,
    is_float32: Annotated[
        bool, typer.Option("--float32", help="Float32 by tensor cores alone, most numbers of very different sizes.")
    ] = False,
    is_packed: Annotated[
        bool, typer.Option("--packed", help="Packed sequences without max_seqlen alone, in memory of any kind.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes. Default: 1, on a GPU up to 8.")] = None,
    case: Annotated[
        str | None, typer.Option(help="Run this problem, as a failure prints it, instead of random ones.")
    ] = None,
    mutate: Annotated[
        str | None, typer.Option(help="all, or names: plant faults in the kernels and check that they are found.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write check.json or mutations.json into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; the tables go to stderr.")] = False,
) -> None:
    """Run random problems on every backend and compare with fp64 and with each other. Exits 1 if one disagrees."""
    with importing():
        from flashtile.cli import check as check_command

    def prepare() -> Callable[[], int]:
        kind = check_command.only_kind(decode=is_decode, float32=is_float32, packed=is_packed)
        options = check_command.Options(
            problems, seconds, seed, backends, direction, kind, device, jobs, case, mutate, out, as_json
        )
        return check_command.prepare(options, sys.argv[1:])

    _run(prepare)


@app.command()
def bench(
    grid: Annotated[
        str | None, typer.Option(help="paper, decode, options, float32, cpu or wild: not one length sweep.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Sequence lengths up to 16384 instead of 2048.")] = False,
    seqlens: Annotated[str | None, typer.Option(help="Sequence lengths, separated by commas.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64. Default: fp32, in a grid bf16.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    heads_kv: Annotated[int | None, typer.Option(help="Key heads. Default: as many as --heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    causal: Annotated[bool, typer.Option("--causal", help="With a causal mask.")] = False,
    direction: Annotated[
        str | None, typer.Option("--pass", help="fwd, bwd or fwd+bwd. Default: fwd; for paper and options fwd and bwd.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Names, separated by commas; also `ours` and `baselines`.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Replay CUDA graphs: kernel time without host time.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Time budget of one provider at one point.")] = None,
    call_limit: Annotated[
        float | None, typer.Option(help="Skip sizes whose calls would take more seconds than this.")
    ] = None,
    compile_limit: Annotated[
        float | None, typer.Option(help="Seconds that the first calls of a provider may take in total.")
    ] = None,
    overhead: Annotated[bool, typer.Option("--overhead", help="Measure the host time of a call instead.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Measure the first call of new processes instead.")] = False,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Compare tiles of the forward kernels; takes --dtype, --out and --json.")
    ] = False,
    calls: Annotated[
        str | None, typer.Option(help="Parts of names in --grid options; numbers of random calls.")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="short (bursts after a rest), sustained (load) or both. Default: of paper on a GPU both."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. Default: a new one, printed.")] = None,
    points: Annotated[int | None, typer.Option(help="Number of calls of --grid wild.")] = None,
    first: Annotated[
        int | None, typer.Option("--from", help="The random call with which a run that stopped goes on.")
    ] = None,
    regret: Annotated[
        int | None, typer.Option(help="Measure what the choice of a kernel costs in that many random calls instead.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.csv B.csv", help="Print and write the ratios of two runs.")
    ] = None,
) -> None:
    """Benchmark attention against its peers: CSV, plots and ratios."""
    with importing():
        from flashtile.lab.bench import command as bench_command
        from flashtile.lab.tiles import command as tiles_command
    options = bench_command.Options(
        grid, full, seqlens, dtype, batch, heads, heads_kv, head_dim, causal, direction, backends, device, out,
        as_json, graph, seconds,
        call_limit, compile_limit, overhead, cold, calls, protocol, seed, points, first, regret,
    )  # fmt: skip
    if compare:
        _run(lambda: _prepare_compare(compare, options, tiles))
    _run(lambda: (tiles_command if tiles else bench_command).prepare(options, sys.argv[1:]))


def _prepare_compare(files: tuple[Path, Path], options: BenchOptions, has_tiles: bool) -> Callable[[], int]:
    from flashtile.errors import value_error
    from flashtile.lab.bench import command as bench_command

    if has_tiles or dataclasses.replace(options, out=None, as_json=False) != bench_command.Options():
        raise value_error("--compare", "options of a sweep beside it", "--out and --json", "Drop the others")
    return bench_command.prepare_compare(*files, options.out, options.as_json)


@app.command()
def ladder(
    is_list: Annotated[bool, typer.Option("--list", help="List the rungs and their resources, without a GPU.")] = False,
    only: Annotated[str | None, typer.Option(help="Names or numbers of rungs, separated by commas.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16. Default: that of the rungs of --only, else fp32.")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Only causal problems, or none. Default: both.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Read hardware counters with Nsight Compute.")] = False,
    arch: Annotated[str | None, typer.Option(help="For --list, such as sm_90. Default: the GPU's, else sm_90.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False,
    head_dim: Annotated[
        int, typer.Option(help="Up to 128. Files of another one than the default have it in their name.")
    ] = LADDER_HEAD_DIM,
) -> None:
    """Check, time and profile the kernel of each optimisation step, beside SDPA."""
    with importing():
        from flashtile.lab.ladder import command as ladder_command
    options = ladder_command.Options(is_list, only, dtype, causal, profile, arch, out, as_json, head_dim)
    _run(lambda: ladder_command.prepare(options, sys.argv[1:]))


@distributed_app.command()
def simulate(
    ranks: Annotated[str, typer.Option(help="Numbers of GPUs, separated by commas.")] = "8,64,256,1024",
    rows: Annotated[str, typer.Option(help="Tokens of each GPU, separated by commas.")] = "4096,16384",
    links: Annotated[str, typer.Option(help="nvlink, infiniband or ethernet, separated by commas.")] = (
        "nvlink,infiniband,ethernet"
    ),
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    heads_kv: Annotated[int, typer.Option(help="Key heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    full: Annotated[bool, typer.Option("--full", help="Without a causal mask.")] = False,
    measured: Annotated[
        bool, typer.Option("--measured", help="Run two ranks on this CPU over slow links and compare them.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write a CSV and figures into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Predict time, overlap and memory of context parallel attention for many GPUs, from measured kernel times."""
    with importing():
        from flashtile.cli import distributed as distributed_command  # imports Dynamo, which takes seconds

    options = distributed_command.Options(
        ranks, rows, links, heads, heads_kv, head_dim, not full, measured, out, as_json
    )
    _run(lambda: distributed_command.prepare(options, sys.argv[1:]))


@distributed_app.command(name="check")
def check_ranks(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,3,4,8",
    device: Annotated[str, typer.Option(help="cpu, or cuda: ranks share the GPUs of this machine.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Of torch.distributed: gloo or nccl.")] = "gloo",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    seconds: Annotated[float | None, typer.Option(help="For each number of ranks; the rest is left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write distributed_exactness.json into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; tables go to stderr.")] = False,
) -> None:
    """Check attention over processes of this machine against the float64 oracle of one process, by the error rule."""
    with importing():
        from flashtile.cli import distributed as distributed_command  # imports Dynamo, which takes seconds

    options = distributed_command.CheckOptions(ranks, device, backend, seed, seconds, out, as_json)
    _run(lambda: distributed_command.prepare_check(options, sys.argv[1:]))


class _WordsCommand(TyperCommand):
    """A command whose arguments never begin with a dash, so that options may follow a `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [argument for argument in args if argument != "--"])


@app.command(cls=_WordsCommand)
def profile(
    problem: Annotated[
        list[str] | None,
        typer.Argument(
            help="Words such as B=4 H=16 S=4096 d=128 causal dtype=bf16 pass=fwd,bwd (also Hkv, Sq, Sk, dv, full). "
            "Values may be lists: S=1024,4096."
        ),
    ] = None,
    providers: Annotated[
        str, typer.Option(help="Whose kernels, separated by commas: names as in `bench --backends`.")
    ] = PROFILE_PROVIDERS,
    arch: Annotated[
        str | None, typer.Option(help="Such as sm_90: only what the compiler knows about our kernels; needs no GPU.")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Clocks of one block of our kernels, phase by phase, and a picture.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False,
) -> None:
    """Read the hardware counters of the kernels of a call with Nsight Compute: ours, torch's or others'."""
    with importing():
        from flashtile.lab.profile import command as profile_command
    options = profile_command.Options(problem or (), providers, arch, timeline, out, as_json)
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
