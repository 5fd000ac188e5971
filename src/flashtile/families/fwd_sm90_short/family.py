"""The Hopper forward pass for short sequences: fwd_sm90_short.cuh, docs/sm90.md."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.steps import query_grid
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.length_class import PACKED_ROWS, KeySteps, PackedHeads, SmallGrid
from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, MapPatch, Step, Workspace
from flashtile.plans.source import plain_unit
from flashtile.plans.spec import CPP_TYPES, CallLayout, PlanKey

_ROWS = 64  # queries of an item
_SINGLE_KEYS = 208  # of one tile at most
_KEYS = KeySteps(_SINGLE_KEYS, 512, 1024)
_SOME, _MANY = 254, 255  # its values for several key tiles
_PACKED_HEADS = PackedHeads(PACKED_ROWS, 128)
_SMALL = SmallGrid(128)  # fewer than two items for a block


_SINGLE_DIM = 64  # the largest whose scores fit one tile


class FwdSm90ShortParams(ctypes.Structure):
    """Parameters of fwd_sm90_short_kernel and bias_fragments_kernel."""

    _fields_ = [
        ("base", Params),
        ("_padding", ctypes.c_char * (-ctypes.sizeof(Params) % 64)),
        *((f"{name}_map", ctypes.c_uint64 * 16) for name in ("q", "k", "v")),
        ("bias_fragments", ctypes.c_void_p),
        ("_end", ctypes.c_char * 56),
    ]


def _shared_bytes(row: Row) -> int:
    slabs, slabs_v, stages = -(-row.head_dim // 64), -(-row.head_dim_v // 64), row["stages"]
    tiles = 128 * (slabs * row.owned * row["query_stages"] + (slabs + slabs_v) * row.streamed * stages)
    return -(-(tiles + 16 * (stages + row["query_stages"])) // 1024) * 1024


class FwdSm90Short(Family):
    name = "fwd_sm90_short"
    op = "forward"
    summary = "the Hopper forward for short sequences: at most 1024 keys, which stay in shared memory for all queries"
    kernel_types = (
        Kernel(
            "fwd_sm90_short",
            "fwd_sm90_short/fwd_sm90_short",
            "Sm90ShortConfig<{dtype}, {out_dtype}, {d}, {d_v}, {streamed}, {knobs}>",
            "FwdSm90ShortStorage<{config}>",
            _shared_bytes,
            knobs=("consumers", "stages", "query_stages", "single"),  # stages: of K and V together
            struct=FwdSm90ShortParams,
        ),
    )
    features = frozenset({"has_band", "bias_dtype"})
    takes_out_dtypes = False
    takes_overlapping_rows = False
    length_classes = (_KEYS, _PACKED_HEADS, _SMALL)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "fwd_sm90_"}
    # The family takes few keys, and no lengths
    fault_needs: ClassVar = {
        "rescale": {"values": "huge", "seqlen_k": 700},
        "tail": {"kind": "dense", "seqlen_k": 99},
        "bias_row": {"kind": "dense", "bias": "hqk", "seqlen_q": 200, "seqlen_k": 99},
    }

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_more(key)

    def _refuse_more(self, key: PlanKey) -> str | None:
        if key.length(_KEYS) == 0:
            return f"over {_KEYS.most} keys"
        if key.features.bias_dtype == "float32":
            return "a bias in float32"
        if key.features.bias_dtype is not None and not _is_single(key):
            return f"a bias with a causal mask, a window or over {_SINGLE_KEYS} keys"
        return None

    def timed_as(self, key: PlanKey) -> str:
        """The forward family, where it was measured to be faster (docs/sm90.md). Few queries of heads that share a KV
        head belong into one tile, and few items leave consumers idle. A deterministic call takes another family: the
        number of items depends on the batch, and its bits must not."""
        is_small = bool(key.length(_SMALL)) or key.length(_PACKED_HEADS) > 1
        return "fwd_sm90" if _is_faster(key) and not is_small and not key.is_deterministic else self.name

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Row]:
        rows, is_single = super().candidates(kernel, key), _is_single(key)
        # The smallest tile that holds all keys of a sequence
        num_keys = max(16 * key.length(_KEYS), _ROWS)
        return (row for row in rows if row["single"] == is_single and (not is_single or row.streamed == num_keys))

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm90_short", key)
        step = self.step(row, key, layout)
        maps = _maps(row, layout)
        if key.features.bias_dtype is None:
            return Launch((step,), maps=maps, struct=FwdSm90ShortParams)
        num_steps = row.streamed // 16
        planes = "bias_heads", "bias_batch"
        workspace = Workspace("bias_fragments", 2048 * num_steps, planes, quotients=(("seqlen_q", _ROWS),))
        before = _bias_step(key.features.bias_dtype, num_steps)
        return Launch((before, step), (workspace,), maps=maps, struct=FwdSm90ShortParams)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, query_grid(layout, _ROWS), max_blocks=1)


def _is_faster(key: PlanKey) -> bool:
    """Measured to be faster than fwd_sm90: one tile; d 64 at S 512, and at S 1024 causal; d 128 at S 512, causal."""
    head_dim = max(key.head_dim, key.head_dim_v)
    if _is_single(key) or key.length(_KEYS) not in (_SOME, _MANY):
        return _is_single(key)
    is_banded, has_some = key.features.has_band, key.length(_KEYS) == _SOME
    is_wide = key.head_dim == key.head_dim_v == 128
    return (32 < head_dim <= 64 and (is_banded or has_some)) or (is_wide and is_banded and has_some)


def _bias_step(bias_dtype: str, num_steps: int) -> Step:
    """Reorders the bias."""
    entry = f"flashtile::bias_fragments_kernel<flashtile::{CPP_TYPES[bias_dtype]}, {num_steps}>"
    grid = Factor("seqlen_q", _ROWS), Factor("bias_heads"), Factor("bias_batch")
    return Step(plain_unit("fwd_sm90_short/bias_fragments", entry, FwdSm90ShortParams), entry, grid, 1, 1, 128, 0)


def _is_single(key: PlanKey) -> bool:
    """One tile holds all keys of a sequence. Under a band several tiles are faster: most are half empty."""
    is_narrow = max(key.head_dim, key.head_dim_v) <= _SINGLE_DIM
    return is_narrow and key.length(_KEYS) not in (0, _SOME, _MANY) and not key.features.has_band


def _maps(row: Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    boxes = {"q": _ROWS, "k": row.streamed, "v": row.streamed}
    return tuple(
        MapPatch(getattr(FwdSm90ShortParams, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in boxes.items()
    )
