"""The rungs as providers of the benchmark, the problems of the ladder, and the CSV row of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from torch import Tensor

from flashtile.errors import unsupported, value_error
from flashtile.lab.bench import providers
from flashtile.lab.bench.points import FAST_SEQLENS, Inputs, Plan, Point
from flashtile.lab.bench.providers import Attend, Provider
from flashtile.lab.bench.rows import Environment, Row, shared_fields
from flashtile.lab.defaults import LADDER_HEAD_DIM
from flashtile.lab.dtypes import accepted_names, dtype_key
from flashtile.lab.ladder import launcher, rungs
from flashtile.lab.ladder.rows import Counters, RungRow
from flashtile.lab.ladder.rungs import Rung, Variables
from flashtile.lab.profile import gpu
from flashtile.lab.profile.ceilings import Ceilings

BASELINES = ("cuda", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")
LARGE = Point(4, 16, 16, 4096, 4096, LADDER_HEAD_DIM, LADDER_HEAD_DIM)
SMALL = Point(1, 1, 1, 512, 512, 64, 64)


def plan(dtype: str, is_causal: bool | None, head_dim: int = LARGE.head_dim) -> Plan:
    """Returns the large problem and the lengths of the fast sweep, full, causal or both (None).

    The large problem comes first, once for each mask: its times show which providers to skip.
    """
    masks = (False, True) if is_causal is None else (is_causal,)
    large, small = (replace(point, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim) for point in (LARGE, SMALL))
    points = [replace(large, is_causal=mask) for mask in masks]
    points += [replace(small, is_causal=mask, seqlen_q=size, seqlen_k=size) for mask in masks for size in FAST_SEQLENS]
    return Plan("ladder", f"ladder_{stem(dtype, head_dim)}", tuple(points))


def large_points(ladder_plan: Plan) -> list[Point]:
    """Returns the first problem of a plan, once for each mask: the large one, which is profiled."""
    first = ladder_plan.points[0]
    return [point for point in ladder_plan.points if replace(point, is_causal=first.is_causal) == first]


def stem(dtype: str, head_dim: int) -> str:
    """Returns what the names of the files of a run have in common."""
    return dtype + ("" if head_dim == LARGE.head_dim else f"_d{head_dim}")


def check_head_dim(head_dim: int) -> None:
    if not 1 <= head_dim <= rungs.MAX_HEAD_DIM:
        raise value_error("--head-dim", str(head_dim), f"1 to {rungs.MAX_HEAD_DIM}")


def checked_dtype(name: str) -> str:
    """Returns the short name of a dtype that some rung computes."""
    dtype = dtype_key(name)
    if dtype not in rungs.DTYPES:
        raise unsupported("--dtype", name, f"{accepted_names(rungs.DTYPES)}: what the rungs compute")
    return dtype


def dtype_of(chosen_rungs: Sequence[Rung], only: str | None) -> str:
    """Returns the dtype of a run without --dtype: that of the rungs that --only names, else of the user's own kernel,
    else fp32."""
    dtypes = list(dict.fromkeys(rung.dtype for rung in chosen_rungs))
    if only is None:
        return next((rung.dtype for rung in chosen_rungs if rung.is_own), rungs.DTYPES[0])
    if len(dtypes) > 1:
        raise value_error("--only", f"{only!r}, rungs of {' and '.join(dtypes)}", "rungs of one dtype", "Add --dtype")
    return dtypes[0]


def chosen(only: str | None, variables: Variables, dtype: str | None = None) -> list[Rung]:
    """Returns the rungs whose number or name is in `only`, or all of them, and the user's own kernel, if any; with
    `dtype` only those of it."""
    known, own = rungs.rungs(), rungs.own(variables)
    if only is None:
        matching = list(known)
    else:
        words = [word.strip() for word in only.split(",") if word.strip()]
        by_word = {word: [rung for rung in known if word.zfill(2) in (rung.name, rung.name[:2])] for word in words}
        unknown = [word for word, matches in by_word.items() if not matches]
        if unknown or not words:
            names = ", ".join(rung.name for rung in known)
            raise value_error("--only", repr(unknown[0] if unknown else only), f"{names}, or their numbers")
        matching = [rung for rung in known if any(rung in matches for matches in by_word.values())]
    matching = matching if own is None else [*matching, own]
    if dtype is None:
        return matching
    if own is not None and own.dtype != dtype:
        raise value_error("--dtype", dtype, f"{own.dtype}, that of {own.path.name}")
    of_dtype = [rung for rung in matching if rung.dtype == dtype]
    if not of_dtype:
        raise value_error("--only", repr(only), f"rungs of {dtype}")
    return of_dtype


def rung_providers(variables: Variables, chosen_rungs: Sequence[Rung] | None = None) -> list[Provider]:
    taken = chosen(None, variables) if chosen_rungs is None else chosen_rungs
    return [Provider(rung.name, False, partial(_build, rung, variables)) for rung in taken]


def profiled_providers() -> list[Provider]:
    """Returns all providers that a child of profile.ncu can name."""
    return [*rung_providers(Variables.read()), *providers.providers()]


def baselines() -> list[Provider]:
    return [providers.by_name(name) for name in BASELINES]


def _build(rung: Rung, variables: Variables, point: Point, inputs: Inputs) -> Attend:
    if point.direction != "fwd":
        raise unsupported("--pass", point.direction, "fwd: the ladder has no backward pass")
    kernel = launcher.kernel_for(rung, inputs.q, inputs.k, inputs.v, variables)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, point.is_causal)

    tile = kernel.tile
    return Attend(
        call,
        detail=f"tile {tile.block_m} x {tile.block_n}, {tile.num_threads} threads, {tile.shared_bytes} bytes shared",
    )


def rung_row(
    rung: Rung,
    point: Point,
    variables: Variables,
    timed: Row | None,
    roofs: Ceilings,
    counted: Counters,
    env: Environment,
) -> RungRow:
    """Returns the row of a rung at a point: its resources, its time if it was timed, its counters if they were read."""
    kernel = launcher.compile_rung(rung, point.head_dim, gpu.current_arch(), variables)
    resources, tile = kernel.resources, kernel.tile
    return RungRow(
        rung=rung.name,
        title=rung.title,
        **shared_fields(RungRow, point),
        seqlen=point.seqlen_q,
        arch=kernel.arch.name,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_threads=tile.num_threads,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        shared_bytes=tile.shared_bytes + resources.static_shared_bytes,
        occupancy=kernel.occupancy,
        median_ms=None if timed is None else timed.median_ms,
        tflops=None if timed is None else timed.tflops,
        flops=point.flops(),
        least_bytes=point.least_bytes(),
        **shared_fields(RungRow, roofs),
        **asdict(counted),
        env=env,
    )
