"""The Numba kernel: one tile of queries per block, a loop over tiles of keys, online softmax. Imported on first use.

A block of 16 x 16 threads owns 16 queries and loops over tiles of 16 keys. Thread (y, x) computes the score of query y
and key x, and holds columns x, x + 16, ... of the output of query y.
Shared memory: sQ, sK, sV [16][d + 1], sP [16][16].
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import cuda, float32

TILE = 16


def kernel_for(head_dim: int) -> Any:
    """The kernel for this head dim, rounded up to whole tiles: shared and local arrays have compile-time sizes."""
    return _kernel(max(1, -(-head_dim // TILE)))


@functools.cache
def _kernel(num_columns: int) -> Any:
    tile, width = TILE, TILE * num_columns + 1  # one float of padding puts 16 rows on different banks

    @cuda.jit
    def fwd_numba_kernel(q, k, v, out, lse, scale, left, right, offset):  # type: ignore[no-untyped-def]
        sQ = cuda.shared.array((tile, width), float32)
        sK = cuda.shared.array((tile, width), float32)
        sV = cuda.shared.array((tile, width), float32)
        sP = cuda.shared.array((tile, tile), float32)
        rO = cuda.local.array(num_columns, float32)
        heads, seqlen_q, head_dim = q.shape[1], q.shape[2], q.shape[3]
        heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]

        # Find this thread's query
        num_m_blocks = (seqlen_q + tile - 1) // tile
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        i = cuda.blockIdx.x % num_m_blocks * tile + y
        rest = cuda.blockIdx.x // num_m_blocks
        b, h = rest // heads, rest % heads
        h_kv = h // (heads // heads_kv)

        # Load Q, with zeros past the end
        for u in range(num_columns):
            c = x + tile * u
            sQ[y, c] = q[b, h, i, c] if i < seqlen_q and c < head_dim else 0.0
            rO[u] = 0.0
        m = float32(-math.inf)
        l = float32(0.0)

        for j_begin in range(0, seqlen_k, tile):
            # Load a tile of K and V
            cuda.syncthreads()
            for u in range(num_columns):
                c = x + tile * u
                sK[y, c] = k[b, h_kv, j_begin + y, c] if j_begin + y < seqlen_k and c < head_dim else 0.0
                sV[y, c] = v[b, h_kv, j_begin + y, c] if j_begin + y < seqlen_k and c < head_dim_v else 0.0
            cuda.syncthreads()
            # Score of query y and key x
            s = float32(0.0)
            for c in range(head_dim):
                s += sQ[y, c] * sK[x, c]
            j = j_begin + x
            distance = i + offset - j
            is_seen = j < seqlen_k and (left < 0 or distance <= left) and (right < 0 or distance >= -right)
            sP[y, x] = s * scale if is_seen else -math.inf
            cuda.syncthreads()
            # Update the row maximum, only if a weight would exceed e: rescaling in every tile would accumulate a
            # rounding error each time. 0 replaces the maximum of a row without keys
            tile_max = sP[y, 0]
            for n in range(1, tile):
                tile_max = max(tile_max, sP[y, n])
            m_new = tile_max if tile_max > m + float32(1.0) else m
            shift = m_new if m_new > -math.inf else float32(0.0)
            alpha = math.exp(m - shift)
            m = m_new
            for u in range(num_columns):
                rO[u] *= alpha
            # Add the tile. Its weights are summed separately first: a sum of short sums rounds less
            total = float32(0.0)
            for n in range(tile):
                weight = math.exp(sP[y, n] - shift)
                total += weight
                for u in range(num_columns):
                    rO[u] += weight * sV[n, x + tile * u]
            l = l * alpha + total

        # Normalise and store; a fully masked row has output 0, lse -inf
        if i < seqlen_q:
            for u in range(num_columns):
                c = x + tile * u
                if c < head_dim_v:
                    out[b, h, i, c] = rO[u] / l if l > 0.0 else 0.0
            if x == 0:
                lse[b, h, i] = m + math.log(l) if l > 0.0 else -math.inf

    return fwd_numba_kernel
