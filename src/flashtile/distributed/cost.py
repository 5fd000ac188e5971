"""Cost of a call over several ranks: the model that chooses a strategy, that `explain_context` prints, and that
`flashtile distributed simulate` draws.

Compute time is the number of scores of each piece at the measured rate of the kernel (families/speeds.csv), and a fixed
time for each call. A message takes a latency and its bytes at the speed of a link; a link carries one message at a time
in each direction. Ring: step t starts when step t - 1 is done and its keys are there, and the message of step t + 1 is
sent when step t - 1 is done. Ulysses: exchange, compute, exchange, nothing overlapped.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from flashtile.backends.base import Backend
from flashtile.backends.registry import BACKENDS
from flashtile.distributed import ulysses
from flashtile.distributed.pieces import Band, Piece, needed, pieces
from flashtile.distributed.sharding import Shards, num_rows
from flashtile.errors import value_error
from flashtile.families import speeds
from flashtile.plans.arch import MEASURED_ARCH
from flashtile.problem import AttentionArgs, Problem, head_axis

_NOT_EXCHANGED = "a mask or a bias is not exchanged"
PASSES = {"forward": 1.0, "backward": 2.5}  # products of matrices, relative to the forward pass


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection."""

    name: str
    bytes_per_s: float
    latency_s: float


# Nominal speeds of one direction, four fifths of which messages reach
LINKS = {
    "nvlink": Link("NVLink 4, 450 GB/s", 0.8 * 450e9, 5e-6),
    "infiniband": Link("InfiniBand, 400 Gb/s", 0.8 * 50e9, 10e-6),
    "ethernet": Link("Ethernet, 100 Gb/s", 0.8 * 12.5e9, 30e-6),
    "loopback": Link("TCP within one machine", 1.0e9, 100e-6),
}


@dataclass(frozen=True)
class Device:
    """Speed of one rank."""

    name: str
    forward_flops: float  # per second
    backward_flops: float
    call_s: float  # fixed cost of a call, merging its partial result included

    def rate(self, op: str) -> float:
        return self.forward_flops if op == "forward" else self.backward_flops


@dataclass(frozen=True)
class Work:
    """A problem over ranks, without tensors."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    element_bytes: int
    left: int = -1
    right: int = -1
    offset: int = 0
    sharding: str = "zigzag"
    bounds: tuple[int, ...] | None = None
    has_positions: bool = False
    has_dropout: bool = False

    @property
    def band(self) -> Band:
        return Band.of(self.left, self.right, self.offset)

    @property
    def key_bytes(self) -> int:
        """Returns the bytes of one key and value of all heads."""
        return self.batch * self.heads_kv * (self.head_dim + self.head_dim_v) * self.element_bytes

    def score_flops(self, count: int) -> float:
        return 2.0 * self.batch * self.heads * (self.head_dim + self.head_dim_v) * count


@dataclass(frozen=True)
class Estimate:
    """Seconds of both passes on the slowest rank, bytes of the rank that sends most."""

    strategy: str
    compute_s: float
    message_s: float  # of all messages one after the other
    total_s: float
    sent_bytes: int
    extra_bytes: int  # of memory, beside q, k, v, out and their gradients

    @property
    def overlap(self) -> float:
        """The share of the messages' time that is hidden behind computation."""
        if self.message_s <= 0.0:
            return 1.0
        return max(0.0, min(1.0, 1.0 - (self.total_s - self.compute_s) / self.message_s))


def _below(rows: int, columns: int, diagonal: int) -> int:
    """Returns how many (i, j) of a rectangle have j <= i + diagonal."""
    first = max(0, -diagonal)  # the first row that has any
    full = min(max(columns - 1 - diagonal, first), rows)  # the first that has all
    if first >= rows:
        return 0
    rising = full - first
    return rising * (first + diagonal + 1) + rising * (rising - 1) // 2 + (rows - full) * columns


def num_scores(piece: Piece) -> int:
    """The elements of the band that a piece computes."""
    parts = [(length, length) for length in piece.lengths] or [(len(piece.q), len(piece.k))]
    total = 0
    left, right = piece.window
    for rows, columns in parts:
        offset = columns - rows
        upper = rows * columns if right < 0 else _below(rows, columns, offset + right)
        lower = 0 if left < 0 else _below(rows, columns, offset - left - 1)
        total += upper - lower
    return total


