// 14 wgmma: the tensor cores of Hopper read K and V from shared memory themselves.
//
// Changed:   products are those of a warpgroup, 4 warps: one wgmma multiplies 64 x 16 by 16 x 128 or 16 x 64 in
//            shared memory, asynchronously; Q comes from there, too, and P from registers. The copies and their
//            swizzle are as in 11: the layout is the one that wgmma reads. A block has 128 queries, 64 a warpgroup,
//            and 128 keys a tile.
// Why:       mma.sync reaches 62 % of the tensor cores' rate on Hopper, and each warp has to load its operands.
// Predicted: no ldmatrix is left. Each product is waited for, so that tensor cores and exponential units take turns:
//            512 clocks each for 64 queries and 128 keys at d 64, unless another warpgroup fills in. 1.2 times as
//            fast as 13.
// Measured:  full 1.21 ms and causal 0.680 ms at d 64: 0.64 and 0.65 of the speed of 13. With one block of 8 warps
//            that waits for each product nothing runs under the softmax, and a third of the instructions compute
//            addresses. At d 128 1.85 and 1.03 ms, 0.73 and 0.75 of it. The tensor cores, twice as fast as with
//            mma.sync, are busy for 24 % of the time.
//
// Threads: warpgroup g has rows 64 g .. 64 g + 63, warp w of it rows 16 w on; lanes as in 08.
// Shared memory: sQ [slab][kBlockM][64], sK, sV [stage][slab][kBlockN][64], slabs of 64 columns, swizzled.
// launch: block_m=128 block_n=128 threads=256 shared=2*((d+63)//64*64)*(block_m+4*block_n)
// launch: arch=90 last_arch=90 dtype=bf16

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
constexpr int kSlabs = kHeadDim / 64;  // of 64 columns, 128 bytes
constexpr float kSlack = 8.0f;         // a weight is at most 2^8 before its maximum is raised

struct Shared {
  bf16 sQ[kSlabs][kBlockM][64];
  bf16 sK[2][kSlabs][kBlockN][64];
  bf16 sV[2][kSlabs][kBlockN][64];
};
static_assert(kBlockM == kBlockN && kBlockM == kNumThreads / 2 && kBlockN == 128 && sizeof(Shared) == SHARED_BYTES);

template <bool kValue_>
struct Constant {
  static constexpr bool kValue = kValue_;
};

__device__ float infinity() { return __int_as_float(0x7f800000); }
__device__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
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

// Two neighbouring columns of a row in one word, zeros outside the tensor. Scope: thread.
__device__ unsigned load_two(const bf16* tensor, int row, int column, const Params& p) {
  const bf16* source = tensor + static_cast<size_t>(row) * p.head_dim + column;
  unsigned low = row < p.seqlen && column < p.head_dim ? source[0] : 0;
  unsigned high = row < p.seqlen && column + 1 < p.head_dim ? source[1] : 0;
  return low | high << 16;
}

