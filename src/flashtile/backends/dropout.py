"""The dropout bits: Philox4x32-10, the same on every backend, in plain PyTorch.

Element (b, h, i, j) of the score matrix owns one 16-bit lane:

    key     = the 64-bit seed as two 32-bit words, low first
    counter = (j // 8, i, b * heads + h, offset), 32 bits each
    lane    = 16 bits number j % 8 of the four output words, low half of each word first

It is dropped iff lane < threshold. Seed and offset are read on their device, without a host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.problem import AttentionArgs, head_axis

_LANES = 8
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def threshold(dropout_p: float) -> int:
    """Number of the 65536 lane values that drop an element; at most 65535, so that some are kept."""
    return min(round(dropout_p * 65536), 65535)


def keep_factor(dropout_p: float) -> float:
    """The factor of kept values."""
    return 65536 / (65536 - threshold(dropout_p))


def indices(args: AttentionArgs, batch_heads: Tensor, rows: range, columns: range) -> tuple[Tensor, range, range]:
    """Returns the indices of a part of a call, as `keep_mask` takes them: those of the larger problem that the call is
    a part of. `batch_heads` holds indices b * heads + h of the call."""
    if args.total_heads or args.first_head:
        heads = args.q.shape[head_axis(args.layout)]
        total = args.total_heads or heads
        batch_heads = args.first_head + batch_heads // heads * total + batch_heads % heads
    return batch_heads, _shifted(rows, args.first_query), _shifted(columns, args.first_key)


def _shifted(indices: range, first: int) -> range:
    return range(first + indices.start, first + indices.stop)


def keep_mask(rng_state: Tensor, dropout_p: float, batch_heads: Tensor, rows: range, columns: range) -> Tensor:
    """True where kept: (*batch_heads.shape, rows, columns). `batch_heads` holds indices b * heads + h."""
    first, last = columns.start // _LANES, (columns.stop + _LANES - 1) // _LANES
    device = rng_state.device
    groups = torch.arange(first, last, device=device)
    row_numbers = torch.arange(rows.start, rows.stop, device=device)[:, None]
    words = _philox(
        rng_state, (groups, row_numbers, batch_heads.to(torch.int64)[..., None, None], rng_state[1] & _WORD)
    )
    lanes = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    lanes = lanes.flatten(-2)[..., columns.start - first * _LANES : columns.stop - first * _LANES]
    return lanes >= threshold(dropout_p)


def _philox(rng_state: Tensor, counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # 32-bit words are stored in int64 tensors. Their product wraps modulo 2**64, which keeps all of its bits.
    key = [rng_state[0] & _WORD, (rng_state[0] >> 32) & _WORD]
    words = [word.clone() for word in torch.broadcast_tensors(*counter)]
    for _ in range(_ROUNDS):
        product0, product1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        words = [high1 ^ words[1] ^ key[0], product1 & _WORD, high0 ^ words[3] ^ key[1], product0 & _WORD]
        key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
    return tuple(words)
