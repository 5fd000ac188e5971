"""Writes include/flashtile/ptx/wgmma_ops.cuh: one wrapper for each wgmma shape and dtype. `--check` fails if the file is another."""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "src/flashtile/include/flashtile/ptx/wgmma_ops.cuh"
# Keys of a tile for S = Q K^T, and head dims for O = P V
COLUMNS = (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
DTYPES = {"bf16_t": "bf16", "half_t": "f16"}
HEAD = """\
// wgmma.mma_async.sync.aligned.m64nNk16 with float32 accumulators, for every N and dtype in use. Written by tools/make_wgmma.py.
//
// Wgmma<T, N>::ss multiplies A and B from shared memory, ::rs takes A from registers (a 64 x 16 fragment). B is N x 16; kIsTransposed tells
// that it lies in shared memory with N, not K, as its fast axis. d = a b + d, or a b where accumulates is 0. Scope: warpgroup.
// (PTX ISA: wgmma.mma_async)
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

template <typename T, i32 kColumns>
struct Wgmma;
"""


def wrapper(dtype: str, suffix: str, columns: int) -> str:
    count = columns // 2
    names = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{suffix}.{suffix}"

    def body(operands: str, inputs: str, last: int, immediates: str) -> str:
        predicate = f"{{ .reg .pred p; setp.ne.b32 p, %{last}, 0;"
        text = f"{predicate} {shape} {{{names}}}, {operands}, p, {immediates}, %{last + 1}; }}"
        return f'    asm volatile("{text}"\n                 : {outputs}\n                 : {inputs});'

    ss = body(f"%{count}, %{count + 1}", '"l"(a), "l"(b), "r"(accumulates), "n"(kIsTransposed)', count + 2, "1, 1, 0")
    a = ", ".join(f"%{count + i}" for i in range(4))
    rs_inputs = '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulates), "n"(kIsTransposed)'
    rs = body(f"{{{a}}}, %{count + 4}", rs_inputs, count + 5, "1, 1")
    return f"""
template <>
struct Wgmma<{dtype}, {columns}> {{
  template <bool kIsTransposed>
  FT_DEVICE static void ss(float (&d)[{count}], u64 a, u64 b, i32 accumulates) {{
{ss}
  }}
  template <bool kIsTransposed>
  FT_DEVICE static void rs(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, i32 accumulates) {{
{rs}
  }}
}};
"""


def text() -> str:
    wrappers = [wrapper(dtype, suffix, columns) for columns in COLUMNS for dtype, suffix in DTYPES.items()]
    return HEAD + "".join(wrappers) + "\n}  // namespace flashtile\n"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE.name} is not what tools/make_wgmma.py writes: run it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