// Starts copying rows [first, first + kBlockN) of a tensor to a swizzled tile: chunk c of row r lies at c ^ (r % 8).
// As in 11. (PTX ISA: cp.async) Scope: block.
__device__ void copy_tile(bf16 (*tile)[kBlockN][64], const bf16* tensor, int first, const Params& p) {
#pragma unroll(IS_WIDE ? 4 : 1)
  for (int index = threadIdx.x; index < kBlockN * kHeadDim / 8; index += kNumThreads) {
    int r = index / (kHeadDim / 8), c = index % (kHeadDim / 8) * 8, row = first + r;
    bf16* target = &tile[c / 64][r][c % 64 ^ r % 8 * 8];
    if constexpr (IS_WIDE) {
      bool is_inside = row < p.seqlen && c < p.head_dim;
      const bf16* source = is_inside ? tensor + static_cast<size_t>(row) * p.head_dim + c : tensor;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
                   "r"(is_inside ? 16 : 0)
                   : "memory");
    } else {
      *reinterpret_cast<uint4*>(target) = make_uint4(load_two(tensor, row, c, p), load_two(tensor, row, c + 2, p),
                                                     load_two(tensor, row, c + 4, p), load_two(tensor, row, c + 6, p));
    }
  }
}
// Waits for all of this thread's copies, and shows them to wgmma. (PTX ISA: fence.proxy.async) Scope: thread.
__device__ void copy_wait() { asm volatile("cp.async.wait_all; fence.proxy.async;" ::: "memory"); }

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
// D += A B^T, or A B^T: 64 rows of Q by 128 rows of K, 16 columns of both, in shared memory. Returns at once. (PTX ISA:
// wgmma.mma_async) Scope: warpgroup.
__device__ void wgmma_qk(float (&d)[64], unsigned long long a, unsigned long long b, bool accumulates) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0; }"
      : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));
}
// D += A B: 64 rows of P, 16 keys, in registers by 64 columns of V in shared memory. Returns at once. Scope: warpgroup.
__device__ void wgmma_pv(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : SIXTEEN(0), SIXTEEN(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups of products are in flight. Scope: warpgroup.
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading results before the wait. No instruction. Scope: thread.
template <int kCount>
__device__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int x = 0; x < kCount; ++x) asm volatile("" : "+f"(values[x])::"memory");
}
__device__ void pin_output(float (&rO)[kSlabs][32]) {
#pragma unroll
  for (int n = 0; n < kSlabs; ++n) pin(rO[n]);
}
// Descriptor of rows of 128 swizzled bytes in shared memory. (PTX ISA: Matrix Descriptor Format) Scope: thread.
__device__ unsigned long long descriptor(const void* rows) {
  return 1ull << 62 | 64ull << 32 | (shared_address(rows) & 0x3ffff) >> 4;
}

// Starts S = Q K^T with a tile of K. Scope: warpgroup.
__device__ void start_scores(float (&rS)[64], const bf16 (*sQ)[kBlockM][64], int row, const bf16 (*sK)[kBlockN][64]) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4 * kSlabs; ++k)
    wgmma_qk(rS, descriptor(&sQ[k / 4][row][k % 4 * 16]), descriptor(&sK[k / 4][0][k % 4 * 16]), k > 0);
  wgmma_commit();
}
// Starts O += P V with a tile of V. Scope: warpgroup.
__device__ void start_output(float (&rO)[kSlabs][32], const unsigned (&rP)[8][4], const bf16 (*sV)[kBlockN][64]) {
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kSlabs; ++n) {
#pragma unroll
    for (int j = 0; j < 8; ++j) wgmma_pv(rO[n], rP[j], descriptor(&sV[n][16 * j][0]));
  }
  wgmma_commit();
}

// What a thread keeps of its two rows of the output, 8 apart.
struct Rows {
  int i;  // the first query
  float m[2], l[2], alpha[2];
};

