"""A plan as data: its rules fill the parameters of any call as attention's own words would, without a GPU."""

from __future__ import annotations

import ctypes
import math
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtile import families, ops
from flashtile.backends import call, cuda, dropout, executor
from flashtile.errors import Unsupported
from flashtile.families import assemble
from flashtile.families import steps as family_steps
from flashtile.plans.arch import ARCHS
from flashtile.plans.length_class import PackedHeads
from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, LaunchPlan, Memset, Step
from flashtile.problem import AttentionArgs, Shape, head_axis, key_window, page_size, row_axis, shape_of, softmax_scale
from flashtile.runtime import nvrtc
from flashtile.testing import GRADS, Case

HEAD_DIMS = tuple(head_dim for head_dim, _ in families.find("fwd_simt").head_dims)
NUM_MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_arch", lambda index: ARCHS[90])
    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda index: NUM_MULTIPROCESSORS)


def draw(pick: random.Random) -> Case:
    heads_kv = pick.choice([1, 2, 3])
    kind = pick.choice(["dense", "dense", "varlen", "used", "paged", "padded"])
    return Case(
        dtype=pick.choice([torch.float32, torch.float16, torch.bfloat16]),
        layout=pick.choice(["bhsd", "bshd"]),
        kind=kind,
        memory="contiguous"
        if kind != "dense"
        else pick.choice(["contiguous", "swapped", "sliced", "expanded", "offset"]),
        batch=pick.choice([1, 2, 3]),
        heads=heads_kv * pick.choice([1, 2]),
        heads_kv=heads_kv,
        seqlen_q=pick.choice([0, 1, 7, 64]),
        seqlen_k=pick.choice([1, 33, 64, 200]),
        head_dim=pick.choice([1, 8, 21, 64]),
        head_dim_v=pick.choice([1, 8, 21, 64]),
        causal=pick.choice(["none", "top_left", "bottom_right"]),
        window=pick.choice([(-1, -1), (5, 3), (1 << 40, -1)]),
        scale=pick.choice([None, 0.3]),
        softcap=pick.choice([0.0, 2.0]),
        mask=pick.choice([None, "bhqk", "k"]),
        bias=pick.choice([None, "bhqk", "hqk", "q"]),
        is_bias_float32=pick.random() < 0.5,
        alibi=pick.choice([None, "h", "bh"]),
        has_sinks=pick.random() < 0.3,
        dropout_p=pick.choice([0.0, 0.25]),
        origin=pick.choice([(0, 0, 0, 0), (7, 24, 5, 9)]),
    )


def expected(
    args: AttentionArgs, tensors: dict[str, torch.Tensor], pointers: dict[str, int], num_splits: int
) -> Params:
    """The parameters, field by field, from what they mean."""
    shape, params = shape_of(args), Params(num_splits=num_splits)
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        if name in tensors:
            tensor = tensors[name]
            batch = tensor.stride(0) if tensor.dim() == 4 else 0
            getattr(params, f"{name}_strides")[:] = (
                batch,
                tensor.stride(head_axis(args.layout)),
                tensor.stride(row_axis(args.layout)),
            )
    for name, address in pointers.items():
        setattr(params, name, address)
    lse = tensors["lse"]
    params.lse_batch_stride = lse.stride(0) if lse.dim() == 3 else 0
    params.lse_head_stride, params.lse_size = lse.stride(-2), lse.numel()
    for name in ("bias", "mask"):
        if (tensor := tensors.get(name)) is not None:
            strides = zip(tensor.stride(), tensor.shape, strict=True)
            getattr(params, f"{name}_strides")[:] = [0 if length == 1 else stride for stride, length in strides]
    if args.bias is not None:
        params.bias_sizes[:] = tuple(args.bias.shape)
    if args.alibi_slopes is not None and args.alibi_slopes.dim() == 2:
        params.alibi_batch_stride = tensors["alibi_slopes"].stride(0)
    if args.block_table is not None:
        params.table_stride = tensors["block_table"].stride(0)
        params.num_pages, params.page_size = args.k.shape[0], page_size(args)
    params.batch, params.heads, params.heads_kv = shape.batch, shape.heads, shape.heads_kv
    params.seqlen_q, params.seqlen_k = shape.seqlen_q, shape.seqlen_k
    params.total_q, params.total_k = args.q.shape[row_axis(args.layout)], args.k.shape[row_axis(args.layout)]
    params.head_dim, params.head_dim_v = shape.head_dim, shape.head_dim_v
    params.window_left, params.window_right = (-1 if reach >= 1 << 30 else reach for reach in key_window(args))
    params.is_top_left, params.softcap = args.causal == "top_left", args.softcap
    params.scale, params.scale_log2 = softmax_scale(args), softmax_scale(args) * math.log2(math.e)
    params.softcap_factor = softmax_scale(args) / args.softcap if args.softcap else 0.0
    params.dropout_threshold, params.keep_factor = (
        dropout.threshold(args.dropout_p),
        dropout.keep_factor(args.dropout_p),
    )
    params.first_query, params.first_key_group, params.first_head = (
        args.first_query,
        args.first_key // 8,
        args.first_head,
    )
    params.total_heads = args.total_heads or shape.heads
    return params


