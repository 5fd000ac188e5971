"""The backward pass by mma.sync for wide heads: bwd_sm80_wide.cuh and bwd_sm80_dbias.cuh,
docs/sm80.md.

Four kernels, one for each of dQ, dK, dV and dbias. Each gradient has one owner, so results do not depend on timing, and
only wanted gradients are computed.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.fwd_sm80_wide.family import WIDE_KNOBS, WIDE_TILE, slab_bytes
from flashtile.families.mma_sync import NARROW_LOADS, MmaFamily
from flashtile.families.steps import ROW_STATS, bias_grid, dsinks, key_grid, preprocess, query_grid, unowned
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, PlanKey

_BLOCK_BYTES = 64  # OwnedRows (attn/owned_rows.cuh)
_TERM_BYTES = 64  # DbiasTerm (bwd_sm80_dbias.cuh)
_DQ, _DK, _DV, _DBIAS = "bwd_sm80_dq", "bwd_sm80_dk", "bwd_sm80_dv", "bwd_sm80_dbias"
_GRADIENTS = {_DQ: "dq", _DK: "dk", _DV: "dv", _DBIAS: "dbias"}


def _shared_bytes(row: Row) -> int:
    has_dp = row.kernel != _DV
    owned = row.owned * (row.head_dim + row.streamed) + (row.owned * row.head_dim_v if has_dp else 64)
    slabs = row["stages"] * slab_bytes(row, row.head_dim if has_dp else row.head_dim_v)
    return -(-(2 * owned + slabs + 16 * max(row.owned, row.streamed) + _BLOCK_BYTES) // 128) * 128


def _dbias_bytes(row: Row) -> int:
    slabs = row["stages"] * 128 * (row.owned + row.streamed)
    return -(-(slabs + 16 * row.owned + 4 * _TERM_BYTES) // 128) * 128


def _kernel(name: str, roles: str, owns: str) -> Kernel:
    """roles: of which gradient the kernel has the roles in C++; dbias has those of dQ."""
    config = f"Sm80WideBwdConfig<{{dtype}}, flashtile::WideGradient::k{roles}, {{d}}, {{d_v}}, {WIDE_TILE}>"
    header, storage, count = "bwd_sm80_wide/bwd_sm80_wide", "BwdSm80WideStorage", _shared_bytes
    if name == _DBIAS:
        header, storage, count = "bwd_sm80_wide/bwd_sm80_dbias", "DbiasSm80Storage", _dbias_bytes
    return Kernel(name, header, config, storage + "<{config}>", count, WIDE_KNOBS, owns)


class BwdSm80Wide(MmaFamily):
    name = "bwd_sm80_wide"
    op = "backward"
    summary = "mma.sync, one kernel for each gradient: head dims over 128, and what bwd_sm80 refuses"
    kernel_types = (
        _kernel(_DQ, "Dq", "queries"),
        _kernel(_DK, "Dk", "keys"),
        _kernel(_DV, "Dv", "keys"),
        _kernel(_DBIAS, "Dq", "queries"),
    )
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))

    misread_by: ClassVar = {"memcheck": NARROW_LOADS}

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout), *dsinks(key)]
        for kernel, gradient in _GRADIENTS.items():
            if gradient in key.grads:
                steps.append(self.step(self.select(kernel, key), key, layout))
        return Launch(tuple(steps), ROW_STATS, zeroed=unowned(key, layout))

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        if row.kernel == _DBIAS:
            return tile_step(row, key.features, bias_grid(row.owned, row.streamed))
        grid = (query_grid if row.of.owns == "queries" else key_grid)(layout, row.owned)
        return tile_step(row, key.features, grid)
