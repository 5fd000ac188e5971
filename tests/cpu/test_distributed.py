"""Attention over 1, 2, 3, 4 and 8 processes (gloo) against the oracle of one, by the error rule."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile import distributed, ops
from flashtile.cli import distributed as distributed_command
from flashtile.distributed import exactness, launch, ring, simulate, transport
from flashtile.distributed.exactness import CASES, WAYS, Way, case_inputs, judge, measure, packed_inputs, refusal
from flashtile.distributed.pieces import Band, needed, pieces
from flashtile.distributed.sharding import Shards, num_rows
from flashtile.testing import Inputs, expect

sys.path.insert(0, str(Path(__file__).parent))
import itertools

import rank_pool
from rank_pool import Pool, context, free_port, prepare

SIZES = (1, 2, 3, 4, 8)
MOST = max(SIZES)
SHAPES = ((2, 2), (1, 4), (4, 2), (2, 1))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool(MOST, SIZES, SHAPES)
    yield ranks
    ranks.close()


# What is computed, by the error rule

FEW = ("causal", "dropout, window, alibi", "mask, dropout", "bfloat16")  # of 8 processes


def run_cases(group: Any, names: tuple[str, ...], seed: int, ways: tuple[Way, ...]) -> list[str]:
    found = []
    for number, name in enumerate(names):
        found += measured(group, name, case_inputs(name, seed + number), ways)
    return found


def measured(group: Any, name: str, inputs: Inputs, ways: tuple[Way, ...]) -> list[str]:
    """What is wrong with errors, or with the number of keys sent."""
    found = []
    expected = expect(inputs) if dist.get_rank(group) == 0 else None
    for way in ways:
        if refusal(inputs, way, dist.get_world_size(group)) is None:
            one = measure(group, name, inputs, way, expected)
            found += [f"{name}, {way}: {wrong}" for wrong in one.complaints] if one is not None else []
    return found


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_one_process(pool: Pool, size: int, part: int, seed: int) -> None:
    names = FEW if size == MOST else tuple(CASES)
    ways = WAYS if size != MOST else (WAYS[0], WAYS[2], WAYS[4])
    found = pool.run(run_cases, size, names[part::2], seed, ways)[0]
    assert not found, "\n".join(found)


EMPTY = (
    {"batch": 0, "dropout_p": 0.1},
    {"seqlen_q": 0, "seqlen_k": 0, "causal": "bottom_right"},
    {"seqlen_q": 5, "seqlen_k": 0, "has_sinks": True},
    {"seqlen_q": 0, "seqlen_k": 5, "alibi": None},
)


def run_empty(group: Any, seed: int) -> list[str]:
    found = []
    for changes in EMPTY:
        inputs = dataclasses.replace(exactness.PLAIN, **changes).make(seed)
        found += measured(group, str(changes), inputs, WAYS[:5])
    return found


def test_nothing_to_compute(pool: Pool, seed: int) -> None:
    found = pool.run(run_empty, 2, seed)[0]
    assert not found, "\n".join(found)


# Packed documents


DOCUMENTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "full, bshd": {"layout": "bshd"},
    "window": {"causal": "bottom_right", "window_left": 6},
    "alibi": {"alibi_slopes": torch.linspace(0.02, 0.3, 8), "causal": "bottom_right"},
    "dropout": {"dropout_p": 0.3, "causal": "bottom_right"},
    "dropout, full, sinks": {"dropout_p": 0.3, "sinks": torch.linspace(-1, 1, 8), "window_right": 3},
}
LENGTHS = ([64], [1, 30, 0, 2, 40, 7, 3], [9, 9, 100, 9], [3] * 20)


def run_documents(group: Any, seed: int) -> list[str]:
    found = []
    for number, (name, options) in enumerate(DOCUMENTS.items()):
        lengths = LENGTHS[(seed + number) % len(LENGTHS)]
        found += measured(group, f"{name}, {lengths}", packed_inputs(seed, lengths, **options), WAYS[:5])
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_documents(pool: Pool, size: int, seed: int) -> None:
    found = pool.run(run_documents, size, seed % 1000)[0]
    assert not found, "\n".join(found)


# Both at once, on a 2-D mesh


def run_mesh(group: Any, shape: tuple[int, int], names: tuple[str, ...], seed: int) -> list[str]:
    mesh = rank_pool.meshes[shape]
    found = []
    for number, name in enumerate(names):
        inputs = case_inputs(name, seed + number)
        for sharding in ("zigzag", "contiguous"):
            for how in ("p2p", "gather"):
                wrong = judge(group, inputs, Way("both", sharding, how), mesh)
                found += [f"{name}, {shape}, {sharding}, {how}: {one}" for one in wrong]
    inputs = packed_inputs(seed, [9, 50, 3, 20], causal="bottom_right", dropout_p=0.2)
    return found + [f"documents: {wrong}" for wrong in judge(group, inputs, Way("both", "zigzag", "p2p"), mesh)]


NAMES = ("causal", "dropout, window, alibi", "softcap, sinks, scale", "float64, bshd", "more keys")


@pytest.mark.parametrize(("shape", "names"), [((2, 2), NAMES), ((1, 4), NAMES[:2]), ((4, 2), NAMES[:2])])
def test_ring_and_heads(pool: Pool, shape: tuple[int, int], names: tuple[str, ...], seed: int) -> None:
    found = pool.run(run_mesh, shape[0] * shape[1], shape, names, seed)[0]
    assert not found, "\n".join(found)


# What is sent, and that it repeats


def count_bytes(group: Any, seqlen: int, options: dict[str, Any], sharding: str) -> tuple[int, int]:
    """Sent by this rank in a forward and in a backward pass."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = Shards(seqlen, size, sharding).length(rank)
    q, k, v = (torch.randn(1, heads, rows, 16, requires_grad=True) for heads in (4, 2, 2))
    sent = [transport.bytes_sent.get(group.group_name, 0)]
    out = distributed.ring_attention(q, k, v, group=group, seqlen=seqlen, sharding=sharding, transport="p2p", **options)
    sent.append(transport.bytes_sent.get(group.group_name, 0))
    out.sum().backward()
    sent.append(transport.bytes_sent.get(group.group_name, 0))
    return sent[1] - sent[0], sent[2] - sent[1]


