"""Which kernels float32 calls on Hopper take."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch

from flashtile import families
from flashtile.backends import executor
from flashtile.backends.call import scalars_of, tensors_of
from flashtile.families import assemble
from flashtile.plans.arch import ARCHS
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.problem import AttentionArgs, Shape, shape_of

GRADS = ("dq", "dk", "dv")
NUM_MULTIPROCESSORS = 132


def key_of(
    shape: Shape, grads: tuple[str, ...] | None = None, is_deterministic: bool = False, rows_disjoint: bool = True
) -> PlanKey:
    classes = families.length_classes("forward" if grads is None else "backward")
    values = tuple((one, one.of(shape, NUM_MULTIPROCESSORS)) for one in classes)
    dims = shape.head_dim, shape.head_dim_v
    key = PlanKey("float32", "float32", *dims, Features(), ARCHS[90], grads, classes=values)
    return dataclasses.replace(key, is_deterministic=is_deterministic, rows_disjoint=rows_disjoint)


def one_head(seqlen: int, head_dim: int = 64) -> Shape:
    return Shape(1, 1, 1, seqlen, seqlen, head_dim, head_dim)


@pytest.mark.parametrize("seqlen", [128, 512, 1024, 1536, 2048, 4096, 8192, 16384])
def test_one_head_needs_no_workspace(seqlen: int) -> None:
    """What one head takes beyond its output must be little against it: SDPA takes nothing."""
    key = key_of(one_head(seqlen))
    family = families.select(key)
    assert family.name == "fwd_sm90_f32_direct"
    launch = family.launch(key, CallLayout("bhsd", ()))
    assert sum(workspace.element_bytes for workspace in launch.workspaces) <= 32
    assert not any(workspace.values or workspace.quotients for workspace in launch.workspaces)
    assert launch.splits is None
    banded = dataclasses.replace(key, features=Features(has_band=True))
    clusters = [family.select(family.kernels[0], one)["cluster"] for one in (key, banded)]
    assert clusters == {8192: [2, 4], 16384: [1, 2]}.get(seqlen, [8, 8])


def test_long_heads_look_at_their_numbers_first() -> None:
    """float16 parts take half the products of bfloat16 parts, if they hold the numbers."""
    family, layout = families.find("fwd_sm90_f32_direct"), CallLayout("bhsd", ())

    def kernels(seqlen: int, **features: bool) -> list[str]:
        key = dataclasses.replace(key_of(one_head(seqlen)), features=Features(**features))
        return [step.name for step in family.launch(key, layout).steps]

    both = ["fwd_sm90_f32_direct_half_kernel", "fwd_sm90_f32_direct_bf16_kernel"]
    assert kernels(4096) == kernels(16384, has_bool_mask=True) == both[1:]
    assert kernels(8192)[-2:] == kernels(16384, has_band=True)[-2:] == both


@pytest.mark.parametrize("head_dim", [4, 20, 64])
def test_every_query_tile_has_a_cluster(head_dim: int) -> None:
    family, key = families.find("fwd_sm90_f32_direct"), key_of(one_head(4096, head_dim))
    (step,) = family.launch(key, CallLayout("bhsd", ())).steps
    values = {"num_splits": 1, "seqlen_q": 4096, "heads": 1, "batch": 1, "num_multiprocessors": 132}
    assert executor.num_blocks(step, values) == 4096 // step.owned * family.select(family.kernels[0], key)["cluster"]


def test_what_a_pre_pass_serves() -> None:
    """Many tiles; deterministic calls, whose results must not depend on the batch; larger head dims."""
    names = [families.select(key_of(Shape(4, 16, 16, 4096, 4096, 64, 64))).name]
    names += [families.select(key_of(one_head(8192), is_deterministic=True)).name]
    names += [families.select(key_of(one_head(8192, 128))).name]
    assert names == ["fwd_sm90_f32"] * 3


@pytest.mark.parametrize("head_dim", [64, 128, 136, 256])
def test_large_backward_passes_use_tensor_cores(head_dim: int) -> None:
    key = key_of(Shape(4, 16, 16, 4096, 4096, head_dim, head_dim), GRADS)
    assert families.select(key).name == "bwd_sm90_f32"


def test_the_gradient_of_a_bias_is_that_of_simt() -> None:
    key = key_of(Shape(4, 16, 16, 4096, 4096, 64, 64), (*GRADS, "dbias"))
    key = dataclasses.replace(key, features=Features(bias_dtype="float32"))
    family, layout = families.select(key), CallLayout("bhsd", ())
    assert family.name == "bwd_sm90_f32"
    launch = family.launch(key, layout)
    assert [step.name for step in launch.steps][-2:] == ["bwd_sm90_f32_dq_bf16_kernel", "bwd_dbias_simt_kernel"]
    assert launch.zeroed == ("dbias",)
    # Nothing is split for it alone
    alone = family.launch(dataclasses.replace(key, grads=("dbias",)), layout)
    assert [step.name for step in alone.steps] == ["bwd_preprocess_kernel", "bwd_dbias_simt_kernel"]
    assert {workspace.name for workspace in alone.workspaces} == {"score_lse", "delta"}


def test_the_gradient_of_a_bias_beside_mma_sync() -> None:
    key = dataclasses.replace(key_of(Shape(256, 16, 16, 60, 60, 64, 64), ("dq", "dbias")), arch=ARCHS[80])
    key = dataclasses.replace(key, features=Features(bias_dtype="float32"))
    family = families.select(key)
    launch = family.launch(key, CallLayout("bhsd", ()))
    kernels = ["bwd_preprocess_kernel", "bwd_sm80_f32_dq_kernel", "bwd_dbias_simt_kernel"]
    assert (family.name, [step.name for step in launch.steps]) == ("bwd_sm80_f32", kernels)
    assert launch.zeroed == ("dbias",)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("has_max", [False, True])
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_workspaces_take_at_most_four_times_the_inputs(kind: str, has_max: bool, backward: bool, seed: int) -> None:
    """And a constant, of any head dims and lengths: many short sequences, one long among single tokens."""
    draw, meta, served = random.Random(seed), {"device": "meta", "dtype": torch.float32}, Counter[str]()
    for _ in range(400):
        heads_kv = draw.choice((1, 2, 8))
        heads, batch = heads_kv * draw.choice((1, 4)), int(2 ** draw.uniform(0, 14))
        dims = [draw.choice((1, 16, 24, 33, 48, 64, 65, 96, 128, 130, 200, 256)) for _ in range(2)]
        lengths = [int(2 ** draw.uniform(0, 12)) for _ in range(2)]  # the means, or those of all
        longest = [min(length * draw.choice((1, 30)), length * batch) for length in lengths]
        layout = CallLayout("bhsd", ())
        if kind == "packed":
            q, k, v = (
                torch.empty(number, length * batch, dim, **meta)
                for number, length, dim in zip(
                    (heads, heads_kv, heads_kv), (*lengths, lengths[1]), (dims[0], *dims), strict=True
                )
            )
            cu = torch.empty(batch + 1, device="meta", dtype=torch.int32)
            bounds = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]} if has_max else {}
            args = AttentionArgs(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **bounds)
            layout = CallLayout("bhsd", ("cu_seqlens_q", "cu_seqlens_k"), has_max, has_max)
        else:
            q, k, v = (
                torch.empty(batch, number, length, dim, **meta)
                for number, length, dim in zip(
                    (heads, heads_kv, heads_kv), (*lengths, lengths[1]), (dims[0], *dims), strict=True
                )
            )
            args = AttentionArgs(q, k, v)
        key = key_of(shape_of(args), GRADS if backward else None)
        family = families.select(key)
        served[family.name] += 1
        plan = assemble.plan(key, layout)
        sizes = (*q.shape[:-1], dims[1])
        results = {name: torch.empty(sizes, **meta) for name in ("out", "dout")}
        tensors = tensors_of(args) | results | {"lse": torch.empty(sizes[:-1], **meta)}
        tensors |= {f"d{name}": getattr(args, name) for name in "qkv"}
        values = executor.evaluate(plan, tensors, scalars_of(args), executor.Splits(1, NUM_MULTIPROCESSORS))
        inputs = 4 * sum(tensor.numel() for tensor in (q, k, v, *((results["dout"],) if backward else ())))
        taken = executor.lay_out_workspaces(plan, values).num_bytes
        assert taken <= 4 * inputs + 2**20, (family.name, shape_of(args))
    assert any("sm90_f32" in name for name in served)


def test_rows_that_overlap_are_not_split() -> None:
    """The parts of a row that is expanded to 2^30 rows would take 384 GiB."""
    for name, grads in (("fwd_sm90_f32", None), ("bwd_sm90_f32", GRADS)):
        key = key_of(Shape(4, 16, 16, 4096, 4096, 64, 64), grads, rows_disjoint=False)
        assert families.find(name).refuse(key) == "rows that overlap in memory"
        # Kernels that read the rows where they are
        assert families.select(key).name in ("fwd_sm80_f32", "bwd_simt", "bwd_sm80_f32")
