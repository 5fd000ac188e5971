// 12 register reuse: a warp owns 32 queries, so that each fragment of K and V feeds twice as many products.
//
// Changed:   a block has 128 queries, a warp two m16 tiles of them. An ldmatrix of K or V now serves four products
//            instead of two. Q stays in registers at d 64; at d 128 it is read from shared memory with every tile.
// Why:       in 11 an ldmatrix, 4 cycles of the shared-memory pipe, feeds two products, 3.2 cycles of the tensor
//            cores at the rate that mma.sync reaches: shared memory binds, not the products.
// Predicted: cycles of shared memory for each product halve, and so do the bytes from L2. 255 registers and two
//            blocks, 8 warps, on a multiprocessor. 1.2 times as fast.
// Measured:  causal 0.672 ms at d 64, 1.15 times as fast. Full at d 128 2.82 ms, slower than 11: registers leave room
//            for tiles of 16 keys alone. At d 64 cycles of shared memory and bytes from L2 halve, as predicted; the
//            tensor cores are busy for 37 % of the time.
//
// Threads: warp w has rows 32 w .. 32 w + 31, m16 tile t of it rows 16 t on; lanes as in 08.
// Shared memory: sQ [kBlockM][kHeadDim], sK, sV [stage][kBlockN][kHeadDim], swizzled.
// launch: block_m=128 block_n=(16 if d>64 else 64 if arch<100 else 32)|16 threads=128
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

// Starts copying rows [first, first + kRows) of a tensor to a swizzled tile, zeros outside the tensor. Rows that are
// not on 16-byte boundaries (IS_WIDE is 0) are loaded and stored. (PTX ISA: cp.async) Scope: block.
template <int kRows>
__device__ void copy_tile(bf16 (*tile)[kHeadDim], const bf16* tensor, int first, const Params& p) {
#pragma unroll(IS_WIDE ? 4 : 1)
  for (int index = threadIdx.x; index < kRows * kHeadDim / 8; index += kNumThreads) {
    int r = index / (kHeadDim / 8), c = index % (kHeadDim / 8) * 8, row = first + r;
    if constexpr (IS_WIDE) {
      bool is_inside = row < p.seqlen && c < p.head_dim;
      const bf16* source = is_inside ? tensor + static_cast<size_t>(row) * p.head_dim + c : tensor;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(tile, r, c)), "l"(source),
                   "r"(is_inside ? 16 : 0)
                   : "memory");
    } else {
      *reinterpret_cast<uint4*>(place(tile, r, c)) =
          make_uint4(load_two(tensor, row, c, p), load_two(tensor, row, c + 2, p), load_two(tensor, row, c + 4, p),
                     load_two(tensor, row, c + 6, p));
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

extern "C" __global__ void __launch_bounds__(kNumThreads, 2) register_reuse_kernel(const Params p) {
  extern __shared__ __align__(128) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32, pair = lane % 4 * 2;
  int row = i_begin + warp_row + lane / 4;  // this lane's first query; the others are 8, 16 and 24 further

  auto copy_keys = [&](int j_begin) {
    if (j_begin >= num_keys) return;
    copy_tile<kBlockN>(shared.sK[j_begin / kBlockN % 2], p.k + head, j_begin, p);
    copy_tile<kBlockN>(shared.sV[j_begin / kBlockN % 2], p.v + head, j_begin, p);
  };
  copy_tile<kBlockM>(shared.sQ, p.q + head, i_begin, p);
  copy_keys(0);
  unsigned rQ[kKeepsQ ? kSteps : 1][2][4];
  float m[2][2], l[2][2] = {}, rO[2][kHeadDim / 8][4] = {};
#pragma unroll
  for (int t = 0; t < 2; ++t) m[t][0] = m[t][1] = -infinity();
  // Reads the A operands of Q of one step over the head dim
  auto read_q = [&](int k) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
      load_matrices(rQ[kKeepsQ ? k : 0][t],
                    address_of(shared.sQ, warp_row + 16 * t + lane % 16, 16 * k + lane / 16 * 8));
  };

  for (int j_begin = 0; j_begin < num_keys; j_begin += kBlockN) {
    // Wait for the tile. All warps are done with the one before: start the next copy into its stage
    copy_wait();
    __syncthreads();
    int stage = j_begin / kBlockN % 2;
    copy_keys(j_begin + kBlockN);

    // S = Q K^T: 16 keys, 16 columns of K for each ldmatrix
    float rS[2][kBlockN / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (!kKeepsQ || j_begin == 0) read_q(k);
#pragma unroll
      for (int n = 0; n < kBlockN / 8; n += 2) {
        unsigned rK[4];
        load_matrices(rK, address_of(shared.sK[stage], 8 * n + lane / 16 * 8 + lane % 8, 16 * k + lane / 8 % 2 * 8));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          mma(rS[t][n], rQ[kKeepsQ ? k : 0][t], rK[0], rK[1]);
          mma(rS[t][n + 1], rQ[kKeepsQ ? k : 0][t], rK[2], rK[3]);
        }
      }
    }
    // Mask only the tiles that cross the diagonal or the end
    bool is_edge = j_begin + kBlockN > p.seqlen || (p.is_causal && j_begin + kBlockN > i_begin + 1);
    unsigned rP[2][kBlockN / 16][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int i = row + 16 * t + 8 * r, last = p.is_causal ? min(i, p.seqlen - 1) : p.seqlen - 1;
        // Raise the maximum and rescale l and O
        float tile_max = -infinity(), sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
          for (int x = 2 * r; x < 2 * r + 2; ++x) {
            if (is_edge && j_begin + 8 * n + pair + x % 2 > last) rS[t][n][x] = -infinity();
            tile_max = fmaxf(tile_max, rS[t][n][x]);
          }
        }
        float m_new = fmaxf(m[t][r], row_max(tile_max) * p.scale_log2), alpha = exp2_approx(m[t][r] - m_new);
        m[t][r] = m_new;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
          float first = exp2_approx(fmaf(rS[t][n][2 * r], p.scale_log2, -m_new));
          float second = exp2_approx(fmaf(rS[t][n][2 * r + 1], p.scale_log2, -m_new));
          sum += first + second;
          rP[t][n / 2][n % 2 * 2 + r] = pack(first, second);
        }
        l[t][r] = l[t][r] * alpha + sum;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          rO[t][n][2 * r] *= alpha;
          rO[t][n][2 * r + 1] *= alpha;
        }
      }
    }
    // O += P V: 16 keys, 16 columns of V for each ldmatrix
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        unsigned rV[4];
        load_transposed(rV, address_of(shared.sV[stage], 16 * j + lane % 16, 8 * n + lane / 16 * 8));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          mma(rO[t][n], rP[t][j], rV[0], rV[1]);
          mma(rO[t][n + 1], rP[t][j], rV[2], rV[3]);
        }
      }
    }
  }
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