def test_only_keys_that_are_seen_are_sent(pool: Pool) -> None:
    size, seqlen, key = 4, 256, 2 * 2 * 16 * 4  # two heads, k and v, 16 float32 numbers
    # Everything: each rank's 64 keys to three others
    forward = [one for one, _ in pool.run(count_bytes, size, seqlen, {}, "zigzag")]
    assert forward == [3 * 64 * key] * size
    # Causal, contiguous: rank r is seen by those behind it
    forward = [one for one, _ in pool.run(count_bytes, size, seqlen, {"causal": True}, "contiguous")]
    assert forward == [(size - 1 - rank) * 64 * key for rank in range(size)]
    # Causal, zigzag: the first half goes to all, the second half to the ranks before
    results = pool.run(count_bytes, size, seqlen, {"causal": True}, "zigzag")
    assert [one for one, _ in results] == [3 * 32 * key + rank * 32 * key for rank in range(size)]
    # Backward: the keys again, and a gradient for each key that was received
    received = [3 * 32 * key + (size - 1 - rank) * 32 * key for rank in range(size)]
    assert [two for _, two in results] == [one + back for (one, _), back in zip(results, received, strict=True)]
    # A window of 10: ten keys to the next rank
    results = pool.run(count_bytes, size, seqlen, {"causal": True, "window": (10, 0)}, "contiguous")
    assert [one for one, _ in results] == [10 * key] * 3 + [0]


def count_ulysses_bytes(group: Any) -> list[int]:
    """Sent by this rank in a forward pass without and with lse."""
    q, found = torch.randn(1, 4, 6, 8), []
    for return_lse in (False, True):
        before = transport.bytes_sent.get(group.group_name, 0)
        distributed.ulysses_attention(q, q, q, group=group, seqlen=12, return_lse=return_lse)
        found.append(transport.bytes_sent[group.group_name] - before)
    return found


def test_heads_that_stay_are_not_sent(pool: Pool) -> None:
    """Half of the heads of q, k, v and out; lse only where it is asked for."""
    half = 2 * 6 * 8 * 4
    for sent in pool.run(count_ulysses_bytes, 2):
        assert sent == [4 * half, 4 * half + 2 * 6 * 4]


def run_twice(group: Any) -> list[Tensor]:
    rank = dist.get_rank(group)
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(rank)
        q, k, v = (torch.randn(2, 4, 33, 16, generator=generator).requires_grad_() for _ in range(3))
        out = distributed.ring_attention(q, k, v, group=group, causal=True, transport="p2p", deterministic=True)
        out.square().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    return found[0]


def test_results_repeat_bit_by_bit(pool: Pool) -> None:
    pool.run(run_twice, 4)


# Around other parts of torch


def run_compiled(group: Any, strategy: str) -> None:
    rank = dist.get_rank(group)
    function = {"ring": distributed.ring_attention, "ulysses": distributed.ulysses_attention}.get(
        strategy, distributed.context_attention
    )

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (function(2 * q, k, v, group=group, causal=True, layout="bshd") * 3).square().sum()

    results = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        generator = torch.Generator().manual_seed(rank)
        tensors = [torch.randn(1, 12, 4, 16, generator=generator).requires_grad_() for _ in range(3)]
        value = call(*tensors)
        value.backward()
        results.append([value.detach(), *(tensor.grad for tensor in tensors)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "auto"])
def test_torch_compile(pool: Pool, strategy: str) -> None:
    pool.run(run_compiled, 2, strategy)


def run_compiled_symbolic(group: Any) -> None:
    """One graph for several lengths, with the strategy that the cost model chooses."""

    def whole(x: Tensor) -> Tensor:
        out = distributed.context_attention(2 * x, x, x, group=group, causal=True)
        return distributed.unshard(out, 2, group=group)

    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(whole, backend=count, fullgraph=True, dynamic=True)
    for rows in (13, 14, 15):
        x = torch.randn(1, 4, rows, 16)
        torch.testing.assert_close(compiled(x), whole(x))
    assert len(graphs) == 1


def test_torch_compile_with_symbolic_lengths(pool: Pool) -> None:
    pool.run(run_compiled_symbolic, 2)


