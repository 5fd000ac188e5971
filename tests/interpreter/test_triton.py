"""The Triton kernels on the CPU, in Triton's interpreter, against fp64: every option, forward and backward.

Runs only with TRITON_INTERPRET=1 set before Triton is imported: tests/cpu/test_triton.py starts it in new processes.
With tiles of 32 x 32 even short sequences have full, partial and last tiles.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import triton as backend
from flashtile.testing import Case, assert_agrees, dropout_mask, run

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

DTYPES = (torch.float16, torch.float32)
ONE = {"batch": 1, "heads": 1, "heads_kv": 1}
LONG = {**ONE, "seqlen_q": 40, "seqlen_k": 70}
SQUARE = {**ONE, "seqlen_q": 40, "seqlen_k": 40}
TOGETHER: dict[str, Any] = {
    "heads": 2,
    "heads_kv": 1,
    "causal": "bottom_right",
    "window": (25, -1),
    "softcap": 3.0,
    "alibi": "h",
    "bias": "hk",
    "mask": "k",
    "has_sinks": True,
    "dropout_p": 0.1,
    "batch": 1,
    "seqlen_q": 40,
    "seqlen_k": 60,
}
OPTIONS: dict[str, dict] = {
    "plain": LONG,
    "causal bottom right": {"causal": "bottom_right", **LONG},
    "causal top left": {"causal": "top_left", **LONG},
    "causal, more queries than keys": {"causal": "bottom_right", **ONE, "seqlen_q": 70, "seqlen_k": 38},
    "window": {"window": (64, 20), **LONG},
    "window to the left only": {"window": (9, -1), **LONG},
    "window with causal": {"window": (20, 30), "causal": "bottom_right", **LONG},
    "negative scale": {"scale": -0.3, **LONG},
    "softcap": {"softcap": 1.5, **LONG},
    "mask": {"mask": "bhqk", "seqlen_q": 40, "seqlen_k": 30},
    "query mask": {"mask": "q", "seqlen_q": 40, "seqlen_k": 20},
    **{f"bias {axes}": {"bias": axes, "seqlen_q": 35, "seqlen_k": 20} for axes in ("bhqk", "bk", "hq", "1")},
    "bias in float32": {"bias": "hqk", "is_bias_float32": True, **LONG},
    "alibi per head": {"alibi": "h", **LONG},
    "alibi per batch": {"alibi": "bh", "causal": "top_left", "seqlen_q": 20, "seqlen_k": 40},
    "sinks with masked rows": {"has_sinks": True, "mask": "bq", "seqlen_q": 40, "seqlen_k": 20},
    "dropout": {"dropout_p": 0.2, **LONG},
    "dropout of a part": {"dropout_p": 0.2, "origin": (1000, 4096, 5, 40), **LONG},
    "gqa": {"heads": 4, "heads_kv": 2, "batch": 1, "seqlen_q": 40, "seqlen_k": 20},
    "head dims 21 and 40": {"head_dim": 21, "head_dim_v": 40, **SQUARE},
    "head dims 1": {"head_dim": 1, "head_dim_v": 1, **SQUARE},
    "head dim 256": {"head_dim": 256, "head_dim_v": 8, **SQUARE},
    "one query": {**LONG, "seqlen_q": 1},
    "one key": {**LONG, "seqlen_k": 1},
    "no query": {"seqlen_q": 0},
    "no key": {"seqlen_k": 0, "has_sinks": True},
    "no batch": {"batch": 0},
    **{
        f"{memory} memory": {"memory": memory, "seqlen_q": 20, "seqlen_k": 40}
        for memory in ("swapped", "sliced", "expanded", "offset")
    },
    "varlen": {
        "kind": "varlen",
        "batch": 3,
        "heads": 1,
        "heads_kv": 1,
        "causal": "bottom_right",
        "seqlen_q": 50,
        "seqlen_k": 50,
    },
    "varlen with options": {
        "kind": "varlen",
        "batch": 2,
        "bias": "bhqk",
        "mask": "hqk",
        "alibi": "bh",
        "has_sinks": True,
        "dropout_p": 0.3,
        "seqlen_q": 40,
        "seqlen_k": 50,
    },
    "used keys": {
        "kind": "used",
        "batch": 3,
        "heads": 1,
        "heads_kv": 1,
        "causal": "bottom_right",
        "seqlen_q": 40,
        "seqlen_k": 40,
    },
    "padded": {
        "kind": "padded",
        "batch": 3,
        "heads": 1,
        "heads_kv": 1,
        "causal": "bottom_right",
        "seqlen_q": 40,
        "seqlen_k": 40,
    },
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "tile_config", lambda *_: backend.Config(32, 32, 4, 1))


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(option: str, seed: int) -> None:
    """Dtype and layout alternate from one option to the next."""
    index = list(OPTIONS).index(option)
    inputs = Case(
        dtype=DTYPES[index % 2], layout=("bhsd", "bshd")[index // 2 % 2], backend="triton", **OPTIONS[option]
    ).make(seed)
    assert_agrees(run(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_together(dtype: torch.dtype, seed: int) -> None:
    inputs = Case(dtype=dtype, backend="triton", **TOGETHER).make(seed)
    assert_agrees(run(inputs), inputs)


def test_dropout_in_tiles_with_one_philox_call_per_key(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such tiles are used for large head dims in float32."""
    monkeypatch.setattr(backend, "tile_config", lambda *_: backend.Config(16, 32, 4, 1))
    inputs = Case(
        backend="triton", dropout_p=0.3, bias="bhqk", batch=1, heads=2, heads_kv=1, seqlen_q=40, seqlen_k=50
    ).make(seed)
    assert_agrees(run(inputs), inputs)


