// 09 ldmatrix: one instruction loads four operands, transposed where need be.
//
// Changed:   ldmatrix reads four 8 x 8 matrices, each lane giving the address of one row of 16 bytes, and deals them
//            out as fragments: two B operands of K, or with .trans two of V, which need no packing.
// Why:       in 08 a B operand of K took two loads, one of V four loads of two bytes and two packs.
// Predicted: shared load instructions from 3 for each product to a quarter. Rows of 128 bytes start on one bank, so
//            that the 8 rows of a matrix take 8 cycles, 32 for an ldmatrix where 4 would do: 64 ldmatrix, 2048 cycles
//            for 128 products of each of 4 warps, more than 08's 1536. 5 ms, but for the packs: no gain yet.
// Measured:  causal 2.78 ms at d 64, full 10.7 ms at d 128: 3 % slower, as predicted. The conflicts cost all that the
//            fewer instructions save. Bank conflicts are 84 % of the cycles of the shared-memory pipe, which is busy
//            for 85 % of the time; warps wait for ldmatrix.
//
// Threads and shared memory: as in 08. Lane l gives the address of row l % 8 of matrix l / 8.
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

// The address in shared memory of a row's eight columns from `column` on. Scope: thread.
__device__ unsigned address_of(const bf16 (*tile)[kHeadDim], int row, int column) {
  return static_cast<unsigned>(__cvta_generic_to_shared(&tile[row][column]));
}

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

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) ldmatrix_kernel(const Params p) {
  extern __shared__ __align__(16) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;  // group, pair: row and column in a fragment
  int row = i_begin + threadIdx.x / 32 * 16 + group;                   // its first query; the other is 8 further

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

    // S = Q K^T: 8 keys, 32 columns of K for each ldmatrix
    float rS[kBlockN / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        unsigned rK[4];
        load_matrices(rK, address_of(shared.sK, 8 * n + lane % 8, 16 * k + lane / 8 * 8));
        mma(rS[n], rQ[k], rK[0], rK[1]);
        mma(rS[n], rQ[k + 1], rK[2], rK[3]);
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
    // O += P V: 16 keys, 16 columns of V for each ldmatrix
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
      unsigned rP[4] = {pack(rS[2 * j][0], rS[2 * j][1]), pack(rS[2 * j][2], rS[2 * j][3]),
                        pack(rS[2 * j + 1][0], rS[2 * j + 1][1]), pack(rS[2 * j + 1][2], rS[2 * j + 1][3])};
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        unsigned rV[4];
        load_transposed(rV, address_of(shared.sV, 16 * j + lane % 16, 8 * n + lane / 16 * 8));
        mma(rO[n], rP, rV[0], rV[1]);
        mma(rO[n + 1], rP, rV[2], rV[3]);
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
