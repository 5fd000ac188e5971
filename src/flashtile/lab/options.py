"""The options of the commands of the laboratory.

Nothing here imports torch: the help and the errors of the parser come at once. A field is an option: its annotation
says how it is written and what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flashtile.lab.defaults import LADDER_HEAD_DIM, PROFILE_PROVIDERS


@dataclass(frozen=True)
class BenchOptions:
    """Options of `flashtile bench`. None selects the default of the sweep or the device."""

    grid: Annotated[
        str | None, typer.Option(help="paper, decode, options, float32, cpu or wild: not one length sweep.")
    ] = None
    is_full: Annotated[bool, typer.Option("--full", help="Sequence lengths up to 16384 instead of 2048.")] = False
    seqlens: Annotated[str | None, typer.Option(help="Sequence lengths, separated by commas.")] = None
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64. Default: fp32, in a grid bf16.")] = None
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1
    heads_kv: Annotated[int | None, typer.Option(help="Key heads. Default: as many as --heads.")] = None
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 64
    is_causal: Annotated[bool, typer.Option("--causal", help="With a causal mask.")] = False
    direction: Annotated[
        str | None, typer.Option("--pass", help="fwd, bwd or fwd+bwd. Default: fwd; for paper and options fwd and bwd.")
    ] = None
    backends: Annotated[
        str | None,
        typer.Option(help="Names, separated by commas; also `ours` and `baselines`."),
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False
    use_graph: Annotated[
        bool,
        typer.Option("--graph", help="Replay CUDA graphs: kernel time without host time."),
    ] = False
    seconds: Annotated[float | None, typer.Option(help="Time budget of one provider at one point.")] = None
    call_limit: Annotated[
        float | None, typer.Option(help="Skip sizes whose calls would take more seconds than this.")
    ] = None
    compile_limit: Annotated[
        float | None, typer.Option(help="Seconds that the first calls of a provider may take in total.")
    ] = None
    has_overhead: Annotated[bool, typer.Option("--overhead", help="Measure the host time of a call instead.")] = False
    has_cold: Annotated[bool, typer.Option("--cold", help="Measure the first call of new processes instead.")] = False
    has_tiles: Annotated[
        bool, typer.Option("--tiles", help="Compare tiles of the forward kernels; takes --dtype, --out and --json.")
    ] = False
    calls: Annotated[str | None, typer.Option(help="Parts of names in --grid options; numbers of random calls.")] = None
    protocol: Annotated[
        str | None,
        typer.Option(help="short (bursts after a rest), sustained (load) or both. Default: of paper on a GPU both."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of everything random. Default: a new one, printed.")] = None
    points: Annotated[int | None, typer.Option(help="Number of calls of --grid wild.")] = None
    first: Annotated[
        int | None, typer.Option("--from", help="The random call with which a run that stopped goes on.")
    ] = None
    regret: Annotated[
        int | None, typer.Option(help="Measure what the choice of a kernel costs in that many random calls instead.")
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.csv B.csv", help="Print and write the ratios of two runs.")
    ] = None


@dataclass(frozen=True)
class LadderOptions:
    """Options of `flashtile ladder`."""

    is_list: Annotated[bool, typer.Option("--list", help="List the rungs and their resources, without a GPU.")] = False
    only: Annotated[str | None, typer.Option(help="Names or numbers of rungs, separated by commas.")] = None
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16. Default: that of the rungs of --only, else fp32.")
    ] = None
    is_causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Only causal problems, or none. Default: both.")
    ] = None
    has_profile: Annotated[bool, typer.Option("--profile", help="Read hardware counters with Nsight Compute.")] = False
    arch: Annotated[str | None, typer.Option(help="For --list, such as sm_90. Default: the GPU's, else sm_90.")] = None
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False
    head_dim: Annotated[
        int, typer.Option(help="Up to 128. Files of another one than the default have it in their name.")
    ] = LADDER_HEAD_DIM


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `flashtile profile`."""

    problem: Annotated[
        list[str] | None,
        typer.Argument(
            help="Words such as B=4 H=16 S=4096 d=128 causal dtype=bf16 pass=fwd,bwd (also Hkv, Sq, Sk, dv, full). "
            "Values may be lists: S=1024,4096."
        ),
    ] = None
    providers: Annotated[
        str, typer.Option(help="Whose kernels, separated by commas: names as in `bench --backends`.")
    ] = PROFILE_PROVIDERS
    arch: Annotated[
        str | None, typer.Option(help="Such as sm_90: only what the compiler knows about our kernels; needs no GPU.")
    ] = None
    has_timeline: Annotated[
        bool, typer.Option("--timeline", help="Clocks of one block of our kernels, phase by phase, and a picture.")
    ] = False
    out: Annotated[Path | None, typer.Option(help="The folder. Default: flashtile-results/<device>.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON; the tables go to stderr.")] = False
