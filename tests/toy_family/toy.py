"""A kernel family from outside the package: this file, fwd_toy.cuh, and one line of registration are all that it
takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import query_grid
from flashtile.kernels.spec import CallLayout, Features, PlanKey


@dataclass(frozen=True)
class ToyRow(Row):
    @property
    def header(self) -> Path:
        return Path(__file__).with_name("fwd_toy.cuh")

    @property
    def num_threads(self) -> int:
        return self.block_m

    @property
    def shared_bytes(self) -> int:
        return 2 * 4 * self.block_n * 32

    @property
    def config(self) -> str:
        return f"ToyConfig<{self.block_m}, {self.block_n}>"

    @property
    def label(self) -> str:
        return f"{self.block_m} x {self.block_n}"

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        return {"shared bytes": (f"sizeof(flashtile::FwdToyStorage<flashtile::{self.config}>)", self.shared_bytes)}


class FwdToy(Family[ToyRow]):
    name = "fwd_toy"
    op = "forward"
    summary = "a thread for each query"
    kernels = ("fwd_toy",)
    dtypes = ("float32",)
    head_dims = ((32, 32),)
    features = frozenset({"has_band", "has_lengths", "is_aligned16"})

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or (None if key.out_dtype == "float32" else "results in another dtype")

    def every_row(self, dtype: str) -> Iterator[ToyRow]:
        yield from (ToyRow("fwd_toy", dtype, dtype, 32, 32, *tile) for tile in ((64, 16), (32, 8)))

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[ToyRow]:
        yield from self.every_row(key.dtype)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        return self.launch_row(self.select("fwd_toy", key), key, layout)

    def launch_row(self, row: ToyRow, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((tile_step(row, key.features, query_grid(layout, row.block_m)),))