@pytest.mark.parametrize("block", [16, 32])
def test_every_dropout_bit(block: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal weights and V the identity, the nonzero outputs are the dropout mask."""
    monkeypatch.setattr(backend, "tile_config", lambda *_: backend.Config(block, block, 4, 1))
    rng_state = torch.tensor([-(2**62) - seed, 2**40 + 5])
    q, k, v = torch.zeros(2, 3, 37, 4), torch.zeros(2, 3, 53, 4), torch.eye(53).expand(2, 3, 53, 53)
    out = flashtile.attention(q, k, v, dropout_p=0.37, rng_state=rng_state, backend="triton")
    assert torch.equal(out != 0, dropout_mask(rng_state, 0.37, 2, 3, 37, 53))


def test_fully_masked_rows_have_zero_output_and_gradients(seed: int) -> None:
    inputs = Case(
        dtype=torch.float32,
        backend="triton",
        causal="bottom_right",
        batch=1,
        heads=1,
        heads_kv=1,
        seqlen_q=70,
        seqlen_k=30,
    ).make(seed)
    inputs.dout[:, :, :40] = torch.nan
    inputs.dlse[:, :, :40] = torch.inf
    result = run(inputs)
    assert (result.out[:, :, :40] == 0).all()
    assert (result.lse[:, :, :40] == -torch.inf).all()
    assert (result.dq[:, :, :40] == 0).all()
    assert all(grad.isfinite().all() for grad in (result.dq, result.dk, result.dv))


def test_a_visible_nan_propagates(seed: int) -> None:
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    k[0, 0, 35] = torch.nan
    assert flashtile.attention(q, k, v, backend="triton").isnan().all()


def test_float32_output_of_float16_inputs_is_not_rounded(seed: int) -> None:
    inputs = Case(dtype=torch.float16, backend="triton", seqlen_q=20, seqlen_k=20).make(seed)
    args = inputs.args._replace(out_dtype=torch.float32)
    out, _ = ops.forward(*args)
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.half().float())
    inputs = inputs._replace(args=args, dout=inputs.dout.float())
    assert_agrees(run(inputs), inputs)


def test_the_interpreter_is_only_used_by_name(seed: int) -> None:
    q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3))
    assert flashtile.explain(q, k, v).backend != "triton"
    answer = flashtile.prewarm(q, k, v, backend="triton", causal=True)
    assert answer.details["bwd_dkdv_triton_kernel"] == "tile 32 x 32, head dim 32, 4 warps, 1 stages"
    with pytest.raises(flashtile.Unsupported, match="does not multiply bfloat16"):
        flashtile.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend="triton")


def test_index_tensors_are_checked(seed: int) -> None:
    q, cu = torch.randn(9, 2, 16), torch.tensor([0, 4, 99], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q: got 99 at the end"):
        flashtile.attention_varlen(q, q, q, cu, cu, backend="triton")
