// 08 tensor cores: bfloat16 and mma.sync, operands read from shared memory two bytes or four at a time.
//
// Changed:   Q, K, V and O are bfloat16, and products are those of tensor cores: one mma.sync multiplies 16 x 16 by
//            16 x 8 and adds to float32. A warp owns 16 queries; S, P and O stay in its registers, since the result
//            fragment of S, rounded and packed, is the operand fragment of P V. Tiles are loaded as in 04.
// Why:       07 is bound by FMA issue. An mma.sync does 2048 multiply-adds where a warp's FMA does 32.
// Predicted: the tensor cores idle. A B operand of K is two 4-byte loads, whose 8 rows start on the same bank: 8
//            cycles each instead of 1. One of V is four 2-byte loads and two packs. 64 x 64 keys and columns are 64
//            operands of each kind, 64 * (16 + 8) cycles of the shared-memory pipe for 128 products: 5 ms, which
//            would be 55 TFLOP/s.
// Measured:  causal 2.71 ms (51 TFLOP/s) at d 64, full 10.3 ms (53 TFLOP/s) at d 128, on an NVIDIA H200: the predicted
//            55. torch's FlashAttention-2 takes 0.517 and 1.55 ms. The shared-memory pipe is busy for 92 % of the
//            time, 78 % of that with bank conflicts, the tensor cores for 9 %.
//
// Threads: warp w has rows 16 w .. 16 w + 15. Lane l has rows l / 4 and l / 4 + 8 of them, and of every 8 columns of a
// result the two from 2 (l % 4) on.
// Shared memory: sK, sV [kBlockN][kHeadDim]. Q is read from global memory into registers.
// launch: block_m=64 block_n=64|32|16 threads=128 shared=4*block_n*((d+63)//64*64) arch=80 dtype=bf16

using bf16 = unsigned short;  // its bits

struct Params {
  const bf16* q;  // (batch * heads, seqlen, head_dim), contiguous
  const bf16* k;  // the same
  const bf16* v;  // the same
  bf16* o;        // the same
  int seqlen;
  int head_dim;
  float scale_log2;  // softmax scale * log2(e): all exponentials are base 2
  int is_causal;     // query i sees keys 0..i
};

constexpr int kHeadDim = (HEAD_DIM + 63) / 64 * 64;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kNumThreads = NUM_THREADS;
constexpr int kSteps = kHeadDim / 16;  // products over the head dim

struct Shared {
  bf16 sK[kBlockN][kHeadDim];
  bf16 sV[kBlockN][kHeadDim];
};
static_assert(kBlockM == kNumThreads / 2 && kBlockN % 16 == 0 && sizeof(Shared) == SHARED_BYTES);

__device__ float infinity() { return __int_as_float(0x7f800000); }

// Two neighbouring columns of a row in one word, zeros outside the tensor. Scope: thread.
__device__ unsigned load_two(const bf16* tensor, int row, int column, const Params& p) {
  const bf16* source = tensor + static_cast<size_t>(row) * p.head_dim + column;
  unsigned low = row < p.seqlen && column < p.head_dim ? source[0] : 0;
  unsigned high = row < p.seqlen && column + 1 < p.head_dim ? source[1] : 0;
  return low | high << 16;
}

// Loads rows [first, first + kBlockN) of a tensor, eight columns at a time. IS_WIDE: rows start on 16-byte boundaries.
// Scope: block.
__device__ void load_tile(bf16 (*tile)[kHeadDim], const bf16* tensor, int first, const Params& p) {
  for (int index = threadIdx.x; index < kBlockN * kHeadDim / 8; index += kNumThreads) {
    int r = index / (kHeadDim / 8), c = index % (kHeadDim / 8) * 8, row = first + r;
    uint4 words = make_uint4(0, 0, 0, 0);
    if constexpr (IS_WIDE) {
      if (row < p.seqlen && c < p.head_dim)
        words = *reinterpret_cast<const uint4*>(tensor + static_cast<size_t>(row) * p.head_dim + c);
    } else {
      words = make_uint4(load_two(tensor, row, c, p), load_two(tensor, row, c + 2, p), load_two(tensor, row, c + 4, p),
                         load_two(tensor, row, c + 6, p));
    }
    *reinterpret_cast<uint4*>(&tile[r][c]) = words;
  }
}