def differences(image: bytearray, params: Params) -> dict[str, tuple[Any, Any]]:
    ours, found = Params.from_buffer_copy(image), {}
    for name, *_ in Params._fields_:
        one, other = (getattr(each, name) for each in (ours, params))
        one, other = (list(each) if isinstance(each, ctypes.Array) else each for each in (one, other))
        if one != other:
            found[name] = one, other
    return found


def filled(
    args: AttentionArgs, given: dict[str, torch.Tensor], plan: LaunchPlan
) -> tuple[bytearray, Params, dict[str, int]]:
    """(what the plan fills, what is expected, the plan's values)"""
    tensors = executor.prepare(plan, given)
    values = executor.evaluate(plan, tensors, call.scalars_of(args), cuda._splits(args))
    room = executor.lay_out_workspaces(plan, values)
    pointers = executor.addresses(tensors, room, room.allocate(args.q.device))
    image = executor.fill(plan, tensors, call.scalars_of(args), values, pointers)
    return image, expected(args, tensors, pointers, values["num_splits"]), values


@pytest.mark.parametrize("scale", [5e-324, 1e-46, 7e-46, 1e-44, 0.125, 1e38])
def test_a_positive_scale_is_positive_in_float32(scale: float) -> None:
    found = ctypes.c_float(call.scalars_of(Case(scale=scale).make(0).args)["scale_log2"]).value
    assert found == max(ctypes.c_float(scale * math.log2(math.e)).value, 2.0**-149)


