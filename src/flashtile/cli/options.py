"""The options of the commands that are no part of the laboratory.

Nothing here imports torch: the help and the errors of the parser come at once. A field is an option: its annotation
says how it is written and what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class ExplainOptions:
    """Options of `flashtile explain`. None leaves a choice to the function."""

    batch: Annotated[int, typer.Option(help="Batch size.")] = 1
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16
    heads_kv: Annotated[int | None, typer.Option(help="Key heads. Default: as many as --heads.")] = None
    seqlen_q: Annotated[int, typer.Option(help="Queries of each sequence.")] = 4096
    seqlen_k: Annotated[int | None, typer.Option(help="Keys of each sequence. Default: as many as --seqlen-q.")] = None
    head_dim: Annotated[int, typer.Option(help="Head dimension of q and k.")] = 128
    head_dim_v: Annotated[int | None, typer.Option(help="Head dimension of v. Default: --head-dim.")] = None
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16"
    is_causal: Annotated[bool, typer.Option("--causal", help="With a causal mask from the bottom right.")] = False
    is_top_left: Annotated[bool, typer.Option("--causal-top-left", help="With one from the top left.")] = False
    window: Annotated[str | None, typer.Option(help="left,right of a sliding window; -1 = unbounded.")] = None
    mask: Annotated[str | None, typer.Option(help="Shape of a boolean mask, such as 1,1,4096,4096.")] = None
    bias: Annotated[str | None, typer.Option(help="Shape of a bias.")] = None
    softcap: Annotated[float, typer.Option(help="Softcap; 0 = none.")] = 0.0
    has_alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False
    has_sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False
    dropout_p: Annotated[float, typer.Option(help="Probability of dropout.")] = 0.0
    is_varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences: attention_varlen.")] = False
    is_cache: Annotated[bool, typer.Option("--cache", help="Over a cache with lengths: attention_kvcache.")] = False
    page_size: Annotated[int | None, typer.Option(help="Keys in pages of so many rows; a cache if not packed.")] = None
    is_deterministic: Annotated[bool, typer.Option("--deterministic", help="With deterministic=True.")] = False
    direction: Annotated[str, typer.Option("--pass", help="fwd or fwd+bwd.")] = "fwd"
    layout: Annotated[str | None, typer.Option(help="bhsd or bshd. Default: the function's.")] = None
    backend: Annotated[str | None, typer.Option(help="The backend that is asked for. Default: the fastest.")] = None
    gpu: Annotated[
        str | None, typer.Option(help='A GPU that need not be here, such as sm_90, A100 or "RTX 4090"; or cpu.')
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    html: Annotated[Path | None, typer.Option(help="Write an HTML page instead.")] = None


@dataclass(frozen=True)
class CompileOptions:
    """Options of `flashtile compile`."""

    arch: Annotated[
        list[str] | None, typer.Option(help="Such as sm_90 or H100; may be repeated. Default: the GPUs found.")
    ] = None
    is_all: Annotated[
        bool, typer.Option("--all", help="Every architecture the compiler supports, and variants with options.")
    ] = False
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16 or bf16; may be repeated. Default: all.")] = None
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated. Default: all in the kernel table.")] = (
        None
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False
    jobs: Annotated[int | None, typer.Option(help="Kernels compiled in parallel. Default: one per core.")] = None
    embed: Annotated[
        Path | None, typer.Option(help="Also write the kernels to this folder, as a build with FLASHTILE_ARCHS does.")
    ] = None


@dataclass(frozen=True)
class CheckOptions:
    """Options of `flashtile check`."""

    problems: Annotated[
        int | None, typer.Option(help="Number of problems. Default: 200, or as many as --seconds allows.")
    ] = None
    seconds: Annotated[
        float | None, typer.Option(help="End so long after the workers have started, whatever is running.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the problems. Default: a random one, which is shown.")] = (
        None
    )
    backends: Annotated[str | None, typer.Option(help="Names, separated by commas. Default: all for the device.")] = (
        None
    )
    direction: Annotated[str, typer.Option("--pass", help="forward, backward or both.")] = "both"
    is_decode: Annotated[bool, typer.Option("--decode", help="Few queries over caches alone, most in pages.")] = False
    is_float32: Annotated[
        bool, typer.Option("--float32", help="Float32 by tensor cores alone, most numbers of very different sizes.")
    ] = False
    is_packed: Annotated[
        bool, typer.Option("--packed", help="Packed sequences without max_seqlen alone, in memory of any kind.")
    ] = False
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None
    jobs: Annotated[int | None, typer.Option(help="Worker processes. Default: 1, on a GPU up to 8.")] = None
    case: Annotated[
        str | None, typer.Option(help="Run this problem, as a failure prints it, instead of random ones.")
    ] = None
    mutate: Annotated[
        str | None, typer.Option(help="all, or names: plant faults in the kernels and check that they are found.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder to write check.json or mutations.json into.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; the tables go to stderr.")] = False


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `flashtile distributed simulate`."""

    ranks: Annotated[str, typer.Option(help="Numbers of GPUs, separated by commas.")] = "8,64,256,1024"
    rows: Annotated[str, typer.Option(help="Tokens of each GPU, separated by commas.")] = "4096,16384"
    links: Annotated[str, typer.Option(help="nvlink, infiniband or ethernet, separated by commas.")] = (
        "nvlink,infiniband,ethernet"
    )
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32
    heads_kv: Annotated[int, typer.Option(help="Key heads.")] = 8
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 128
    is_full: Annotated[bool, typer.Option("--full", help="Without a causal mask.")] = False
    is_measured: Annotated[
        bool, typer.Option("--measured", help="Run two ranks on this CPU over slow links and compare them.")
    ] = False
    out: Annotated[Path | None, typer.Option(help="Folder to write a CSV and figures into.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False


@dataclass(frozen=True)
class RanksOptions:
    """Options of `flashtile distributed check`."""

    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,3,4,8"
    device: Annotated[str, typer.Option(help="cpu, or cuda: ranks share the GPUs of this machine.")] = "cpu"
    backend: Annotated[str, typer.Option(help="Of torch.distributed: gloo or nccl.")] = "gloo"
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0
    seconds: Annotated[float | None, typer.Option(help="For each number of ranks; the rest is left out.")] = None
    out: Annotated[Path | None, typer.Option(help="Folder to write distributed_exactness.json into.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; tables go to stderr.")] = False
