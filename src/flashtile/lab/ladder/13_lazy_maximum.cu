// 13 lazy maximum: O is rescaled only when a maximum rises much, and full tiles run a loop without a mask.
//
// Changed:   the running maximum stays until a score would exceed 2^8 times the reference; one vote decides for all
//            rows of a warp. Key tiles go from last to first: edge tiles in a loop of their own, then full tiles,
//            whose body has no compare. A warp skips the tiles above its own diagonal. Addresses are a lane's first
//            one, an XOR and a constant; only the last tile checks its rows; the first product of S starts from no
//            registers. That leaves room for tiles of 48 keys at d 128. This is the design of the production kernel,
//            families/fwd_sm80/fwd_sm80.cuh.
// Why:       in 12 a warp spends 64 multiplications on O and 4 exponentials on factors with every tile, though maxima
//            hardly rise after the first tiles; it compares every score, and half of its 1370 instructions a tile
//            compute addresses and bounds.
// Predicted: 640 instructions for a full tile at d 64, of which 80 run only where a maximum rises. 1.4 times as fast as
//            12 at d 64, 1.8 times at d 128, and as fast as the production kernel.
// Measured:  full 0.770 ms and causal 0.443 ms at d 64, 1.54 and 1.51 times as fast as 12; 1.36 and 0.774 ms at d 128,
//            2.1 times as fast. 1.03 to 1.05 times the speed of the production kernel, which also takes every option.
//            The tensor cores are busy for 57 % of the time.
//
// Threads and shared memory: as in 12.
// launch: block_m=128 block_n=(64 if d<=64 else 48 if arch<100 else 32)|16 threads=128
// launch: shared=2*((d+63)//64*64)*(block_m+4*block_n) arch=80 dtype=bf16

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
constexpr int kSteps = kHeadDim / 16;     // products over the head dim
constexpr bool kKeepsQ = kHeadDim <= 64;  // in registers

struct Shared {
  bf16 sQ[kBlockM][kHeadDim];
  bf16 sK[2][kBlockN][kHeadDim];
  bf16 sV[2][kBlockN][kHeadDim];
};
static_assert(kBlockM == kNumThreads && kBlockN % 16 == 0 && sizeof(Shared) == SHARED_BYTES);

constexpr float kSlack = 8.0f;  // a weight is at most 2^8 before its maximum is raised

template <bool kValue_>
struct Constant {
  static constexpr bool kValue = kValue_;
};

__device__ float infinity() { return __int_as_float(0x7f800000); }

// Two neighbouring columns of a row in one word, zeros outside the tensor. Scope: thread.
__device__ unsigned load_two(const bf16* tensor, int row, int column, const Params& p) {
  const bf16* source = tensor + static_cast<size_t>(row) * p.head_dim + column;
  unsigned low = row < p.seqlen && column < p.head_dim ? source[0] : 0;
  unsigned high = row < p.seqlen && column + 1 < p.head_dim ? source[1] : 0;
  return low | high << 16;
}

// Where a row's eight columns from `column` on lie: in chunk c ^ (row % 8) of their 128 bytes. Scope: thread.
__device__ bf16* place(bf16 (*tile)[kHeadDim], int row, int column) { return &tile[row][column ^ row % 8 * 8]; }
__device__ unsigned address_of(bf16 (*tile)[kHeadDim], int row, int column) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place(tile, row, column)));
}

// The address `row` rows and `column` columns behind a lane's first one in a tile, for multiples of 8 and of 16: the
// swizzle of the row does not change, so that one XOR and a constant do. Scope: thread.
__device__ unsigned step_address(unsigned first, int row, int column) {
  return (first ^ column % 64 * 2) + column / 64 * 128 + row * kHeadDim * 2;
}