// Masks a tile, if it is an edge. Raises the maxima of a warp's rows if a weight would exceed 2^kSlack; returns whether
// O must be multiplied by alpha. As in 13. Scope: warp.
template <bool kIsEdge>
__device__ bool raise_maximum(float (&rS)[64], Rows& rows, int j_begin, const Params& p) {
  int pair = threadIdx.x % 4 * 2;
  float tile_max[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int x = 0; x < 64; ++x) {
    float& score = rS[x];
    int r = x / 2 % 2, j = j_begin + x / 4 * 8 + pair + x % 2;
    if (kIsEdge && (j >= p.seqlen || (p.is_causal && j > rows.i + 8 * r))) score = -infinity();
    tile_max[r] = fmaxf(tile_max[r], score);
  }
  tile_max[0] *= p.scale_log2;
  tile_max[1] *= p.scale_log2;
  bool is_risen = tile_max[0] > rows.m[0] + kSlack || tile_max[1] > rows.m[1] + kSlack;
  if (!__any_sync(0xffffffffu, is_risen)) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m_new = fmaxf(rows.m[r], row_max(tile_max[r]));
    rows.alpha[r] = rows.m[r] == -infinity() ? 0.0f : exp2_approx(rows.m[r] - m_new);
    rows.m[r] = m_new;
    rows.l[r] *= rows.alpha[r];
  }
  return true;
}
// P = 2^(S - m), packed: an accumulator of S has the layout of an operand. Scope: thread.
template <bool kIsEdge>
__device__ void exponentiate(unsigned (&rP)[8][4], const float (&rS)[64], Rows& rows, const Params& p) {
#pragma unroll
  for (int x = 0; x < 32; ++x) {
    int r = x % 2;
    float reference = kIsEdge && rows.m[r] == -infinity() ? 0.0f : rows.m[r];  // a row may have seen no key yet
    float first = exp2_approx(fmaf(rS[2 * x], p.scale_log2, -reference));
    float second = exp2_approx(fmaf(rS[2 * x + 1], p.scale_log2, -reference));
    rows.l[r] += first + second;
    rP[x / 4][x % 4] = pack(first, second);
  }
}
__device__ void rescale(float (&rO)[kSlabs][32], const Rows& rows) {
#pragma unroll
  for (int x = 0; x < 32 * kSlabs; ++x) rO[x / 32][x % 32] *= rows.alpha[x / 2 % 2];
}
// Normalises O and stores it. Scope: thread.
__device__ void store_output(const float (&rO)[kSlabs][32], const Rows& rows, size_t head, const Params& p) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float factor = 1.0f / row_sum(rows.l[r]);
    if (rows.i + 8 * r >= p.seqlen) continue;
    bf16* gO = p.o + head + static_cast<size_t>(rows.i + 8 * r) * p.head_dim;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      int c = 8 * n + threadIdx.x % 4 * 2;
      const float* values = rO[n / 8] + n % 8 * 4 + 2 * r;
      unsigned word = pack(values[0] * factor, values[1] * factor);
      if (IS_WIDE && c < p.head_dim) *reinterpret_cast<unsigned*>(gO + c) = word;
      if (!IS_WIDE && c < p.head_dim) gO[c] = static_cast<bf16>(word);
      if (!IS_WIDE && c + 1 < p.head_dim) gO[c + 1] = static_cast<bf16>(word >> 16);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) wgmma_kernel(const Params p) {
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  int num_tiles = (num_keys + kBlockN - 1) / kBlockN;
  int num_full_tiles = (p.is_causal ? min(i_begin + 1, p.seqlen) : p.seqlen) / kBlockN;  // those before have no edge
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Rows rows = {i_begin + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4};
  rows.m[0] = rows.m[1] = -infinity();

  auto copy_keys = [&](int n) {
    if (n < 0) return;
    copy_tile(shared.sK[n % 2], p.k + head, n * kBlockN, p);
    copy_tile(shared.sV[n % 2], p.v + head, n * kBlockN, p);
  };
  copy_tile(shared.sQ, p.q + head, i_begin, p);
  copy_keys(num_tiles - 1);
  unsigned rP[8][4];
  float rO[kSlabs][32] = {};

  auto process_tile = [&](int n, auto edge) {
    constexpr bool kIsEdge = decltype(edge)::kValue;
    // Wait for the tile. All warps are done with the one before: start the next copy into its stage
    copy_wait();
    __syncthreads();
    copy_keys(n - 1);
    // S = Q K^T
    float rS[64];
    start_scores(rS, shared.sQ, 64 * warpgroup, shared.sK[n % 2]);
    wgmma_wait<0>();
    pin(rS);
    // Softmax
    if (raise_maximum<kIsEdge>(rS, rows, n * kBlockN, p)) rescale(rO, rows);
    exponentiate<kIsEdge>(rP, rS, rows, p);
    // O += P V
    start_output(rO, rP, shared.sV[n % 2]);
    wgmma_wait<0>();
    pin_output(rO);
  };
  int n = num_tiles - 1;
  for (; n >= num_full_tiles; --n) process_tile(n, Constant<true>());
  for (; n >= 0; --n) process_tile(n, Constant<false>());
  store_output(rO, rows, head, p);
}
