"""Tiles that are studied, their problems, and each tile as a provider of the benchmark. The product's selection knows
none of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from flashtile import families
from flashtile.backends import cuda, executor
from flashtile.backends.call import scalars_of, tensors_of
from flashtile.errors import dtype_name, unsupported, value_error
from flashtile.families import Row, Tile
from flashtile.lab.bench import providers
from flashtile.lab.bench.points import Inputs, Plan, Point
from flashtile.lab.bench.providers import Attend, Provider
from flashtile.lab.dtypes import DTYPES
from flashtile.lab.profile.gpu import current_arch
from flashtile.plans.arch import Arch
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.problem import AttentionArgs
from flashtile.runtime import cache
from flashtile.runtime.nvrtc import CompileError, Resources

_LAYOUT = CallLayout("bhsd", ())
# head dim -> (queries, keys, warps)
_SIMT_TILES = {
    64: (
        (32, 32, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128,
        4), (128, 128, 8),
        (256, 64, 8),
    ),
    128: ((32, 32, 4), (64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 4), (128, 32, 8), (128, 64, 4), (128, 64,
    8), (256, 32, 8)),
    256: ((16, 16, 4), (32, 32, 4), (64, 32, 4), (64, 32, 8), (64, 64, 8), (128, 16, 8), (128, 32, 8)),
}  # fmt: skip
# head dim -> (queries, keys, stages, turns, lazy[, stores_p])
_SM90_TILES = {
    64: (
        (128, 64, 2, True, False), (128, 128, 2, True, False), (128, 192, 2, True, False), (192, 96, 2, True, False),
        (192, 128, 2, True, False), (192, 128, 4, True, False), (192, 128, 4, True, True), (192, 128, 4, False, False),
        (192, 160, 2, True, False),
    ),
    128: (
        (128, 64, 2, True, False), (128, 96, 2, True, False), (128, 128, 2, True, False), (128, 128, 2, True, True),
        (128, 160, 2, True, False), (128, 176, 2, True, False), (192, 64, 2, True, True), (192, 80, 2, True, False),
        (192, 80, 2, True, True), (192, 96, 2, True, True), (192, 128, 2, True, True, True),
    ),
    256: (
        (64, 64, 2, False, True), (64, 80, 2, False, True), (64, 96, 2, False, True), (128, 32, 2, True, True),
        (128, 64, 2, True, True), (128, 80, 2, True, False), (128, 80, 2, True, True),
    ),
}  # fmt: skip
_BATCH, _SEQLEN = 4, 4096


@dataclass(frozen=True)
class Study:
    """A family whose tiles are compared, in one dtype, and the peer that is timed beside them."""

    family: str  # its name
    dtype: str  # one of bench.points.DTYPES
    peer: str
    heads: Mapping[int, int]  # by head dim
    rows: tuple[Row, ...]

    @property
    def head_dims(self) -> list[int]:
        return sorted({row.head_dim for row in self.rows})

    def plan(self, head_dim: int) -> Plan:
        """Full and causal."""
        heads = self.heads[head_dim]
        shape = (_BATCH, heads, heads, _SEQLEN, _SEQLEN, head_dim, head_dim, self.dtype)
        return Plan("tiles", f"tiles_{self.dtype}", (Point(*shape), Point(*shape, is_causal=True)))

    def trials(self, head_dim: int) -> list[Trial]:
        return [Trial(self.family, row) for row in self.rows if row.head_dim == head_dim]


def _simt_rows() -> tuple[Row, ...]:
    tiles = ((dim, tile) for dim, some in _SIMT_TILES.items() for tile in some)
    return tuple(
        _row("fwd_simt", "float32", dim, owned, streamed, 32 * num_warps) for dim, (owned, streamed, num_warps) in tiles
    )


def _sm90_rows() -> tuple[Row, ...]:
    names = "stages", "turns", "lazy", "stores_p", "packs"
    tiles = ((dim, tile) for dim, some in _SM90_TILES.items() for tile in some)
    return tuple(
        _row("fwd_sm90", "bfloat16", dim, *tile[:2], 2 * tile[0] + 128, *zip_longest(names, tile[2:], fillvalue=False))
        for dim, tile in tiles
    )


def _row(kernel: str, dtype: str, dim: int, owned: int, streamed: int, num_threads: int, *knobs: Any) -> Row:
    family = families.find(kernel)
    return family.row(Tile(kernel, family.dtypes, dim, dim, owned, streamed, num_threads, knobs), dtype)


STUDIES = (
    Study("fwd_simt", "fp32", "sdpa-efficient", dict.fromkeys(_SIMT_TILES, 16), _simt_rows()),
    Study("fwd_sm90", "bf16", "sdpa-cudnn", {dim: 2048 // dim for dim in _SM90_TILES}, _sm90_rows()),
)


def studies(dtype: str | None) -> list[Study]:
    """Returns the study of a dtype, or all."""
    found = [study for study in STUDIES if dtype in (None, study.dtype)]
    if not found:
        raise value_error("--dtype", repr(dtype), ", ".join(study.dtype for study in STUDIES) + " with --tiles")
    return found


@dataclass(frozen=True)
class Trial:
    """One tile of one family."""

    family: str
    row: Row

    @property
    def name(self) -> str:
        """The tile in words; knobs as in most tiles of the table are left out."""
        row, knobs = self.row, self.row.knobs
        words = [f"{row.owned} x {row.streamed}, {row.num_threads // 32} warps"]
        words += [] if knobs.get("stages", 2) == 2 else [f"{knobs['stages']} stages"]
        words += [] if knobs.get("turns", True) else ["no turns"]
        words += ["lazy"] if knobs.get("lazy", False) else []
        words += ["P in shared memory"] if knobs.get("stores_p", False) else []
        return ", ".join(words)

    @property
    def provider_name(self) -> str:
        return f"{self.row.kernel} d={self.row.head_dim} {self.name}"

    def key(self, is_causal: bool, arch: Arch) -> PlanKey:
        """Returns the key of a large plain call."""
        row = self.row
        return PlanKey(row.dtype, row.out_dtype, row.head_dim, row.head_dim_v, Features(has_band=is_causal), arch)

    def step(self, is_causal: bool, arch: Arch) -> Step:
        return families.find(self.family).step(self.row, self.key(is_causal, arch), _LAYOUT)

    def is_chosen(self, is_causal: bool, arch: Arch) -> bool:
        """True if a large plain call takes this tile."""
        return families.find(self.family).select(self.row.kernel, self.key(is_causal, arch)) == self.row

    def why_not(self, arch: Arch) -> str | None:
        """Returns why the tile cannot run on the architecture, or None."""
        return families.find(self.family).refuse_arch(arch) or self.row.unfit(arch)

    def facts(self, is_causal: bool, arch: Arch) -> TileUse:
        """Returns what the compiled kernel takes; the driver is asked on the GPU at hand."""
        step = self.step(is_causal, arch)
        resources = cache.compile_cached(step.unit, arch.name, [step.entry]).resources(step.entry)
        function = executor.function(step.unit, step.entry, arch.name)
        function.set_shared_bytes(torch.cuda.current_device(), step.shared_bytes)
        blocks = function.blocks_per_multiprocessor(step.num_threads, step.shared_bytes)
        return TileUse(step, resources, arch, blocks)

    def provider(self) -> Provider:
        return Provider(self.provider_name, False, partial(_build, self))


@dataclass(frozen=True)
class TileUse:
    """Resources of a multiprocessor that a tile takes."""

    step: Step
    resources: Resources
    arch: Arch
    blocks: int  # that a multiprocessor holds at a time, by the driver

    @property
    def occupancy(self) -> float:
        return self._share(self.blocks)

    @cached_property
    def computed_occupancy(self) -> float:
        """Returns the occupancy by plans/arch.py, which knows no driver."""
        return self._share(
            self.arch.blocks_per_multiprocessor(self.step.num_threads, self.resources.registers, self.step.shared_bytes)
        )

    def _share(self, blocks: int) -> float:
        # A persistent grid has so many blocks for each multiprocessor, whatever would fit
        blocks = min(blocks, self.step.max_blocks) if self.step.max_blocks else blocks
        return blocks * (self.step.num_threads // 32) / self.arch.max_warps


def profiled_providers() -> list[Provider]:
    """Everyone who can be named in a child of profile.ncu."""
    return [Trial(study.family, row).provider() for study in STUDIES for row in study.rows]


def peer(study: Study) -> Provider:
    return providers.by_name(study.peer)


def compile_all(chosen: Sequence[Study], arch: Arch) -> None:
    """Every kernel of the study that the architecture can run, side by side. One that does not compile says so where it
    is called."""

    def compile_one(step: Step) -> None:
        with suppress(CompileError):
            executor.function(step.unit, step.entry, arch.name)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, steps(chosen, arch)))


def steps(chosen: Sequence[Study], arch: Arch) -> Iterator[Step]:
    for study in chosen:
        for row in study.rows:
            trial = Trial(study.family, row)
            if trial.why_not(arch) is None:
                yield from (trial.step(is_causal, arch) for is_causal in (False, True))


def _build(trial: Trial, point: Point, inputs: Inputs) -> Attend:
    arch, row = current_arch(), trial.row
    if (row.dtype, row.head_dim) != (dtype_name(DTYPES[point.dtype]), point.head_dim):
        raise unsupported("tile", f"{point.dtype}, head_dim {point.head_dim}", f"{row.dtype}, head_dim {row.head_dim}")
    reason = trial.why_not(arch)
    if reason is not None:
        raise unsupported("tile", reason, "one that fits")
    splits = executor.Splits(1, torch.cuda.get_device_properties(inputs.q.device).multi_processor_count)
    plan = cuda.row_plan(families.find(trial.family), row, *_call(point, inputs.q, inputs.k, inputs.v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args, out, lse = _call(point, q, k, v)
        given = tensors_of(args) | {"out": out, "lse": lse}
        executor.execute(executor.Launch(plan, given, scalars_of(args), splits, arch.name))
        return out

    return Attend(call, detail=f"tile {trial.name}")


def _call(point: Point, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionArgs, Tensor, Tensor]:
    """The arguments of a call, and room for out and lse."""
    args = AttentionArgs(q, k, v, causal="top_left" if point.is_causal else "none")
    return args, torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