// Starts copying rows [first, first + kRows) of a tensor to a swizzled tile. Columns of padding are zeros, with
// kHasTail also rows past the last one. A thread copies one column of 16 bytes of rows that are a multiple of 8 apart:
// they have the same swizzle, so that all addresses are its first plus constants. Rows that are not on 16-byte
// boundaries (IS_WIDE is 0) are loaded and stored. (PTX ISA: cp.async) Scope: block.
template <int kRows, bool kHasTail>
__device__ void copy_tile(bf16 (*tile)[kHeadDim], const bf16* tensor, int first, const Params& p) {
  constexpr int kRowStep = kNumThreads / (kHeadDim / 8);
  static_assert(kRowStep % 8 == 0 && kRows % kRowStep == 0);
  int r = threadIdx.x / (kHeadDim / 8), c = threadIdx.x % (kHeadDim / 8) * 8;
  if constexpr (IS_WIDE) {
    unsigned target = address_of(tile, r, c);
    unsigned source = static_cast<unsigned>(first + r) * p.head_dim + c;  // inside of a head
    int column_bytes = c < p.head_dim ? 16 : 0;
#pragma unroll
    for (int step = 0; step < kRows; step += kRowStep) {
      int num_bytes = !kHasTail || first + r + step < p.seqlen ? column_bytes : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + step * kHeadDim * 2),
                   "l"(tensor + source), "r"(num_bytes)
                   : "memory");
      source += kRowStep * p.head_dim;
    }
  } else {
#pragma unroll 1
    for (int row = r; row < kRows; row += kRowStep) {
      *reinterpret_cast<uint4*>(place(tile, row, c)) =
          make_uint4(load_two(tensor, first + row, c, p), load_two(tensor, first + row, c + 2, p),
                     load_two(tensor, first + row, c + 4, p), load_two(tensor, first + row, c + 6, p));
    }
  }
}
// Waits for all of this thread's copies. Scope: thread.
__device__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 matrices of two-byte elements; this lane's address is that of row lane % 8 of matrix lane / 8. After it
// register x holds two columns of row lane / 4 of matrix x. (PTX ISA: ldmatrix) Scope: warp.
__device__ void load_matrices(unsigned (&words)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
// The same of the transposed matrices: two rows of column lane / 4. Scope: warp.
__device__ void load_transposed(unsigned (&words)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
// D += A B: 16 x 16 by 16 x 8. (PTX ISA: mma.m16n8k16) Scope: warp.
__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// D = A B: the first product of a sum, which needs no zeros in registers. Scope: warp.
__device__ void mma_first(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
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

extern "C" __global__ void __launch_bounds__(kNumThreads, 2) lazy_maximum_kernel(const Params p) {
  extern __shared__ __align__(128) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  int num_tiles = (num_keys + kBlockN - 1) / kBlockN;
  int num_full_tiles = (p.is_causal ? min(i_begin + 1, p.seqlen) : p.seqlen) / kBlockN;  // those before have no edge
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32, pair = lane % 4 * 2;
  int row = i_begin + warp_row + lane / 4;  // this lane's first query; the others are 8, 16 and 24 further

  auto copy_keys = [&](int n, auto tail) {
    copy_tile<kBlockN, decltype(tail)::kValue>(shared.sK[n % 2], p.k + head, n * kBlockN, p);
    copy_tile<kBlockN, decltype(tail)::kValue>(shared.sV[n % 2], p.v + head, n * kBlockN, p);
  };
  copy_tile<kBlockM, true>(shared.sQ, p.q + head, i_begin, p);
  copy_keys(num_tiles - 1, Constant<true>());
  unsigned rQ[kKeepsQ ? kSteps : 1][2][4];
  float m[2][2], l[2][2] = {}, rO[2][kHeadDim / 8][4] = {};
#pragma unroll
  for (int t = 0; t < 2; ++t) m[t][0] = m[t][1] = -infinity();
  // This lane's first addresses
  unsigned q_lane = address_of(shared.sQ, warp_row + lane % 16, lane / 16 * 8);
  unsigned k_lane = address_of(shared.sK[0], lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
  unsigned v_lane = address_of(shared.sV[0], lane % 16, lane / 16 * 8);
  // Reads the A operands of Q of one step over the head dim
  auto read_q = [&](int k) {
#pragma unroll
    for (int t = 0; t < 2; ++t) load_matrices(rQ[kKeepsQ ? k : 0][t], step_address(q_lane, 16 * t, 16 * k));
  };

  auto process_tile = [&](int tile, auto edge) {
    constexpr bool kIsEdge = decltype(edge)::kValue;
    // Wait for the tile. All warps are done with the one before: start the next copy into its stage
    copy_wait();
    __syncthreads();
    int stage = tile % 2 * static_cast<int>(sizeof(shared.sK[0])), j_begin = tile * kBlockN;  // stage in bytes
    if (tile > 0) copy_keys(tile - 1, Constant<false>());
    if (kKeepsQ && tile == num_tiles - 1) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) read_q(k);
    }
    // Skip the tile if the whole warp is above the diagonal
    if (kIsEdge && p.is_causal && j_begin > i_begin + warp_row + 31) return;

    // S = Q K^T: 16 keys, 16 columns of K for each ldmatrix
    float rS[2][kBlockN / 8][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (!kKeepsQ) read_q(k);
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n += 2) {
        unsigned rK[4];
        load_matrices(rK, step_address(k_lane + stage, 8 * n, 16 * k));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (k == 0) {
            mma_first(rS[t][n], rQ[0][t], rK[0], rK[1]);
            mma_first(rS[t][n + 1], rQ[0][t], rK[2], rK[3]);
          } else {
            mma(rS[t][n], rQ[kKeepsQ ? k : 0][t], rK[0], rK[1]);
            mma(rS[t][n + 1], rQ[kKeepsQ ? k : 0][t], rK[2], rK[3]);
          }
        }
      }
    }
    // Mask, and take the maxima of the tile
    float tile_max[2][2];
    bool is_risen = false;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int i = row + 16 * t + 8 * r, last = p.is_causal ? min(i, p.seqlen - 1) : p.seqlen - 1;
        float max = -infinity();
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
          for (int x = 2 * r; x < 2 * r + 2; ++x) {
            if (kIsEdge && j_begin + 8 * n + pair + x % 2 > last) rS[t][n][x] = -infinity();
            max = fmaxf(max, rS[t][n][x]);
          }
        }
        tile_max[t][r] = max * p.scale_log2;
        is_risen |= tile_max[t][r] > m[t][r] + kSlack;
      }
    }
    // Raise the maxima of all rows, if one of the warp needs it, and rescale l and O
    if (__any_sync(0xffffffffu, is_risen)) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float m_new = fmaxf(m[t][r], row_max(tile_max[t][r]));
          float alpha = m[t][r] == -infinity() ? 0.0f : exp2_approx(m[t][r] - m_new);
          m[t][r] = m_new;
          l[t][r] *= alpha;