def run_second_derivatives(group: Any) -> None:
    whole = torch.randn(1, 4, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def second(attend: Any, x: Tensor) -> Tensor:
        x.requires_grad_()
        (first,) = torch.autograd.grad(attend(x, x, x, causal=True).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    own = distributed.shard(whole, 2, group=group)
    expected = second(functools.partial(flashtile.attention, backend="reference"), whole)
    ulysses = functools.partial(distributed.ulysses_attention, group=group, backend="reference")
    torch.testing.assert_close(second(ulysses, own), distributed.shard(expected, 2, group=group))
    with pytest.raises(flashtile.Unsupported, match="a second derivative of ring attention"):
        second(functools.partial(distributed.ring_attention, group=group, backend="reference"), own)
    with pytest.raises(flashtile.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda x: distributed.ring_attention(x, x, x, group=group), (own,), (own,))


def test_second_derivatives(pool: Pool) -> None:
    pool.run(run_second_derivatives, 2)


def run_compiled_model(group: Any, uses_sdpa: bool) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    x = distributed.shard(torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1)), 1, group=group)
    net, plain = model(uses_sdpa), torch.nn.functional.scaled_dot_product_attention
    with distributed.context_parallel(group=group):
        expected = net(x)
        results = [torch.compile(net, backend="aot_eager", fullgraph=True)(x)]
    assert torch.nn.functional.scaled_dot_product_attention is plain
    try:
        for block in net:
            parallelize_module(block, rank_pool.meshes[2, 1]["ring"], {"": distributed.ContextParallel()})
        results.append(torch.compile(net, backend="aot_eager", fullgraph=True)(x))
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain
    for result in results:
        result.sum().backward()
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("uses_sdpa", [True, False])
def test_compiled_models(pool: Pool, uses_sdpa: bool) -> None:
    pool.run(run_compiled_model, 2, uses_sdpa)


def run_checkpoint_outside(group: Any) -> None:
    """Recomputed outside of the context, attention is another function: torch notices."""
    from torch.utils.checkpoint import CheckpointError, checkpoint

    x = torch.randn(1, 12, 32, requires_grad=True)
    with distributed.context_parallel(group=group):
        out = checkpoint(model(True), x, use_reentrant=False)
        with_backward = checkpoint(model(True), x, use_reentrant=False)
        with_backward.sum().backward()
    with pytest.raises(CheckpointError):
        out.sum().backward()


def run_checkpoint(group: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    def block(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = distributed.ring_attention(q, k, v, group=group, causal=True, dropout_p=0.2)
        return x + out.transpose(1, 2).flatten(2)

    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(3)
        x, w = torch.randn(1, 20, 32), torch.randn(32, 96).requires_grad_()
        torch.manual_seed(4)
        out = checkpoint(block, x, w, use_reentrant=False) if is_checkpointed else block(x, w)
        out.square().sum().backward()
        results.append(w.grad)
    assert torch.equal(*results)


def test_activation_checkpointing(pool: Pool) -> None:
    pool.run(run_checkpoint, 2)
    pool.run(run_checkpoint_outside, 2)


class Block(torch.nn.Module):
    """A layer that knows nothing of ranks; with torch's function or with `distributed.Attention`."""

    def __init__(self, uses_sdpa: bool):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32, bias=False) for _ in range(4))
        self.core = distributed.Attention(causal=True)
        self.uses_sdpa = uses_sdpa

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.uses_sdpa:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = self.core(q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(2))


def model(uses_sdpa: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(uses_sdpa), Block(uses_sdpa))


def trained(net: torch.nn.Module, x: Tensor, total: int) -> Tensor:
    """The loss of this rank's rows after two steps."""
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(2):
        loss = net(x).square().sum() / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return net(x).square().sum() / total


def run_training(group: Any, uses_sdpa: bool) -> tuple[float, float]:
    """Context and tensor parallel on a 2 x 2 mesh, parameters sharded by FSDP2 over the context ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1))
    expected = trained(model(uses_sdpa), x, x.numel()).item()
    mesh = rank_pool.meshes[2, 2]
    net = model(uses_sdpa)
    split = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for block in net:
        parallelize_module(block, mesh["heads"], split)
        parallelize_module(block, mesh["ring"], {"": distributed.ContextParallel(strategy="ring")})
        fully_shard(block, mesh=mesh["ring"])
    fully_shard(net, mesh=mesh["ring"])
    # FSDP2 takes the mean over its ranks; each has the loss of its own rows
    ours = trained(net, distributed.shard(x, 1, mesh=mesh["ring"]), x.numel() // 2)
    dist.all_reduce(ours, group=mesh["ring"].get_group())
    return ours.item() / 2, expected


@pytest.mark.parametrize("uses_sdpa", [True, False])
def test_fsdp_and_tensor_parallel(pool: Pool, uses_sdpa: bool) -> None:
    for ours, expected in pool.run(run_training, 4, uses_sdpa):
        assert ours == pytest.approx(expected, rel=1e-4)


def run_resumed(group: Any) -> None:
    """Saved on two ranks, loaded on one that knows nothing of ranks: training goes on as if it had been alone."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1))
    alone, plain = model(True), torch.nn.functional.scaled_dot_product_attention
    keys = list(alone.state_dict())
    trained(alone, x, x.numel())
    mesh, net = rank_pool.meshes[2, 1]["ring"], model(True)
    try:
        for block in net:
            parallelize_module(block, mesh, {"": distributed.ContextParallel()})
            fully_shard(block, mesh=mesh)
        trained(net, distributed.shard(x, 1, mesh=mesh), x.numel() // 2)
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain
    saved = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    if dist.get_rank(group) == 0:
        assert list(saved) == keys
        resumed = model(True)
        resumed.load_state_dict(saved)
        torch.testing.assert_close(trained(resumed, x, x.numel()), trained(alone, x, x.numel()), rtol=1e-4, atol=1e-6)


def test_a_saved_model_goes_on_alone(pool: Pool) -> None:
    pool.run(run_resumed, 2)


def check_documents_of_a_batch(group: Any) -> None:
    """Each row of the batch has documents of its own."""
    rows = [torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 3, 20, 21], [0, 21])]
    q, k, v = (torch.randn(2, heads, 21, 8, generator=torch.Generator().manual_seed(7)) for heads in (4, 2, 2))
    mine = [distributed.shard(tensor, 2, group=group) for tensor in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    with distributed.context_parallel(group=group, seqlen=21, cu_seqlens=rows):
        out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=True)
        again, lse = distributed.Attention(causal=True, return_lse=True)(*mine)
        assert torch.equal(again, out)
        assert lse.shape == out.shape[:3]
        with pytest.raises(ValueError, match="cu_seqlens: got 2 of them for q of shape"):
            distributed.Attention()(*(tensor[:1] for tensor in mine))
    for row, bounds in enumerate(rows):
        parts = [
            attend(*(tensor[row : row + 1, :, first:end] for tensor in (q, k, v)), is_causal=True, enable_gqa=True)
            for first, end in itertools.pairwise(bounds)
        ]
        expected = distributed.shard(torch.cat(parts, 2), 2, group=group)
        torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-5, atol=1e-5)