def _sampled(size: int) -> list[int]:
    return list(range(size)) if size <= 16 else sorted({0, 1, size // 2, size - 2, size - 1})


@dataclass(frozen=True)
class Step:
    """Work of one rank in a step of the ring."""

    scores: int
    calls: int
    received: int  # keys
    sent: int


def ring_steps(work: Work, size: int, rank: int, merged: int = 1) -> list[Step]:
    def rows(seqlen: int, which: int) -> Any:
        return Shards(seqlen, size * merged, work.sharding).union(range(which * merged, (which + 1) * merged))

    own = rows(work.seqlen_q, rank)
    steps = []
    for step in range(size):
        source, receiver = (rank - step) % size, (rank + step) % size
        keys = rows(work.seqlen_k, source)
        if step:
            keys = needed(own, keys, work.band, work.bounds)
        found = pieces(own, keys, work.band, work.bounds, work.has_positions, work.has_dropout)
        theirs = rows(work.seqlen_q, receiver)
        sent = num_rows(needed(theirs, rows(work.seqlen_k, rank), work.band, work.bounds)) if step else 0
        received = num_rows(keys) if step else 0
        steps.append(Step(sum(map(num_scores, found)), len(found), received, sent))
    return steps


def ring_times(work: Work, steps: list[Step], device: Device, link: Link, op: str) -> tuple[float, float, float]:
    """(compute, messages, total) of one rank in one pass."""

    def compute(step: Step) -> float:
        return work.score_flops(step.scores) * PASSES[op] / device.rate(op) + step.calls * device.call_s

    def message(num_keys: int) -> float:
        return link.latency_s + num_keys * work.key_bytes / link.bytes_per_s if num_keys else 0.0

    done = compute(steps[0])
    before = 0.0  # when the step before the last was done
    arrived = message(max(steps[1].received, steps[1].sent)) if len(steps) > 1 else 0.0
    computing, sending = done, arrived
    returned = 0.0
    for index in range(1, len(steps)):
        # The message of the next step is sent when this one's keys are there
        following = 0.0
        if index + 1 < len(steps):
            following = message(max(steps[index + 1].received, steps[index + 1].sent))
        start = max(done, arrived)
        next_arrived = max(arrived, before if index > 1 else 0.0, returned) + following
        before, done = done, start + compute(steps[index])
        computing += compute(steps[index])
        sending += following
        if op == "backward":
            back = message(max(steps[index].received, steps[index].sent))
            returned = max(done, next_arrived) + back
            sending += back
        arrived = next_arrived
    return computing, sending, max(done, returned)


def estimate_ring(work: Work, size: int, device: Device, link: Link, merged: int = 1) -> Estimate:
    compute = messages = total = 0.0
    sent = 0
    for rank in _sampled(size):
        steps = ring_steps(work, size, rank, merged)
        parts = [ring_times(work, steps, device, link, op) for op in PASSES]
        own = tuple(sum(part[index] for part in parts) for index in range(3))
        if own[2] >= total:
            compute, messages, total = own
        # Forward: keys. Backward: keys, and the gradients of the keys received
        sent = max(sent, sum(2 * step.sent + step.received for step in steps) * work.key_bytes)
    rows = -(-work.seqlen_q // size)
    per_row = work.batch * work.heads
    accumulated = rows * per_row * 4 * max(work.head_dim_v, 2 * work.head_dim)
    # In keys of a rank, backward: messages to send 1.5, slots 3, gradients of a step, to send and received 3; and in
    # float32 the sums of the rank and of the step
    blocks = 7.5 + 2 * max(1.0, 4 / work.element_bytes)
    buffers = int(blocks * -(-work.seqlen_k // size) * work.key_bytes)
    return Estimate("ring", compute, messages, total, sent, accumulated + buffers)


def estimate_ulysses(work: Work, size: int, device: Device, link: Link) -> Estimate:
    whole = (range(work.seqlen_q),), (range(work.seqlen_k),)
    found = pieces(*whole, work.band, work.bounds, work.has_positions, work.has_dropout)
    flops = work.score_flops(sum(map(num_scores, found))) / size
    compute = sum(flops * factor / device.rate(op) + device.call_s for op, factor in PASSES.items())
    heads_kv = size * max(1, work.heads_kv // size)  # with those that several ranks get
    rows_q, rows_k = work.seqlen_q / size, work.seqlen_k / size
    share = (size - 1) / size * work.batch * work.element_bytes
    of_q = rows_q * work.heads * share * (work.head_dim + work.head_dim_v)  # q and out
    of_k = rows_k * heads_kv * share * (work.head_dim + work.head_dim_v)
    # Forward: q, k, v and out; backward: their gradients
    sent = 2 * (of_q + of_k)
    messages = sent / link.bytes_per_s + 8 * link.latency_s if size > 1 else 0.0
    return Estimate("ulysses", compute, messages, compute + messages, int(sent), int((of_q + of_k) * 2))


def estimates_of(
    work: Work, size: int, device: Device, link: Link, has_scores: bool = False
) -> tuple[list[Estimate], dict[str, str]]:
    """The strategies of a group that take the work, the ring first, and why the others do not. `has_scores`: a mask or
    a bias."""
    ring, reason = estimate_ring(work, size, device, link), ulysses.refusal(work.heads, work.heads_kv, size)
    reason = reason or (_NOT_EXCHANGED if has_scores else None)
    return ([ring], {"ulysses": reason}) if reason else ([ring, estimate_ulysses(work, size, device, link)], {})


def estimate_both(work: Work, shape: tuple[int, int], device: Device, link: Link) -> Estimate:
    """A ring of shape[0] over heads exchanged among shape[1]."""
    ring_size, head_size = shape
    share = dataclasses.replace(work, heads=work.heads // head_size, heads_kv=max(1, work.heads_kv // head_size))
    ring = estimate_ring(share, ring_size, device, link, head_size)
    part = dataclasses.replace(work, seqlen_q=work.seqlen_q // ring_size, seqlen_k=work.seqlen_k // ring_size)
    part = dataclasses.replace(part, offset=0, bounds=None)
    heads = estimate_ulysses(part, head_size, device, link)
    messages = ring.message_s + heads.message_s
    total = ring.total_s + heads.message_s
    sent, extra = ring.sent_bytes + heads.sent_bytes, ring.extra_bytes + heads.extra_bytes
    return Estimate("both", ring.compute_s, messages, total, sent, extra)


# From a call


def work_of(given: Any) -> Work:
    """Returns the work that the options of a call (attention.py) ask for."""
    args: AttentionArgs = given.args
    head = head_axis(args.layout)
    has_dropout = False
    if args.dropout_p > 0.0:  # a branch: while torch.compile traces, the comparison may be symbolic
        has_dropout = True
    has_positions = has_dropout or any(value is not None for value in (args.bias, args.mask, args.alibi_slopes))
    is_known = given.cu_seqlens is not None and not is_compiling()
    bounds = tuple(given.cu_seqlens.tolist()) if is_known else None
    batch = args.q.shape[0] if args.q.dim() == 4 else 1
    seqlen_q, seqlen_k = given.seqlen_q, given.seqlen_k
    if is_compiling():
        batch, seqlen_q, seqlen_k = (_power_of_two(size) for size in (batch, seqlen_q, seqlen_k))
    return Work(
        batch=batch,
        heads=_plain(args.q.shape[head]),
        heads_kv=_plain(args.k.shape[head]),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=_plain(args.q.shape[-1]),
        head_dim_v=_plain(args.v.shape[-1]),
        element_bytes=args.q.element_size(),
        left=args.window_left,
        right=args.window_right if args.causal == "none" else 0,
        offset=0 if args.causal == "top_left" else seqlen_k - seqlen_q,
        sharding=given.sharding,
        bounds=bounds,
        has_positions=has_positions,
        has_dropout=has_dropout,
    )


def _plain(size: int) -> int:
    """The number that a symbolic size stands for, by comparisons: torch.compile lets int(size) stay symbolic."""
    if not is_compiling():
        return size
    value = 0
    for bit in range(16, -1, -1):
        if value + (1 << bit) <= size:
            value += 1 << bit
    return value


def _power_of_two(size: int) -> int:
    """The next one, a plain number for a symbolic size: what is chosen for it holds for all sizes in between, so that
    few lengths compile anew."""
    power = 1
    while power < size:
        power *= 2
    return power


def device_of(args: AttentionArgs) -> Device:
    """The rates that were measured for such a call, on a GPU or on a CPU."""
    device = "cpu" if args.q.device.type == "cpu" else "cuda"
    return measured_device(device, args.q.dtype, args.q.shape[-1], args.v.shape[-1])


@functools.cache
def measured_device(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> Device:
    """The GPU of families/speeds.csv for "cuda", this CPU for "cpu", with the rates of the fastest backend."""
    arch = MEASURED_ARCH if device == "cuda" else ""
    batch, heads, length = speeds.LARGE[device]
    shapes = ((batch, heads, length, head_dim),) * 2 + ((batch, heads, length, head_dim_v),)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    args = AttentionArgs(q, k, v, needs_grad=True)
    problem = dataclasses.replace(Problem.of(args), device=device, arch=arch)
    rates = {}
    for op, factor in PASSES.items():
        times = [time for backend in _backends(device) if (time := _time_us(backend, problem, op)) is not None]
        flops = 2.0 * batch * heads * (head_dim + head_dim_v) * length * length * factor
        rates[op] = flops / (min(times) * 1e-6) if times else _UNMEASURED[device]
    call_s = 30e-6 if device == "cuda" else 200e-6
    name = f"NVIDIA H200 ({arch})" if device == "cuda" else "this CPU"
    return Device(name, rates["forward"], rates["backward"], call_s)


_UNMEASURED = {"cuda": 100e12, "cpu": 20e9}


def _backends(device: str) -> list[Backend]:
    return [backend for backend in BACKENDS if device in backend.devices and backend.is_automatic]


def _time_us(backend: Backend, problem: Problem, op: str) -> float | None:
    return backend.time_us(problem, op) if backend.refuse(problem, op) is None else None


def default_link(device_type: str, size: int) -> Link:
    """Returns NVLink for up to 8 GPUs, InfiniBand for more, TCP for CPUs."""
    if device_type == "cpu":
        return LINKS["loopback"]
    return LINKS["nvlink" if size <= 8 else "infiniband"]


def named_link(link: str | Link | None, args: AttentionArgs, size: int) -> Link:
    if link is None:
        return default_link(args.q.device.type, size)
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise value_error("link", repr(link), ", ".join(map(repr, LINKS)) + ", or a Link")
    return LINKS[link]


@dataclass(frozen=True)
class ContextExplanation:
    """The strategies of a call, what each would cost, and which is taken."""

    size: tuple[int, int]
    device: Device
    link: Link
    estimates: tuple[Estimate, ...]
    refusals: dict[str, str]
    strategy: str

    def __str__(self) -> str:
        ring, heads = self.size
        ranks = f"{ring} ranks" if heads == 1 else f"{ring} x {heads} ranks"
        lines = [
            f"context_attention over {ranks}: {self.strategy}",
            f"  {self.device.name}: {self.device.forward_flops / 1e12:.3g} TFLOP/s forward, "
            f"{self.device.backward_flops / 1e12:.3g} backward; {self.link.name}",
            f"  {'strategy':10}{'total ms':>10}{'compute ms':>12}{'messages ms':>13}{'overlap':>9}{'sent MB':>9}"
            f"{'extra MB':>10}",
        ]
        for one in self.estimates:
            lines.append(
                f"  {one.strategy:10}{1e3 * one.total_s:10.3f}{1e3 * one.compute_s:12.3f}{1e3 * one.message_s:13.3f}"
                f"{one.overlap:9.0%}{one.sent_bytes / 1e6:9.1f}{one.extra_bytes / 1e6:10.1f}"
            )
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


def compare(given: Any, shape: tuple[int, int], link: str | Link | None, strategy: str) -> ContextExplanation:
    """strategy: what the caller asked for; "auto" = the fastest."""
    work, device = work_of(given), device_of(given.args)
    size = shape[0] * shape[1]
    own_link = named_link(link, given.args, size)
    has_scores = given.args.bias is not None or given.args.mask is not None
    if strategy == "both":
        reason = ulysses.refusal(work.heads, work.heads_kv, shape[1]) or (_NOT_EXCHANGED if has_scores else None)
        estimates = [] if reason else [estimate_both(work, shape, device, own_link)]
        refusals = {"both": reason} if reason else {}
    else:
        estimates, refusals = estimates_of(work, size, device, own_link, has_scores)
    best = min(estimates, key=lambda one: one.total_s).strategy if strategy == "auto" else strategy
    taken = "none" if best in refusals else best
    return ContextExplanation(shape, device, own_link, tuple(estimates), refusals, taken)


_NUMBERS = tuple(field.name for field in dataclasses.fields(Work))


def choose(given: Any, size: int) -> str:
    """Chooses a strategy. Every rank must choose alike: nothing but what they share is looked at. While torch.compile
    traces, the bounds of documents are not known, and sizes are rounded up."""
    args: AttentionArgs = given.args
    if args.bias is not None or args.mask is not None:
        return "ring"
    work = work_of(given)
    numbers = [getattr(work, name) for name in _NUMBERS]  # torch 2.10 cannot trace astuple
    return _choice(*numbers, args.q.device.type, args.q.dtype, size)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choice(*values: Any) -> str:
    return _faster(*values)


@functools.lru_cache(maxsize=256)  # 3 ms for 8 ranks, which every layer would pay
def _faster(*values: Any) -> str:
    *numbers, device_type, dtype, size = values
    work = Work(*numbers)
    device = measured_device("cpu" if device_type == "cpu" else "cuda", dtype, work.head_dim, work.head_dim_v)
    link = default_link(device_type, size)
    estimates, _ = estimates_of(work, size, device, link)
    return min(estimates, key=lambda one: one.total_s).strategy