#pragma unroll
          for (int n = 0; n < kHeadDim / 8; ++n) {
            rO[t][n][2 * r] *= alpha;
            rO[t][n][2 * r + 1] *= alpha;
          }
        }
      }
    }
    // P = 2^(S - m), packed; 0 in rows that have seen no key yet
    unsigned rP[2][kBlockN / 16][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float reference = kIsEdge && m[t][r] == -infinity() ? 0.0f : m[t][r];
          float first = exp2_approx(fmaf(rS[t][n][2 * r], p.scale_log2, -reference));
          float second = exp2_approx(fmaf(rS[t][n][2 * r + 1], p.scale_log2, -reference));
          l[t][r] += first + second;
          rP[t][n / 2][n % 2 * 2 + r] = pack(first, second);
        }
      }
    }
    // O += P V: 16 keys, 16 columns of V for each ldmatrix
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        unsigned rV[4];
        load_transposed(rV, step_address(v_lane + stage, 16 * j, 8 * n));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          mma(rO[t][n], rP[t][j], rV[0], rV[1]);
          mma(rO[t][n + 1], rP[t][j], rV[2], rV[3]);
        }
      }
    }
  };
  int tile = num_tiles - 1;
  for (; tile >= num_full_tiles; --tile) process_tile(tile, Constant<true>());
  for (; tile >= 0; --tile) process_tile(tile, Constant<false>());
  // Normalise and store
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int i = row + 16 * t + 8 * r;
      float factor = 1.0f / row_sum(l[t][r]);
      if (i >= p.seqlen) continue;
      bf16* gO = p.o + head + static_cast<size_t>(i) * p.head_dim;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        int c = 8 * n + pair;
        unsigned word = pack(rO[t][n][2 * r] * factor, rO[t][n][2 * r + 1] * factor);
        if (IS_WIDE && c < p.head_dim) *reinterpret_cast<unsigned*>(gO + c) = word;
        if (!IS_WIDE && c < p.head_dim) gO[c] = static_cast<bf16>(word);
        if (!IS_WIDE && c + 1 < p.head_dim) gO[c + 1] = static_cast<bf16>(word >> 16);
      }
    }
  }
}