def run_context(group: Any) -> None:
    size = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 21, 8, generator=generator) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mine = [distributed.shard(tensor, 2, group=group) for tensor in (q, k, v)]
    with distributed.context_parallel(group=group, seqlen=21):
        out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(distributed.unshard(out, 2, group=group, seqlen=21), expected)
        with pytest.raises(ValueError, match="key: got 2 heads"):
            torch.nn.functional.scaled_dot_product_attention(*mine)
    check_documents_of_a_batch(group)
    assert distributed.current() is None
    assert distributed.position_ids(21, group=group).tolist() == [
        row for rows in Shards(21, size).ranges(dist.get_rank(group)) for row in rows
    ]
    # The gradient of an unsharded row is the sum over the ranks that use it
    x = torch.ones(distributed.position_ids(21, group=group).shape[0], 2, requires_grad=True)
    (distributed.unshard(x, 0, group=group, seqlen=21) * (1 + dist.get_rank(group))).sum().backward()
    assert x.grad.unique().tolist() == [size * (size + 1) / 2]


def test_context_and_helpers(pool: Pool) -> None:
    pool.run(run_context, 3)


# Refusals and failures


def run_refusals(group: Any) -> None:
    q = torch.randn(1, 4, 6, 8)
    ring, ulysses = distributed.ring_attention, distributed.ulysses_attention
    with pytest.raises(ValueError, match="Give seqlen"):
        ring(q, q, q, group=group, seqlen=99)
    with pytest.raises(flashtile.Unsupported, match="3 query heads are not a multiple of 2"):
        ulysses(q[:, :3], q[:, :3], q[:, :3], group=group)
    with pytest.raises(ValueError, match=r"bias: got shape .*accepted: \(batch, heads, this rank's rows, all keys\)"):
        ring(q, q, q, group=group, bias=torch.randn(6, 6))
    with pytest.raises(flashtile.Unsupported, match="alibi_slopes: got 12 queries and 8 keys"):
        ring(q, q[:, :, :4], q[:, :, :4], group=group, alibi_slopes=torch.rand(4))
    with pytest.raises(ValueError, match="sharding: got 'striped'"):
        ring(q, q, q, group=group, sharding="striped")
    with pytest.raises(TypeError, match="is_causal: got an option"):
        ring(q, q, q, group=group, is_causal=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ring(q[0], q[0], q[0], group=group, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="strategy: got 'both'"):
        distributed.context_attention(q, q, q, group=group, strategy="both")
    # Before anything is sent: a message that nobody waits for would be taken for one of the next call
    for attend in (ring, ulysses, distributed.context_attention):
        with pytest.raises(ValueError, match="k: got 3 heads; accepted: a divisor of q's 4 heads"):
            attend(q, q[:, :3], q[:, :3], group=group)
        with pytest.raises(ValueError, match="v: got 2 heads; accepted: 4, as k"):
            attend(q, q, q[:, :2], group=group)
        with pytest.raises(TypeError, match="v: got float64; accepted: float32, as q"):
            attend(q, q, q.double(), group=group)
        with pytest.raises(ValueError, match=r"sinks: got shape \(3,\)"):
            attend(q, q, q, group=group, sinks=torch.zeros(3))
        with pytest.raises(ValueError, match=r"cu_seqlens: got \(0, 9\)"):
            attend(q[0], q[0], q[0], group=group, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))
        with pytest.raises(TypeError, match=r"cu_seqlens: got shape \(2,\) \(int64"):
            attend(q[0], q[0], q[0], group=group, cu_seqlens=torch.tensor([0, 12]))
    with pytest.raises(ValueError, match="total_heads: got 5 with first_head 2 and 4 heads"):
        ring(q, q, q, group=group, first_head=2, total_heads=5)
    with pytest.raises(TypeError, match="mesh: got"):
        ring(q, q, q, mesh=group)
    with pytest.raises(TypeError, match="group: got"):
        ring(q, q, q, group=rank_pool.meshes[2, 1])
    with pytest.raises(ValueError, match="group: got one without this rank"):
        ring(q, q, q, group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="seqlen: got -1"):
        ring(q, q, q, group=group, seqlen=-1)
    with pytest.raises(flashtile.Unsupported, match=r"k: got a DTensor.*Pass k\.to_local"):
        ring(q, torch.distributed.tensor.distribute_tensor(q, rank_pool.meshes[2, 1]["ring"]), q, group=group)
    torch.testing.assert_close(ring(q, q, q, group=group), ulysses(q, q, q, group=group))


