"""Predictions for many ranks and long sequences, by the cost model, and runs of a few ranks over a slow link to compare
them with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile import ops
from flashtile.distributed.attention import ring_attention
from flashtile.distributed.cost import (
    LINKS,
    PASSES,
    Device,
    Estimate,
    Link,
    Work,
    estimates_of,
    ring_steps,
    ring_times,
)
from flashtile.distributed.launch import on_ranks
from flashtile.distributed.transport import slow_link
from flashtile.problem import AttentionArgs

_GRADS = (True, True, True, False, False)


@dataclass(frozen=True)
class Point:
    """One prediction: a forward and a backward pass of one layer."""

    num_ranks: int
    seqlen: int
    link: str
    strategy: str
    total_s: float
    compute_s: float
    message_s: float
    overlap: float
    sent_bytes: int
    memory_bytes: int  # of one rank: q, k, v, out, their gradients and what the strategy adds


def work(seqlen: int, heads: int, heads_kv: int, head_dim: int, is_causal: bool = True, element_bytes: int = 2) -> Work:
    right = 0 if is_causal else -1
    return Work(1, heads, heads_kv, seqlen, seqlen, head_dim, head_dim, element_bytes, right=right)


def predict(one: Work, num_ranks: int, link: Link, device: Device) -> list[Point]:
    """Every strategy that takes the problem."""
    estimates, _ = estimates_of(one, num_ranks, device, link)
    return [_point(one, num_ranks, link, estimate) for estimate in estimates]


def _point(one: Work, num_ranks: int, link: Link, estimate: Estimate) -> Point:
    rows = -(-one.seqlen_q // num_ranks)
    of_heads = one.heads + one.heads_kv
    plain = 2 * rows * one.batch * of_heads * (one.head_dim + one.head_dim_v) * one.element_bytes
    return Point(
        num_ranks,
        one.seqlen_q,
        link.name,
        estimate.strategy,
        estimate.total_s,
        estimate.compute_s,
        estimate.message_s,
        estimate.overlap,
        estimate.sent_bytes,
        plain + estimate.extra_bytes,
    )


def sweep(
    ranks: Sequence[int],
    rows: Sequence[int],
    links: Sequence[str],
    device: Device,
    heads: int,
    heads_kv: int,
    head_dim: int,
    is_causal: bool = True,
) -> list[Point]:
    """Returns predictions over numbers of ranks, rows of each, and links."""
    return [
        point
        for link in links
        for size in ranks
        for own in rows
        for point in predict(work(own * size, heads, heads_kv, head_dim, is_causal), size, LINKS[link], device)
    ]


# Measured


_LATENCY_S = 1e-3


@dataclass(frozen=True)
class Comparison:
    """A pass over a slow link: what was measured and what the model says, medians of some rounds."""

    op: str
    num_ranks: int
    rows: int
    share: float  # of a message's time in that of the computation it runs beside, forward
    megabytes_per_s: float
    measured_s: float
    predicted_s: float
    compute_s: float  # as predicted
    ratio: float  # of the measured to the predicted time


def compare_with_runs() -> list[Comparison]:
    """`measure` on two ranks of this machine."""
    return on_ranks(measure, 2, 1024, (8.0, 2.0, 1.0, 0.5), 11)


def measure(group: Any, rows: int, shares: Sequence[float], rounds: int) -> list[Comparison]:
    """Ring attention on this CPU, one thread to a rank, over links on which a message takes `shares` times as long as
    the computation of a step; predicted from the time of one local call and of a ring of a few rows.

    The machine may be busy with other things. So each round times a local call before and behind the ring, predicts
    from their mean, and the median of the rounds' ratios counts.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    heads, dim = 4, 64
    one = dataclasses.replace(work(rows * num_ranks, heads, heads, dim, element_bytes=4), right=-1)
    steps = ring_steps(one, num_ranks, rank)
    inputs, few = ([torch.randn(1, heads, count, dim) for _ in range(3)] for count in (rows, 8))
    alone = [_time_local(group, inputs) for _ in range(rounds + 1)][1:]
    # What a step takes beside its call: the least that a ring of few rows took
    short_rings, short_calls = _rings(group, few, 12)[2:], [_time_local(group, few) for _ in range(12)][2:]
    call_s = {
        op: max(0.0, min(one[op] for one in short_rings) / num_ranks - min(one[op] for one in short_calls))
        for op in PASSES
    }
    message_bytes = rows * one.key_bytes
    found = []
    for share in shares:
        # All ranks take the link of rank 0
        speed = torch.tensor([message_bytes / (share * median(times["forward"] for times in alone))])
        dist.broadcast(speed, group=group, group_src=0)
        link = Link("slow", speed.item(), _LATENCY_S)
        samples: dict[str, list[tuple[float, float, float]]] = {op: [] for op in PASSES}
        before = _time_local(group, inputs)
        for _ in range(rounds):
            with slow_link(link.bytes_per_s, link.latency_s):
                (measured,) = _rings(group, inputs, 1)
            behind = _time_local(group, inputs)
            for op, factor in PASSES.items():
                rate = one.score_flops(rows * rows) * factor / ((before[op] + behind[op]) / 2)
                device = Device("this CPU", rate, rate, call_s[op])
                compute, _, total = ring_times(one, steps, device, link, op)
                samples[op].append((measured[op], total, compute))
            before = behind
        for op, values in samples.items():
            measured_s, predicted_s, compute_s = (median(column) for column in zip(*values, strict=True))
            ratio = median(took / expected for took, expected, _ in values)
            times = (measured_s, predicted_s, compute_s, ratio)
            found.append(Comparison(op, num_ranks, rows, share, link.bytes_per_s / 1e6, *times))
    return found


def _rings(group: Any, inputs: Sequence[Tensor], count: int) -> list[dict[str, float]]:
    """Times of both passes over all ranks."""
    found, seqlen = [], inputs[0].shape[2] * dist.get_world_size(group)
    for _ in range(count):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        dist.barrier(group)
        start = time.perf_counter()
        out: Any = ring_attention(*leaves, group=group, seqlen=seqlen, transport="p2p", backend="cpu")
        forward_s = time.perf_counter() - start
        dout = torch.ones_like(out)
        dist.barrier(group)
        start = time.perf_counter()
        out.backward(dout)
        found.append({"forward": forward_s, "backward": time.perf_counter() - start})
    return found


def _time_local(group: Any, inputs: Sequence[Tensor]) -> dict[str, float]:
    """Times of a call on one rank's rows, while the other ranks do the same. As many calls in a row as a ring has
    steps: a busy machine lets a process run that begins, and stops it later."""
    count = dist.get_world_size(group)
    args = AttentionArgs(inputs[0], inputs[1], inputs[2], backend="cpu", out_dtype=torch.float32)
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        out, lse = ops.forward(*args)
    forward_s = time.perf_counter() - start
    dout, args = torch.ones_like(out), args._replace(needs_grad=True)
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        ops.backward(dout, None, *args, out, lse, _GRADS)
    return {"forward": forward_s / count, "backward": (time.perf_counter() - start) / count}
