"""An independent implementation of the definition, in Python floats, that shares no code with any backend."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flashtile.testing import Case, dropout_mask, run


def rows_of(args, b: int):
    """Functions q(h, i), k(h, j), v(h, j) that return rows of sequence b, and its lengths."""
    swap = (lambda t: t.transpose(-2, -3)) if args.layout == "bshd" else (lambda t: t)
    q, k, v = swap(args.q), swap(args.k), swap(args.v)
    if args.cu_seqlens_q is not None:
        q_first, q_last = args.cu_seqlens_q[b : b + 2].tolist()
        k_first, k_last = args.cu_seqlens_k[b : b + 2].tolist()
        seqlen_q, seqlen_k = q_last - q_first, k_last - k_first
    else:
        q_first, k_first, seqlen_q, seqlen_k = 0, 0, q.shape[2], k.shape[2]
    if args.seqused_k is not None:
        seqlen_k = int(args.seqused_k[b])
    left = 0 if args.leftpad_k is None else int(args.leftpad_k[b])

    def get_q(h: int, i: int):
        return q[h, q_first + i] if args.cu_seqlens_q is not None else q[b, h, i]

    def get_kv(tensor, h: int, j: int):
        if args.block_table is not None:
            size = tensor.shape[2]
            return tensor[int(args.block_table[b, (left + j) // size]), h, (left + j) % size]
        if args.cu_seqlens_q is not None:
            return tensor[h, k_first + left + j]
        return tensor[b, h, left + j]

    return get_q, (lambda h, j: get_kv(k, h, j)), (lambda h, j: get_kv(v, h, j)), seqlen_q, seqlen_k - left


def pick(tensor, b, h, i, j):
    index = [n if size > 1 else 0 for n, size in zip((b, h, i, j), tensor.shape, strict=True)]
    return tensor[tuple(index)].item()


def attend(args, b: int, h: int, i: int, get, keep_bits) -> tuple[list[float], float]:
    """Output row and lse of one query."""
    q, k, v, seqlen_q, seqlen_k = get
    heads = args.q.shape[-2 if args.layout == "bshd" else -3]
    heads_kv = args.k.shape[-2 if args.layout == "bshd" else -3]
    kv_head = h // (heads // heads_kv)
    scale = 1 / math.sqrt(args.q.shape[-1]) if args.scale is None else args.scale
    position = i + (0 if args.causal == "top_left" else seqlen_k - seqlen_q)
    logits = {}
    for j in range(seqlen_k):
        s = scale * sum(x * y for x, y in zip(q(h, i).tolist(), k(kv_head, j).tolist(), strict=True))
        if args.softcap:
            s = args.softcap * math.tanh(s / args.softcap)
        if args.alibi_slopes is not None:
            slope = args.alibi_slopes[h] if args.alibi_slopes.dim() == 1 else args.alibi_slopes[b, h]
            s -= slope.item() * abs(position - j)
        if args.bias is not None:
            s += pick(args.bias, b, h, i, j)
        is_seen = args.mask is None or pick(args.mask, b, h, i, j)
        is_seen = is_seen and (args.causal == "none" or j <= position)
        is_seen = is_seen and (args.window_left < 0 or j >= position - args.window_left)
        is_seen = is_seen and (args.window_right < 0 or j <= position + args.window_right)
        if is_seen and s > -math.inf:
            logits[j] = s
    everything = [*logits.values(), *([] if args.sinks is None else [args.sinks[h].item()])]
    if not everything:
        return [0.0] * args.v.shape[-1], -math.inf
    total = sum(math.exp(s) for s in everything)
    threshold = round(args.dropout_p * 65536)
    out = [0.0] * args.v.shape[-1]
    for j, s in logits.items():
        if keep_bits is None or keep_bits[b, h, i, j]:
            weight = math.exp(s) / total * 65536 / (65536 - threshold)
            out = [o + weight * x for o, x in zip(out, v(kv_head, j).tolist(), strict=True)]
    return out, math.log(total)


CASES = [
    Case(heads=4),
    Case(causal="bottom_right", alibi="bh", bias="hqk"),
    Case(causal="top_left", window=(3, 2), mask="bqk", has_sinks=True),
    Case(window=(2, 1), alibi="h", softcap=1.0, layout="bshd"),
    Case(dropout_p=0.4, has_sinks=True, bias="k", heads=4),
    Case(kind="varlen", batch=4, causal="bottom_right", alibi="h", layout="bshd", bias="bhqk"),
    Case(kind="varlen", batch=4, causal="top_left", dropout_p=0.3),
    Case(kind="used", batch=4, window=(3, 3), has_sinks=True, layout="bshd"),
    Case(kind="paged", batch=4, page_size=3, causal="bottom_right", layout="bshd"),
    Case(kind="paged", batch=3, page_size=4, alibi="bh", softcap=3.0, scale=0.5),
    Case(kind="padded", batch=4, causal="bottom_right", alibi="h"),
]


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_element(case: Case, backend: str, seed: int) -> None:
    case = dataclasses.replace(
        case, dtype=torch.float64, seqlen_q=6, seqlen_k=9, head_dim=3, head_dim_v=2, backend=backend
    )
    inputs = case.make(seed)
    args = inputs.args
    result = run(inputs, has_backward=False)
    out = result.out.transpose(-2, -3) if args.layout == "bshd" else result.out
    bits = None
    if case.dropout_p:
        bits = dropout_mask(args.rng_state, case.dropout_p, case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    count = 0
    for b in range(case.batch):
        get = rows_of(args, b)
        for h in range(case.heads):
            for i in range(get[3]):
                row = (h, int(args.cu_seqlens_q[b]) + i) if args.cu_seqlens_q is not None else (b, h, i)
                expected, lse = attend(args, b, h, i, get, bits)
                torch.testing.assert_close(
                    out[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12
                )
                torch.testing.assert_close(result.lse[row].item(), lse, rtol=1e-10, atol=1e-12)
                count += 1
    assert count == result.lse.numel()