def run_different_lengths(group: Any) -> None:
    q = torch.randn(1, 4, 7 + dist.get_rank(group), 8)
    words = "seqlen: got None, 8 queries and 8 keys on rank 1, 7 and 7 on rank 0; accepted: the length of the whole"
    for attend in (distributed.ring_attention, distributed.ulysses_attention):
        with pytest.raises(ValueError, match=words):
            attend(q, q, q, group=group)
        assert attend(q[:, :, :7], q[:, :, :7], q[:, :, :7], group=group).shape[2] == 7
    with pytest.raises(ValueError, match=words):
        distributed.unshard(q, 2, group=group)


def test_ranks_of_different_lengths_must_say_so(pool: Pool) -> None:
    pool.run(run_different_lengths, 2)


def test_refusals(pool: Pool) -> None:
    pool.run(run_refusals, 2)


def test_values_are_compared_over_ranks_under_the_switch_alone() -> None:
    """Reading bounds on a GPU makes the host wait: ulysses_attention exchanges four times a pass."""
    from flashtile.distributed import ulysses

    class Unreadable(NamedTuple):
        cu_seqlens: Tensor

    args: Any = Unreadable(torch.empty(3, dtype=torch.int32, device="meta"))
    no_channel: Any = None
    ulysses._check_same(no_channel, args, torch.empty(1, 2, 3, 4), 1)


def test_functions_of_one_strategy_show_and_check_their_options() -> None:
    ring, ulysses = (
        inspect.signature(one).parameters for one in (distributed.ring_attention, distributed.ulysses_attention)
    )
    assert ring["sharding"].default == "zigzag"
    assert "strategy" not in ring
    assert ring.keys() - ulysses.keys() == {"mask", "bias", "transport"}
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(TypeError, match="transport: got an option that ulysses_attention does not have"):
        distributed.ulysses_attention(q, q, q, transport="p2p")
    with pytest.raises(TypeError, match="strategy: got an option that ring_attention does not have"):
        distributed.ring_attention(q, q, q, strategy="ulysses")


def run_different(group: Any) -> None:
    os.environ["FLASHTILE_CHECK"] = "1"
    try:
        q, rank = torch.randn(1, 4, 6, 8), dist.get_rank(group)
        with pytest.raises(ValueError, match="window_left: got 2 on rank 1; accepted: 1, as on rank 0"):
            distributed.ring_attention(q, q, q, group=group, window=(1 + rank, 0))
        with pytest.raises(ValueError, match="seqlen: got 13 on rank 1"):
            distributed.ulysses_attention(q, q, q, group=group, seqlen=12 + rank)
        with pytest.raises(ValueError, match="function: got ulysses_attention on rank 1; accepted: ring_attention"):
            (distributed.ring_attention, distributed.ulysses_attention)[rank](q, q, q, group=group)
        documents = torch.tensor([0, 4 + rank, 12], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 5, 12\] on rank 1"):
            distributed.ring_attention(q[0], q[0], q[0], group=group, cu_seqlens=documents)
        distributed.ring_attention(q, q, q, group=group, window=(2, 0))
        with pytest.raises(ValueError, match="seqlen: got 13 on rank 1"):
            distributed.unshard(q, 2, group=group, seqlen=12 + rank)
        for function in (distributed.ring_attention, distributed.ulysses_attention):
            options: dict[str, Any] = {"group": group, "seqlen": 12}
            with pytest.raises(ValueError, match="causal: got bottom_right on rank 1; accepted: none, as on rank 0"):
                function(q, q, q, **options, causal=rank == 1)
            with pytest.raises(ValueError, match=r"scale: got 2\.0 on rank 1; accepted: None, as on rank 0"):
                function(q, q, q, **options, scale=2.0 if rank else None)
            with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 5, 12\] on rank 1"):
                function(q[0], q[0], q[0], **options, cu_seqlens=documents)
            wide, deep, double = torch.randn(1, 4, 6, 8 + rank), torch.randn(1 + rank, 4, 6, 8), q.double()
            for tensor, other in ((wide, 9), (deep, 2), (double if rank else q, "float64")):
                with pytest.raises(ValueError, match=rf"got .*{other}.* on rank 1; accepted: .*, as on rank 0"):
                    function(tensor, tensor, tensor, **options)
            leaf = q.clone().requires_grad_()
            loss = function(leaf, leaf, leaf, **options).sum()
            with pytest.raises(
                ValueError, match=r"function: got \w+ on rank 1; accepted: \w+ \(backward\), as on rank 0"
            ):
                function(q, q, q, **options) if rank else loss.backward()
    finally:
        del os.environ["FLASHTILE_CHECK"]


def test_ranks_that_call_differently(pool: Pool) -> None:
    pool.run(run_different, 2)


def run_opcheck(group: Any) -> None:
    from flashtile.distributed import ulysses

    name, utils = group.group_name, ("test_schema", "test_autograd_registration", "test_faketensor")
    q, k = torch.randn(1, 4, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8, requires_grad=True)
    options = (None, "bottom_right", -1, -1, 0.0, 0.0, 0, 0, None, "bhsd", None, name, "zigzag", 12, 12, 1)
    args = (q, k, k, None, None, None, None, None, None, *options, "p2p", 0.0)
    torch.library.opcheck(ring.forward_op, args, test_utils=utils)
    call = (None, None, "none", -1, -1, 0.0, 0.0, 0, 0, None, None, "ulysses_attention")
    place = ("bhsd", name, "zigzag", 12, 0, 2, 0.0, *call)
    torch.library.opcheck(ulysses.rows_to_heads, (q, 4, 1, *place), test_utils=utils)
    torch.library.opcheck(ulysses.rows_to_heads, (k, 2, 2, *place), test_utils=utils)
    wide = torch.randn(1, 2, 12, 8, requires_grad=True)
    torch.library.opcheck(ulysses.heads_to_rows, (wide, 4, 1, *place), test_utils=utils)