// D += A B: 16 x 16 by 16 x 8. (PTX ISA: mma.m16n8k16) Scope: warp.
__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to bfloat16, the first in the low half. (PTX ISA: cvt) Scope: thread.
__device__ unsigned pack(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
// 2^x, one instruction. (PTX ISA: ex2) Scope: thread.
__device__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Maximum and sum over the 4 lanes that share a row. Scope: quad.
__device__ float row_max(float x) {
  for (int lanes = 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ float row_sum(float x) {
  for (int lanes = 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) tensor_cores_kernel(const Params p) {
  extern __shared__ __align__(16) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;  // this lane's row and column in a fragment
  int row = i_begin + threadIdx.x / 32 * 16 + group;             // its first query; the other is 8 further

  // Read Q: registers 0 and 1 of an A operand are rows 0 and 8, registers 2 and 3 the same 8 columns further
  unsigned rQ[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int x = 0; x < 4; ++x) rQ[k][x] = load_two(p.q + head, row + x % 2 * 8, 16 * k + x / 2 * 8 + pair, p);
  }
  float m[2] = {-infinity(), -infinity()}, l[2] = {};
  float rO[kHeadDim / 8][4] = {};

  for (int j_begin = 0; j_begin < num_keys; j_begin += kBlockN) {
    // Load K and V when all warps are done with the tiles before
    __syncthreads();
    load_tile(shared.sK, p.k + head, j_begin, p);
    load_tile(shared.sV, p.v + head, j_begin, p);
    __syncthreads();

    // S = Q K^T: a B operand is 8 keys and 16 columns of K, of which a lane has two words of one key
    float rS[kBlockN / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const bf16* words = &shared.sK[8 * n + group][16 * k + pair];
        mma(rS[n], rQ[k], *reinterpret_cast<const unsigned*>(words), *reinterpret_cast<const unsigned*>(words + 8));
      }
    }
    // Mask only the tiles that cross the diagonal or the end
    if (j_begin + kBlockN > p.seqlen || (p.is_causal && j_begin + kBlockN > i_begin + 1)) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          int last = p.is_causal ? min(row + x / 2 * 8, p.seqlen - 1) : p.seqlen - 1;
          rS[n][x] = j_begin + 8 * n + pair + x % 2 <= last ? rS[n][x] : -infinity();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Raise the maximum and rescale l and O
      float tile_max = rS[0][2 * r], sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) tile_max = fmaxf(tile_max, fmaxf(rS[n][2 * r], rS[n][2 * r + 1]));
      float m_new = fmaxf(m[r], row_max(tile_max) * p.scale_log2), alpha = exp2_approx(m[r] - m_new);
      m[r] = m_new;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
        for (int x = 2 * r; x < 2 * r + 2; ++x) {
          rS[n][x] = exp2_approx(fmaf(rS[n][x], p.scale_log2, -m_new));
          sum += rS[n][x];
        }
      }
      l[r] = l[r] * alpha + sum;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        rO[n][2 * r] *= alpha;
        rO[n][2 * r + 1] *= alpha;
      }
    }
    // O += P V: a B operand is 16 keys and 8 columns of V, of which a lane has four keys of one column
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
      unsigned rP[4] = {pack(rS[2 * j][0], rS[2 * j][1]), pack(rS[2 * j][2], rS[2 * j][3]),
                        pack(rS[2 * j + 1][0], rS[2 * j + 1][1]), pack(rS[2 * j + 1][2], rS[2 * j + 1][3])};
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const bf16* first = &shared.sV[16 * j + pair][8 * n + group];
        unsigned b0 = first[0] | static_cast<unsigned>(first[kHeadDim]) << 16;
        unsigned b1 = first[8 * kHeadDim] | static_cast<unsigned>(first[9 * kHeadDim]) << 16;
        mma(rO[n], rP, b0, b1);
      }
    }
  }
  // Normalise and store
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float factor = 1.0f / row_sum(l[r]);
    if (row + 8 * r >= p.seqlen) continue;
    bf16* gO = p.o + head + static_cast<size_t>(row + 8 * r) * p.head_dim;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      int c = 8 * n + pair;
      unsigned word = pack(rO[n][2 * r] * factor, rO[n][2 * r + 1] * factor);
      if (IS_WIDE && c < p.head_dim) *reinterpret_cast<unsigned*>(gO + c) = word;
      if (!IS_WIDE && c < p.head_dim) gO[c] = static_cast<bf16>(word);
      if (!IS_WIDE && c + 1 < p.head_dim) gO[c + 1] = static_cast<bf16>(word >> 16);
    }
  }
}