@pytest.mark.parametrize("softcap", [5e-324, 1e-45, 1e-25, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("scale", [0.0, 1e-100, 1e-30, -0.125, 1.0, 1e20, -1.7e38])
def test_the_factor_of_a_softcap_is_a_float32_number(scale: float, softcap: float) -> None:
    scalars = call.scalars_of(Case(scale=scale, softcap=softcap).make(0).args)
    cap, factor = (ctypes.c_float(scalars[name]).value for name in ("softcap", "softcap_factor"))
    assert 2.0**-100 <= cap <= 2.0**100
    assert math.isfinite(ctypes.c_float(2 * math.log2(math.e) * factor).value)
    if 2.0**-126 <= abs(scale / softcap) <= 2.0**126 and 2.0**-100 <= softcap <= 2.0**100:
        assert (cap, factor) == tuple(ctypes.c_float(x).value for x in (softcap, scale / softcap))
    elif abs(scale) >= 2.0**-100 and softcap > 1.0:
        # What is not capped is multiplied by the scale
        assert cap * factor == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_calls_are_filled_as_they_should(part: int) -> None:
    pick = random.Random(part)
    for number in range(250):
        case = draw(pick)
        inputs = case.make(number)
        args = inputs.args
        if args.cu_seqlens_q is not None and pick.random() < 0.5:
            args = args._replace(max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k)
        args = args._replace(num_splits=pick.choice([0, 0, 3]), deterministic=pick.random() < 0.2)
        out, lse = ops.empty_outputs(args)
        given = call.tensors_of(args) | {"out": out, "lse": lse}
        image, params, values = filled(args, given, assemble.plan(cuda._key(args, given), call.layout_of(args, given)))
        assert differences(image, params) == {}, case
        assert values["num_splits"] == 1 or not (args.deterministic and args.num_splits == 0)
        if args.block_table is not None:
            continue
        needs = ops.GradNeeds(*(pick.random() < 0.8 for _ in range(3)), args.bias is not None, args.sinks is not None)
        grads = {name: grad for name, grad in zip(GRADS, ops.empty_grads(args, needs), strict=True) if grad is not None}
        given |= {"dout": inputs.dout, **grads} | ({"dlse": inputs.dlse} if pick.random() < 0.5 else {})
        image, params, _ = filled(
            args, given, assemble.plan(cuda._key(args, given, tuple(grads)), call.layout_of(args, given))
        )
        assert differences(image, params) == {}, case


def plan_of(case: Case, grads: tuple[str, ...] = ()) -> tuple[AttentionArgs, dict[str, torch.Tensor], LaunchPlan]:
    inputs = case.make(0)
    out, lse = ops.empty_outputs(inputs.args)
    given = call.tensors_of(inputs.args) | {"out": out, "lse": lse}
    if grads:
        made = ops.empty_grads(inputs.args, ops.GradNeeds(*(name in grads for name in GRADS)))
        given |= {"dout": inputs.dout} | {name: grad for name, grad in made._asdict().items() if grad is not None}
    key = cuda._key(inputs.args, given, grads or None)
    return inputs.args, given, assemble.plan(key, call.layout_of(inputs.args, given))


def test_a_plan_holds_no_length() -> None:
    """Calls that differ in their lengths alone share one plan, if their length classes are the same."""
    assert plan_of(Case(seqlen_q=50, seqlen_k=1090))[2] is plan_of(Case(seqlen_q=51, seqlen_k=1999))[2]


def test_grids_and_splits() -> None:
    args, given, plan = plan_of(Case(batch=2, heads=4, heads_kv=4, seqlen_q=130, seqlen_k=1000))
    values = executor.evaluate(plan, given, call.scalars_of(args), executor.Splits(0, NUM_MULTIPROCESSORS))
    kernel, combine = (step for step in plan.steps if isinstance(step, Step))
    tiles, key_tiles = -(-130 // kernel.owned), -(-1000 // kernel.streamed)
    assert values["num_splits"] == min(2 * NUM_MULTIPROCESSORS // (tiles * 8), key_tiles) > 1
    assert executor.num_blocks(kernel, values) == values["num_splits"] * tiles * 8
    assert executor.num_blocks(combine, values) == -(-130 // family_steps.COMBINE_ROWS) * 8
    assert executor.num_blocks(combine, values | {"num_splits": 1}) == 0


def test_packed_heads_where_they_make_fewer_tiles() -> None:
    def packed_heads(seqlen_q: int, heads: int, heads_kv: int) -> int:
        return PackedHeads(64, 128).of(Shape(1, heads, heads_kv, seqlen_q, 1, 64, 64), NUM_MULTIPROCESSORS)

    assert [packed_heads(seqlen_q, 32, 8) for seqlen_q in (1, 16, 48, 49, 64, 65, 128, 1000)] == [
        4,
        4,
        4,
        1,
        1,
        1,
        1,
        1,
    ]
    # More heads than a tile has rows lie in as few tiles as hold them
    groups = ((8, 8), (6, 2), (64, 1), (65, 1), (128, 1), (129, 1), (384, 2))
    assert [packed_heads(1, heads, heads_kv) for heads, heads_kv in groups] == [1, 3, 64, 33, 64, 43, 64]
    assert [packed_heads(seqlen_q, 3, 1) for seqlen_q in (21, 42, 43)] == [3, 3, 1]


def test_a_tile_of_packed_heads() -> None:
    """14 heads over 2: 7 heads of 9 queries each in a tile of 64 rows."""
    args, given, plan = plan_of(
        Case(
            dtype=torch.bfloat16, batch=3, heads=14, heads_kv=2, seqlen_q=20, seqlen_k=5000, head_dim=64, head_dim_v=64
        )
    )
    maps = {patch.tensor: patch for patch in plan.maps}
    assert (maps["q"].box_rows, maps["q"].box_heads) == (9, 7)
    assert (maps["k"].box_rows, maps["k"].box_heads) == (128, 1)
    values = executor.evaluate(plan, given, call.scalars_of(args), executor.Splits(0, NUM_MULTIPROCESSORS))
    assert values["num_splits"] == NUM_MULTIPROCESSORS // (3 * 2 * 3)
    assert executor.num_blocks(plan.steps[0], values) == values["num_splits"] * 3 * 2 * 3  # type: ignore[arg-type]
    # A box cannot hold heads that are one in memory
    spread = given["q"][:, :1].expand(-1, 14, -1, -1)
    args, given = args._replace(q=spread), given | {"q": spread}
    maps = {patch.tensor: patch for patch in assemble.plan(cuda._key(args, given), call.layout_of(args, given)).maps}
    assert (maps["q"].box_rows, maps["q"].box_heads) == (64, 1)


def test_an_output_that_leaves_by_the_copy_engine_has_a_map() -> None:
    case = {"dtype": torch.bfloat16, "seqlen_q": 300, "seqlen_k": 300, "head_dim": 128, "head_dim_v": 128}
    names = [patch.tensor for patch in plan_of(Case(**case))[2].maps]
    assert names == ["q", "k", "v", "out"]
    assert [patch.tensor for patch in plan_of(Case(kind="varlen", **case))[2].maps] == names[:3]


def test_only_wanted_gradients_are_launched() -> None:
    def names(*grads: str) -> list[str]:
        steps = plan_of(Case(bias="hqk", has_sinks=True), grads)[2].steps
        return [step.name.removesuffix("_kernel") for step in steps if isinstance(step, Step)]

    assert names("dq") == ["bwd_preprocess", "bwd_dq_simt"]
    assert names("dv") == ["bwd_preprocess", "bwd_dkdv_simt"]
    assert names(*GRADS) == ["bwd_preprocess", "bwd_dsinks", "bwd_dkdv_simt", "bwd_dq_simt", "bwd_dbias_simt"]


def test_gradients_outside_every_sequence_are_zeroed() -> None:
    assert [
        step for step in plan_of(Case(kind="varlen", bias="k"), GRADS[:4])[2].steps if isinstance(step, Memset)
    ] == [
        Memset("dk"),
        Memset("dv"),
        Memset("dbias"),
    ]
    assert not any(isinstance(step, Memset) for step in plan_of(Case(), GRADS[:3])[2].steps)


def test_a_copy_where_kernels_expect_another_form() -> None:
    case = Case(dtype=torch.bfloat16, kind="varlen", has_sinks=True)
    _, given, plan = plan_of(case)
    spread = torch.stack([given["cu_seqlens_k"], given["cu_seqlens_k"]], dim=1)[:, 0]
    tensors = executor.prepare(plan, given | {"cu_seqlens_k": spread})
    assert tensors["sinks"].dtype == torch.float32
    assert torch.equal(tensors["sinks"], given["sinks"].float())
    assert tensors["cu_seqlens_k"].is_contiguous()
    assert torch.equal(tensors["cu_seqlens_k"], spread)
    assert tensors["q"] is given["q"]
    assert tensors["out"] is given["out"]


def test_results_written_elsewhere_come_back() -> None:
    _, given, plan = plan_of(Case(dtype=torch.bfloat16, has_sinks=True), (*GRADS[:3], "dsinks"))
    tensors = executor.prepare(plan, given)
    assert tensors["dsinks"].dtype == torch.float32
    tensors["dsinks"].fill_(1.5)
    executor.finish(plan, given, tensors)
    assert given["dsinks"].tolist() == [1.5, 1.5]


def test_a_workspace_that_is_not_needed_is_not_allocated() -> None:
    args, given, plan = plan_of(Case(seqlen_q=64, seqlen_k=4096))
    values = executor.evaluate(plan, given, call.scalars_of(args), executor.Splits(4, NUM_MULTIPROCESSORS))
    found = executor.lay_out_workspaces(plan, values)
    assert values["num_splits"] == 4
    assert found.num_bytes >= 4 * 4 * given["lse"].numel() * (32 + 1)
    assert executor.lay_out_workspaces(plan, values | {"num_splits": 1}).num_bytes == 0


def test_some_workspaces_are_needed_without_splits() -> None:
    """The parts of float32 operands, whose sequences each begin a tile of their own."""
    with families.forced("fwd_sm90_f32"):
        assemble.clear_plans()
        args, given, plan = plan_of(Case(kind="varlen", batch=3, seqlen_q=70, seqlen_k=300, head_dim=64))
    assemble.clear_plans()
    values = executor.evaluate(plan, given, call.scalars_of(args), executor.Splits(1, NUM_MULTIPROCESSORS))
    found = executor.lay_out_workspaces(plan, values)
    assert set(found.offsets) == {"range", "q_parts", "k_parts", "v_parts"}
    assert found.zeroed == (slice(0, 32),)
    # 3 parts of 2 bytes; a tile of 64 queries more for each sequence
    assert found.offsets["k_parts"] - found.offsets["q_parts"] == 6 * 64 * 2 * (values["total_q"] + 3 * 64)


def test_kernels_without_tiles_have_the_sizes_that_plans_launch_them_with() -> None:
    """A combination that no lane has a column for would be left out without a word."""
    names = ("fwd_combine", "bwd_preprocess", "bwd_sm90_steps", "mask_bits")
    headers = (*(f"families/steps/{name}.cuh" for name in names), "device/attn/mask_bits.cuh")
    text = "".join((nvrtc.INCLUDE / header).read_text() for header in headers)
    sizes = {name: int(value) for name, value in re.findall(r"constexpr i32 (k\w+) = (\d+);", text)}
    assert (sizes["kMaskGroup"], sizes["kMaskWord"], sizes["kMaskBitsThreads"]) == (
        family_steps.MASK_GROUP,
        family_steps.MASK_WORD,
        family_steps.MASK_BITS_THREADS,
    )
    assert (sizes["kCombineRows"], 32 * sizes["kCombineRows"]) == (
        family_steps.COMBINE_ROWS,
        family_steps.COMBINE_THREADS,
    )
    assert (sizes["kPreprocessRows"], sizes["kPreprocessThreads"]) == (
        family_steps.PREPROCESS_ROWS,
        family_steps.PREPROCESS_THREADS,
    )
    assert (sizes["kStepRows"], sizes["kStepThreads"]) == (
        family_steps.SM90_STEP_ROWS,
        family_steps.SM90_STEP_THREADS,
    )
    assert 32 * sizes["kCombineColumns"] >= HEAD_DIMS[-1]


@pytest.mark.parametrize(
    ("shape", "expanded", "num_planes", "num_rows"),
    [
        ((2, 1, 1, 700), (2, 1, 1, 700), 2, 1),
        ((2, 1, 1, 700), (2, 4, 300, 700), 2, 1),
        ((1, 4, 300, 700), (2, 4, 300, 700), 4, 300),
        ((2, 4, 300, 700), (2, 4, 300, 700), 8, 300),
        ((1, 1, 1, 1), (1, 1, 1, 1), 1, 1),
    ],
)
def test_a_mask_is_packed_once_where_it_is_broadcast(
    shape: tuple[int, ...], expanded: tuple[int, ...], num_planes: int, num_rows: int
) -> None:
    mask = torch.ones(shape, dtype=torch.bool).expand(expanded)
    case = Case(dtype=torch.bfloat16, heads=4, heads_kv=4, seqlen_q=300, seqlen_k=700, head_dim=64, head_dim_v=64)
    inputs = case.make(0)
    args = inputs.args._replace(mask=mask)
    given = call.tensors_of(args) | dict(zip(("out", "lse"), ops.empty_outputs(args), strict=True))
    plan = assemble.plan(cuda._key(args, given, None), call.layout_of(args, given))
    assert [step.name for step in plan.steps if isinstance(step, Step)][:2] == ["mask_bits_kernel", "fwd_sm90_kernel"]
    values = executor.evaluate(plan, executor.prepare(plan, given), call.scalars_of(args), executor.Splits(1, 132))
    # 6 tiles of 128 keys: 16 bytes for each row; a pair of words for each group of 64 rows
    found = executor.lay_out_workspaces(plan, values)
    assert set(found.offsets) == {"mask_bits", "mask_tiles"}
    bits = 16 * num_planes * num_rows * 6
    assert found.offsets["mask_tiles"] == -(-bits // 256) * 256
    assert executor.num_blocks(plan.steps[0], values) == num_planes * -(-num_rows // 64)  # type: ignore[arg-type]


def test_threads_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two objects of one kernel, one would have no address on the device."""
    compiled = SimpleNamespace(cubin=b"", symbols={"entry": "symbol"})

    def compile_slowly(*_: object) -> SimpleNamespace:
        time.sleep(0.05)
        return compiled

    monkeypatch.setattr(executor.cache, "compile_cached", compile_slowly)
    monkeypatch.setattr(executor.driver, "load", lambda _: SimpleNamespace(function=lambda symbol: object()))
    executor._functions.clear()
    try:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: executor.function("unit", "entry", "sm_90a"), range(8)))
    finally:
        executor._functions.clear()
    assert len(found) == 1


def test_more_blocks_than_a_grid_has_are_refused() -> None:
    """The driver takes the number modulo 2**32."""
    step = Step("", "flashtile::fwd_kernel<4>", (Factor("tiles", 2), Factor("heads")), 1, 1, 32, 0)
    assert executor.num_blocks(step, {"tiles": 2**31 - 2, "heads": 2}) == 2**31 - 2
    with pytest.raises(Unsupported, match="2147483648 blocks of fwd_kernel; accepted: at most 2147483647"):
        executor.num_blocks(step, {"tiles": 2**31 - 1, "heads": 2})
