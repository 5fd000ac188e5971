"""Dropout bits of a tile: Philox, one call for eight neighbouring keys (docs/semantics.md)."""

import triton
import triton.language as tl

# In tiles of at least this many elements every thread has a Philox call of its own
MIN_SHARED_PHILOX_TILE = tl.constexpr(1024)


@triton.jit
def philox_words(rng_state, batch_head, row, key_group):
    """The four Philox words of each row and group of eight neighbouring keys."""
    zero = row * 0 + key_group * 0
    seed, offset = tl.load(rng_state), tl.load(rng_state + 1).to(tl.uint32)
    return tl.philox(seed, key_group + zero, row + zero, batch_head.to(tl.uint32) + zero, offset + zero)


@triton.jit
def dropout_keep(rng_state, origin, b, h, m0, n0, threshold, BLOCK_M, BLOCK_N):
    """True where an element of the tile (queries x keys) is kept.

    `origin` are the indices of the call's first query, key and head in a larger problem, and its heads. The eight keys
    of a group take the low and the high half of words 0 to 3 in turn.
    """
    first_query, first_key, first_head, total_heads = origin
    batch_head = first_head + b * total_heads + h
    m0, n0 = first_query + m0, first_key + n0
    row = (m0 + tl.arange(0, BLOCK_M)).to(tl.uint32)[:, None]
    if BLOCK_M * BLOCK_N >= MIN_SHARED_PHILOX_TILE:
        key_group = (n0 // 8 + tl.arange(0, BLOCK_N // 8)).to(tl.uint32)[None, :]
        word0, word1, word2, word3 = philox_words(rng_state, batch_head, row, key_group)
        # Interleave words 0 to 3, then the halves of each word
        words = tl.join(tl.join(word0, word2), tl.join(word1, word3)).reshape(BLOCK_M, BLOCK_N // 2)
        lanes = tl.join(words & 0xFFFF, words >> 16).reshape(BLOCK_M, BLOCK_N)
    else:
        # One Philox call for each key. Triton 3.6 returned wrong words when a tile had fewer calls than threads
        key = (n0 + tl.arange(0, BLOCK_N)).to(tl.uint32)[None, :]
        word0, word1, word2, word3 = philox_words(rng_state, batch_head, row, key // 8)
        lane = key % 8
        word = tl.where(lane < 4, tl.where(lane < 2, word0, word1), tl.where(lane < 6, word2, word3))
        lanes = tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16)
    return lanes.to(tl.int32) >= threshold