def test_opcheck(pool: Pool) -> None:
    pool.run(run_opcheck, 2)


LONG_S = 900  # a rank that another one waits for so long counts as hanging before


def serve_until_one_dies(rank: int, port: int, how: str, name: str, pipe: Any) -> None:
    prepare(rank, 3, port)
    q = torch.randn(1, 3, 8, 8, requires_grad=True)
    attend = {"ring_attention": functools.partial(distributed.ring_attention, transport="p2p")}.get(
        name, distributed.ulysses_attention
    )
    if how == "skips the backward":
        os.environ["FLASHTILE_CHECK"] = "1"
    out = attend(q, q, q, timeout=LONG_S)  # connections are made
    if rank == 2 and how != "hangs":
        os._exit(1)
    if rank == 2:
        time.sleep(LONG_S)
    try:
        out.sum().backward() if how == "skips the backward" else attend(q, q, q, timeout=2)
        pipe.send("no error")
    except distributed.PeerError as error:
        pipe.send(str(error))
    pipe.close()
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("dies", "ring_attention"),
        ("hangs", "ring_attention"),
        ("skips the backward", "ring_attention"),
        ("dies", "ulysses_attention"),
        ("skips the backward", "ulysses_attention"),
    ],
)
def test_a_rank_that_is_gone_is_an_error(how: str, name: str) -> None:
    ctx, port = context(), free_port()
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=serve_until_one_dies, args=(rank, port, how, name, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank in (0, 1):
            assert pipes[rank].poll(LONG_S / 2), f"rank {rank} hangs"
            message = pipes[rank].recv()
            function = f"{name} (backward)" if how == "skips the backward" else name
            assert message.startswith(f"{function}: rank {rank} of 3 could not "), message
            assert f"within {LONG_S if how == 'skips the backward' else 2} s" in message
    finally:
        for process in processes:
            process.kill()


# The plan, without processes


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("seqlen", "size"), [(0, 3), (1, 4), (7, 3), (64, 4), (65, 8)])
def test_every_row_is_held_once(seqlen: int, size: int, sharding: str) -> None:
    shards = Shards(seqlen, size, sharding)
    rows = [row for rank in range(size) for part in shards.ranges(rank) for row in part]
    assert sorted(rows) == list(range(seqlen))
    assert shards.union(range(size)) == ((range(seqlen),) if seqlen else ())


def test_pieces_cover_the_band_once(seed: int) -> None:
    """Any band, drawn; each element by what the op would compute for its piece."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(60):
        seqlen_q, seqlen_k, size = draw(0, 24), draw(0, 24), draw(1, 4)
        left, right, offset = draw(-1, 6), draw(-1, 6), draw(-5, 5)
        band = Band.of(left, right, offset)
        sharding = ("zigzag", "contiguous")[draw(0, 1)]
        for rank in range(size):
            queries = Shards(seqlen_q, size, sharding).ranges(rank)
            seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
            for source in range(size):
                keys = needed(queries, Shards(seqlen_k, size, sharding).ranges(source), band, None)
                q_rows, k_rows = ([row for part in ranges for row in part] for ranges in (queries, keys))
                for piece in pieces(queries, keys, band, None, False, False):
                    off = len(piece.k) - len(piece.q)
                    assert all(side >= -1 for side in piece.window)
                    for i, row in enumerate(piece.q):
                        for j, column in enumerate(piece.k):
                            is_left = piece.window[0] >= 0 and j < i + off - piece.window[0]
                            is_right = piece.window[1] >= 0 and j > i + off + piece.window[1]
                            if not is_left and not is_right:
                                seen[q_rows[row], k_rows[column]] += 1
            expected = torch.zeros_like(seen)
            for i in (row for part in queries for row in part):
                for j in range(seqlen_k):
                    expected[i, j] = band.low <= j - i <= band.high
            assert torch.equal(seen, expected), (seqlen_q, seqlen_k, size, band, sharding)


def test_a_causal_step_is_one_call() -> None:
    """Zigzag: the rank's own keys, those of ranks before and those of ranks behind are one call each."""
    band, shards = Band.of(-1, 0, 0), Shards(64, 4)
    own = shards.ranges(1)
    for source, scores in ((1, 8 * 16 + 8), (0, 16 * 8), (2, 8 * 16), (3, 8 * 16)):
        keys = needed(own, shards.ranges(source), band, None)
        found = pieces(own, keys, band, None, False, False)
        assert len(found) == 1
        assert sum(distributed.cost.num_scores(piece) for piece in found) == scores
        assert num_rows(keys) == (8 if source == 0 else 16)


class OneOfTwo:
    """A channel for questions that need no messages."""

    rank, size = 0, 2

    def __init__(self, *_: Any) -> None: ...

    def check_same(self, options: Any) -> None: ...


