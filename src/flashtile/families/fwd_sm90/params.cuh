// The arguments of the kernels of the Hopper forward. family.py mirrors the struct.
#pragma once

#include "device/attn/params.cuh"
#include "device/ptx/tma.cuh"

namespace flashtile {

// The maps' axes are (head_dim, rows, heads, batch), of the bias (keys, queries, heads, batch); their boxes have 64
// columns.
struct FwdSm90Params {
  Params base;
  TensorMap q_map;         // boxes of 64 rows; with kPacksHeads of 64 / num_heads rows of num_heads heads
  TensorMap k_map, v_map;  // boxes of kBlockN rows; of pages as PagedKeys says
  TensorMap out_map;       // boxes of 16 rows; used only with kStoresByTma
  TensorMap bias_map;      // boxes of 64 rows and 128 bytes; used only if TMA can read the bias
};

}  // namespace flashtile
