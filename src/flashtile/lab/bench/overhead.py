"""Host time of one call: forward without and with grad, and both passes; one repeated shape, and keys that grow by one
at every call. And of a decode step: one query for each sequence of a cache, dense and in pages, without and with new
rows to append."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile import api
from flashtile.lab.bench import timing
from flashtile.lab.bench.points import DTYPES, Inputs, Point
from flashtile.lab.bench.providers import AUTOMATIC, Provider, missing
from flashtile.lab.bench.rows import Environment, OverheadRow
from flashtile.lab.bench.sweep import Refusal, refusing

NUM_ROUNDS, NUM_WARM = 20, 2
NUM_CALLS = 50  # in a round: few enough to fit in the launch queue of a GPU
MODES = ("no_grad", "grad", "fwd+bwd")
CASES = ("repeated", "growing")
DECODE, STEPS = "decode", ("dense", "paged", "append", "append paged")
COLUMNS = (*((mode, case) for mode in MODES for case in CASES), *((DECODE, case) for case in STEPS))
_SMALL_SEQLEN = 64
_BATCH, _HEADS, _HEADS_KV, _CAPACITY, _LENGTH, _PAGE = 4, 8, 2, 512, 500, 16  # of a decode step

Call = tuple[Tensor, Tensor, Tensor]


@dataclass
class Contender:
    """A provider in one case: what it calls, and the seconds of a call in each round."""

    row: OverheadRow
    call: Callable[..., Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    inputs: Inputs | None  # None: the call has its own
    layout: str
    seconds: list[float] = field(default_factory=list)


def rows(
    providers: Sequence[Provider],
    point: Point,
    device: str,
    env: Environment,
    on_step: Callable[[str], None] = lambda name: None,
) -> Iterator[list[OverheadRow]]:
    """For each mode and case a row for each provider."""
    for mode, case in COLUMNS:
        on_step(f"{mode}, {case}")
        yield _measure(providers, point, device, env, mode, case)


def _measure(
    providers: Sequence[Provider], point: Point, device: str, env: Environment, mode: str, case: str
) -> list[OverheadRow]:
    """Interleaved: in every round each provider has its turn."""
    found, contenders = dict[str, OverheadRow](), list[Contender]()
    for provider in providers:
        row = OverheadRow(
            provider.name, provider.is_baseline, mode, case, point.dtype, "refused", "", None, None, None, env
        )
        found[provider.name] = row
        try:
            contenders.append(_build(provider, row, point, device))
        except Refusal as refusal:
            found[provider.name] = replace(row, status=refusal.status, reason=refusal.reason)
    for number in range(NUM_WARM + NUM_ROUNDS):
        for contender in list(contenders):
            try:
                with refusing():
                    contender.seconds.append(_round(contender, number, device))
            except Refusal as refusal:
                found[contender.row.provider] = replace(contender.row, status=refusal.status, reason=refusal.reason)
                contenders.remove(contender)
    for contender in contenders:
        seconds = contender.seconds[NUM_WARM:]
        median, p20, p80 = (timing.quantile(seconds, fraction) * 1e6 for fraction in (0.5, 0.2, 0.8))
        found[contender.row.provider] = replace(contender.row, status="ok", median_us=median, p20_us=p20, p80_us=p80)
    return list(found.values())


def _build(provider: Provider, row: OverheadRow, point: Point, device: str) -> Contender:
    absent = missing(provider)
    if absent is not None:
        raise Refusal("refused", absent)
    if row.mode == DECODE:
        with refusing():
            return _build_step(provider, row, point, device)
    is_growing = row.case == "growing"
    longest = _SMALL_SEQLEN + (NUM_WARM + NUM_ROUNDS) * NUM_CALLS if is_growing else _SMALL_SEQLEN
    small = replace(
        point,
        seqlen_q=1 if is_growing else longest,
        seqlen_k=longest,
        is_causal=point.is_causal and not is_growing,
        has_growing_keys=is_growing,
        direction="fwd" if row.mode == "no_grad" else "fwd+bwd",
    )
    with refusing():
        inputs = small.make(device, seed=0)
        attend = provider.build(small, inputs)
        return Contender(row, attend.call, attend.context, inputs.leaves(provider.layout, False), provider.layout)


def _build_step(provider: Provider, row: OverheadRow, point: Point, device: str) -> Contender:
    """One query for each sequence. What a provider needs beside its call, such as slices of a cache, is made ahead."""
    dtype, dim = DTYPES[point.dtype], point.head_dim
    is_paged, has_new = "paged" in row.case, "append" in row.case

    def make(rows: int, heads: int, layout: str) -> Tensor:
        sizes = (_BATCH, rows, heads, dim) if layout == "bshd" else (_BATCH, heads, rows, dim)
        return torch.randn(sizes, dtype=dtype, device=device)

    layout = "bhsd" if provider.is_baseline else "bshd"
    q, new_k, new_v = make(1, _HEADS, layout), make(1, _HEADS_KV, layout), make(1, _HEADS_KV, layout)
    k, v = make(_CAPACITY, _HEADS_KV, layout), make(_CAPACITY, _HEADS_KV, layout)
    if provider.is_baseline:
        if not provider.name.startswith("sdpa") or is_paged:
            raise Refusal("refused", "decode steps are measured for flashtile, and for torch without pages")
        rows_k, rows_v = k[:, :, : _LENGTH + 1], v[:, :, : _LENGTH + 1]
        last_k, last_v = k[:, :, _LENGTH : _LENGTH + 1], v[:, :, _LENGTH : _LENGTH + 1]

        def attend() -> Tensor:
            if has_new:
                last_k.copy_(new_k)
                last_v.copy_(new_v)
            return F.scaled_dot_product_attention(q, rows_k, rows_v, enable_gqa=True)

        built = provider.build(replace(point, heads=_HEADS, heads_kv=_HEADS_KV), Inputs(q, k, v, q))
        return Contender(row, attend, built.context, None, layout)

    table = torch.arange(_BATCH * _CAPACITY // _PAGE, dtype=torch.int32, device=device).view(_BATCH, -1)
    lengths = torch.full((_BATCH,), _LENGTH if has_new else _LENGTH + 1, dtype=torch.int32, device=device)
    if is_paged:
        k, v = k.view(-1, _PAGE, _HEADS_KV, dim), v.view(-1, _PAGE, _HEADS_KV, dim)
    backend = None if provider is AUTOMATIC else provider.name

    def step() -> Tensor:
        out = api.attention_kvcache(
            *(q, k, v),
            k=new_k if has_new else None,
            v=new_v if has_new else None,
            cache_seqlens=lengths,
            block_table=table if is_paged else None,
            causal=True,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out

    return Contender(row, step, nullcontext, None, layout)


def _calls(contender: Contender, number: int) -> list[Call] | list[tuple[()]]:
    """The inputs of a round. Keys that grow have lengths that no call before has had."""
    if contender.inputs is None:
        return [()] * NUM_CALLS
    q, k, v = contender.inputs.q, contender.inputs.k, contender.inputs.v
    rows_axis, needs_grad = 1 if contender.layout == "bshd" else 2, contender.row.mode != "no_grad"
    first = _SMALL_SEQLEN + 1 + number * NUM_CALLS if contender.row.case == "growing" else None
    lengths = [_SMALL_SEQLEN] * NUM_CALLS if first is None else range(first, first + NUM_CALLS)
    calls = []
    for length in lengths:
        tensors = (q.detach(), k.narrow(rows_axis, 0, length), v.narrow(rows_axis, 0, length))
        calls.append(tuple(tensor.requires_grad_(needs_grad) for tensor in tensors))
    return calls  # type: ignore[return-value]


def _round(contender: Contender, number: int, device: str) -> float:
    """Seconds per call until the host is free again."""
    call, calls = contender.call, _calls(contender, number)
    dout, has_backward = None if contender.inputs is None else contender.inputs.dout, contender.row.mode == "fwd+bwd"
    with contender.context(), torch.set_grad_enabled(contender.row.mode in ("grad", "fwd+bwd")):
        timing.synchronize(device)
        begin = time.perf_counter_ns()
        for inputs in calls:
            out = call(*inputs)
            if has_backward:
                torch.autograd.grad(out, inputs, dout)
        seconds = (time.perf_counter_ns() - begin) / 1e9 / len(calls)
        timing.synchronize(device)
    return seconds