def test_small_problems_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for everything, where keys and values are at most 4 MiB."""
    monkeypatch.setattr(ring, "Channel", OneOfTwo)
    rows = (4 << 20) // (2 * 4 * (16 + 16) * 4)  # of each of two ranks, 4 heads, k and v of 16 float32 numbers
    tensors = [torch.empty(1, 4, rows + 1, 16) for _ in range(3)]
    plain: dict[str, Any] = dict.fromkeys(ring.RingArgs._fields)
    plain |= {"causal": "none", "window_left": -1, "window_right": -1, "dropout_p": 0.0, "total_heads": 0}
    plain |= {"layout": "bhsd", "sharding": "zigzag", "merged": 1, "transport": "auto"}

    def args(count: int, **changes: Any) -> Any:
        own = dict(zip(("q", "k", "v"), (tensor[:, :, :count] for tensor in tensors), strict=True))
        return ring.RingArgs(**(plain | own | {"seqlen_q": 2 * count, "seqlen_k": 2 * count} | changes))

    assert ring._Forward(args(rows)).is_gathered
    assert not ring._Forward(args(rows + 1)).is_gathered
    assert not ring._Forward(args(rows, transport="p2p")).is_gathered
    assert ring._Forward(args(rows + 1, transport="gather")).is_gathered


def test_scores_are_counted(seed: int) -> None:
    from flashtile.distributed.cost import _below

    for rows in range(5):
        for columns in range(5):
            for diagonal in range(-6, 7):
                count = sum(j <= i + diagonal for i in range(rows) for j in range(columns))
                assert _below(rows, columns, diagonal) == count


def test_the_cost_model_explains_its_choice() -> None:
    q = torch.empty(1, 32, 16384, 128, dtype=torch.bfloat16, device="meta")
    k = q[:, :8]
    found = distributed.explain_context(q, k, k, num_ranks=8, causal=True, link="infiniband")
    assert found.strategy == "ring"
    assert found.estimates[0].overlap > 0.9
    assert "context_attention over 8 ranks: ring" in str(found)
    slow = distributed.explain_context(
        q[:, :, :4096], k[:, :, :4096], k[:, :, :4096], num_ranks=8, link="ethernet", causal=True
    )
    assert slow.strategy == "ulysses"
    few = distributed.explain_context(q[:, :6], q[:, :6], q[:, :6], num_ranks=4)
    assert few.refusals == {"ulysses": "6 query heads are not a multiple of 4 ranks"}
    # What the caller asks for is what is taken, or nothing
    assert distributed.explain_context(q, k, k, num_ranks=8, strategy="ulysses").strategy == "ulysses"
    assert distributed.explain_context(q, k, k, num_ranks=(8, 1)).strategy == "both"
    for size, words in ((4, {"strategy": "ulysses"}), ((2, 4), {})):
        assert distributed.explain_context(q[:, :6], q[:, :6], q[:, :6], num_ranks=size, **words).strategy == "none"
    for size in (0, "8", (2,), True):
        with pytest.raises(ValueError, match="num_ranks: got"):
            distributed.explain_context(q, k, k, num_ranks=size)


def test_a_strategy_is_chosen_once_for_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.distributed import attention, cost

    q, counted, estimate = torch.empty(1, 8, 48, 16), [], cost.estimate_ring
    monkeypatch.setattr(cost, "estimate_ring", lambda *args: counted.append(args) or estimate(*args))
    cost._faster.cache_clear()
    for rows in (48, 48, 24):
        part = q[:, :, :rows]
        cost.choose(attention._options(part, part, part, 8, attention.Call()), 8)
    assert len(counted) == 2


SLOW_ROWS = 64


class Clock:
    """In place of `time`: it goes on by what a rank sleeps. All ranks do the same, so theirs agree."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_with_slow_calls(group: Any) -> list[simulate.Comparison]:
    """Each call sleeps for its number of scores."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "time", clock)
        patch.setattr(transport, "time", clock)
        for name, seconds, first in (("forward", 0.03, 0), ("backward", 0.06, 2)):
            patch.setattr(ops, name, functools.partial(slowed, clock, getattr(ops, name), seconds, first))
        return simulate.measure(group, SLOW_ROWS, (4.0, 1.0), 3)


def slowed(clock: Clock, function: Any, seconds: float, first: int, *args: Any) -> Any:
    """Takes `seconds` with SLOW_ROWS queries and keys; q is argument `first`, and k comes behind it."""
    q, k = args[first : first + 2]
    clock.sleep(seconds * q.shape[2] * k.shape[2] / SLOW_ROWS**2)
    return function(*args)


def test_a_slow_link_takes_as_long_as_predicted(pool: Pool) -> None:
    """Messages that take 4 times as long as what is computed beside them, and as long: without overlap the latter
    would take 1.5 times as long."""
    runs = pool.run(run_with_slow_calls, 2)[0]
    assert len(runs) == 4
    assert all(0.95 < run.ratio < 1.05 for run in runs), runs


def test_a_complaint_names_the_rank(pool: Pool) -> None:
    (complaint,) = pool.run(measure_spoiled, 3)[0]
    assert complaint.startswith("out: ")
    assert complaint.endswith(" (rank 1 is the farthest off)")


def measure_spoiled(group: Any) -> tuple[str, ...]:
    """Rank 1 gets its output wrong."""
    attend = exactness.attend

    def spoiled(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(*args, **options)
        return (out + 1.0 if dist.get_rank(group) == 1 else out), lse

    exactness.attend = spoiled
    try:
        found = measure(group, "causal", case_inputs("causal", 0), WAYS[0])
        return () if found is None else found.complaints
    finally:
        exactness.attend = attend


def test_a_new_group_of_an_old_name_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: warmed.append(group.group_name))
    device = torch.device("cpu")
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for _ in range(2):
                transport._warm_up(dist.group.WORLD, device)
        finally:
            dist.destroy_process_group()
    assert len(warmed) == 2
    assert warmed[0] == warmed[1]


def test_check_over_ranks(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashtile.cli.main import app

    words = ["distributed", "check", "--ranks", "2", "--seconds", "0", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [one["way"] for one in found] == [
        "ring zigzag p2p",
        "ring contiguous p2p",
        "ring zigzag gather",
        "ulysses zigzag",
    ]
    assert found[0]["sent_keys"] == found[0]["least_keys"] == 70
    table = json.loads((tmp_path / "distributed_exactness.json").read_text())["table"]
    assert table["header"][1:3] == ["out: yardstick", "out: 2"]
    assert table["rows"][0][0] == "plain"
    for bad in (["--device", "tpu"], ["--backend", "nccl"], ["--ranks", "none"]):
        assert CliRunner().invoke(app, ["distributed", "check", *bad]).exit_code == 2


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that need not import torch again, which takes seconds."""
    start = launch.start_processes
    monkeypatch.setattr(launch, "start_processes", lambda *args, **how: start(*args, **{**how, "start_method": "fork"}))


@pytest.mark.usefixtures("forked")
def test_a_rank_that_fails_ends_all() -> None:
    from torch.multiprocessing.spawn import ProcessRaisedException

    with pytest.raises(ProcessRaisedException, match="rank 1 gives up") as caught:
        launch.on_ranks(give_up, 2)
    assert "Process 1 terminated" in str(caught.value)


def give_up(group: Any) -> None:
    if dist.get_rank(group) == 1:
        raise RuntimeError("rank 1 gives up")
    dist.barrier()


@pytest.mark.usefixtures("forked")
def test_ranks_that_do_not_end_are_named() -> None:
    for limit_s in (4, 16, 64, 256):
        with pytest.raises(TimeoutError) as caught:
            launch.on_ranks(hang, 2, limit_s=limit_s)
        said = str(caught.value)
        assert said.startswith(f"2 of 2 ranks had not ended after {limit_s} s")
        waiting, hanging = said.partition("rank 1: ")[::2]
        if "in barrier" in waiting and "in hang" in hanging:
            return
        # On a busy machine they may not have come so far
    pytest.fail(said)


def hang(group: Any) -> None:
    while dist.get_rank(group) == 1:
        time.sleep(0.1)
    dist.barrier()


def test_simulation(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashtile.cli.main import app

    words = ["distributed", "simulate", "--ranks", "8,1024", "--rows", "4096,16384", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    points = json.loads(result.output.splitlines()[-1])
    ring = {(p["link"].split()[0], p["num_ranks"], p["seqlen"]): p for p in points if p["strategy"] == "ring"}
    assert ring["NVLink", 8, 8 * 4096]["overlap"] >= 0.9
    assert ring["InfiniBand,", 8, 8 * 16384]["overlap"] >= 0.9
    assert ring["InfiniBand,", 1024, 1 << 24]["memory_bytes"] < 2.5e9
    written = (tmp_path / "distributed_simulation.csv").read_text().splitlines()
    assert len(written) == 1 + len(points)
    assert (tmp_path / "distributed_simulation.png").stat().st_size > 10_000
    figure = tmp_path / "distributed_simulation.png"
    before = figure.read_bytes()
    figure.unlink()
    distributed_command.redraw(tmp_path / "distributed_simulation.csv")
    assert figure.read_bytes() == before
    bad = CliRunner().invoke(app, ["distributed", "simulate", "--links", "string"])
    assert bad.exit_code == 2


def test_a_trace_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels with a gap, a copy over both, one behind them, and one too short to be of keys."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import trace_ranks

    def event(kind: str, start_us: float, us: float) -> dict[str, Any]:
        return {"name": "", "kind": kind, "stream": 7, "start_us": start_us, "us": us}

    events = [event("compute", 0, 100), event("from host", 50, 100), event("compute", 110, 100)]
    events += [event("from host", 300, 50), event("to host", 0, 10)]
    found = trace_ranks.summary(events)
    assert found == {"from host": {"count": 2, "us": 150, "hidden_us": 90, "hidden_share": 0.6}}
    names = {"Memcpy HtoD (Pinned -> Device)": "from host", "Memcpy DtoH (Device -> Pinned)": "to host"}
    assert {name: trace_ranks.kind(name, "gpu_memcpy") for name in names} == names
    assert trace_ranks.kind("ncclDevKernel_SendRecv", "kernel") == "NCCL"
    path = tmp_path / "trace.json"
    options = {"ranks": 2, "backend": "gloo", "full": False, "rows": 64, "heads": 4, "heads_kv": 2, "head_dim": 32}
    environment = {"device": "a GPU", "torch": "2", "commit": "abc", "is_dirty": False}
    path.write_text(json.dumps({"events": events, "options": options, "environment": environment}))
    assert trace_ranks.draw(path).stat().st_size > 1000


def test_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "long_context.py"
    words = [sys.executable, str(example), "--tokens", "96", "--ranks", "2", "--steps", "1", "--device", "cpu"]
    environment = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "96 tokens" in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if line[:1] == "│"]
    *ranks, losses = rows
    # K and V of a row: 2 tensors of 64 numbers of 4 bytes, half a KiB
    assert [rank[:3] for rank in ranks] == [["alone", "96", "48"], ["0", "48", "24"], ["1", "48", "24"]]
    for *_, before, most, more in ranks:
        if "VmHWM:" in Path("/proc/self/status").read_text():
            assert 0 < float(before) <= float(most)
            assert float(more) == pytest.approx(float(most) - float(before), abs=0.11)
        else:
            assert before == most == more == "not told"
    assert losses[0] == "0"
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-4)
    assert 3 < float(losses[1]) < 6  # log(64) is 4.2
