// 15 tma: one thread starts the copy of a whole tile, and the copy engine does the rest.
//
// Changed:   K, V and Q come by TMA: a tensor map describes the tensor, one instruction copies a box of it and
//            swizzles on the way. A barrier in shared memory counts the bytes, and the warps wait for its phase.
// Why:       in 14 each thread computes 16 addresses and issues 16 copies a tile, and holds the registers for them.
// Predicted: about 150 of 900 instructions a warp and tile go; copies and products overlapped before, too. 1.05 times
//            as fast.
// Measured:  full 0.757 ms and causal 0.430 ms at d 64: 1.60 and 1.58 times as fast, far more than predicted. The
//            instructions of the copies had nothing to hide under. The tensor cores are busy for 39 % of the time.
//
// Threads: as in 14. Shared memory: sQ [slab][kBlockM][64], sK, sV [stage][slab][kBlockN][64], swizzled; barriers.
// launch: block_m=128 block_n=128 threads=256 shared=2*((d+63)//64*64)*(block_m+4*block_n)+128
// launch: arch=90 last_arch=90 dtype=bf16 maps=1

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
struct alignas(64) TensorMap {
  char bytes[128];
};
struct MappedParams {
  TensorMap map_q;  // (batch * heads, seqlen, head_dim) in boxes of kBlockM rows and 64 columns
  TensorMap map_k;  // in boxes of kBlockN rows
  TensorMap map_v;  // the same
  Params p;
  int num_tiles;  // query tiles of all heads
};

constexpr int kHeadDim = (HEAD_DIM + 63) / 64 * 64;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kNumThreads = NUM_THREADS;
constexpr int kSlabs = kHeadDim / 64;  // of 64 columns, 128 bytes
constexpr float kSlack = 8.0f;         // a weight is at most 2^8 before its maximum is raised

struct Shared {
  bf16 sQ[kSlabs][kBlockM][64];
  bf16 sK[2][kSlabs][kBlockN][64];
  bf16 sV[2][kSlabs][kBlockN][64];
  unsigned long long full_q, full[2];
  char padding[104];
};
static_assert(kBlockM == kNumThreads / 2 && kBlockN == 128 && IS_WIDE && sizeof(Shared) == SHARED_BYTES);

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

// Barriers that count arrivals and bytes. A phase of a barrier has a parity, 0 first. (PTX ISA: mbarrier) Scope:
// thread.
using Barrier = unsigned long long;
__device__ void barrier_init(Barrier& barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(num_arrivals) : "memory");
}
// Arrives; the phase then also waits for so many bytes of copies.
__device__ void barrier_expect(Barrier& barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(num_bytes)
               : "memory");
}
__device__ void barrier_wait(Barrier& barrier, unsigned parity) {
  unsigned is_done = 0;
  while (!is_done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(is_done)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
  }
}
// Starts the copy of kRows rows of a head, 64 columns at a time, swizzled on the way; zeros outside the tensor. The
// barrier counts the bytes. (PTX ISA: cp.async.bulk.tensor) Scope: thread.
template <int kRows>
__device__ void copy_tile(bf16 (*tile)[kRows][64], const TensorMap& map, Barrier& full, int row, int head) {
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(tile[slab])),
        "l"(&map), "r"(shared_address(&full)), "r"(64 * slab), "r"(row), "r"(head)
        : "memory");
  }
}

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
      if (c < p.head_dim) *reinterpret_cast<unsigned*>(gO + c) = word;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) tma_kernel(const __grid_constant__ MappedParams params) {
  const Params& p = params.p;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  int num_tiles = (num_keys + kBlockN - 1) / kBlockN;
  int num_full_tiles = (p.is_causal ? min(i_begin + 1, p.seqlen) : p.seqlen) / kBlockN;  // those before have no edge
  int head = blockIdx.x / num_m_blocks, warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Rows rows = {i_begin + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4};
  rows.m[0] = rows.m[1] = -infinity();

  if (threadIdx.x == 0) {
    barrier_init(shared.full_q, 1);
    barrier_init(shared.full[0], 1);
    barrier_init(shared.full[1], 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  auto copy_keys = [&](int n) {
    if (n < 0 || threadIdx.x != 0) return;
    int stage = (num_tiles - 1 - n) % 2;
    barrier_expect(shared.full[stage], sizeof(shared.sK[0]) + sizeof(shared.sV[0]));
    copy_tile(shared.sK[stage], params.map_k, shared.full[stage], n * kBlockN, head);
    copy_tile(shared.sV[stage], params.map_v, shared.full[stage], n * kBlockN, head);
  };
  if (threadIdx.x == 0) {
    barrier_expect(shared.full_q, sizeof(shared.sQ));
    copy_tile(shared.sQ, params.map_q, shared.full_q, i_begin, head);
  }
  copy_keys(num_tiles - 1);
  unsigned rP[8][4];
  barrier_wait(shared.full_q, 0);
  float rO[kSlabs][32] = {};

  auto process_tile = [&](int n, auto edge) {
    constexpr bool kIsEdge = decltype(edge)::kValue;
    // Wait for the tile. All warps are done with the one before: start the next copy into its stage
    int count = num_tiles - 1 - n, stage = count % 2;
    barrier_wait(shared.full[stage], count / 2 % 2);
    __syncthreads();
    copy_keys(n - 1);
    // S = Q K^T
    float rS[64];
    start_scores(rS, shared.sQ, 64 * warpgroup, shared.sK[stage]);
    wgmma_wait<0>();
    pin(rS);
    // Softmax
    if (raise_maximum<kIsEdge>(rS, rows, n * kBlockN, p)) rescale(rO, rows);
    exponentiate<kIsEdge>(rP, rS, rows, p);
    // O += P V
    start_output(rO, rP, shared.sV[stage]);
    wgmma_wait<0>();
    pin_output(rO);
  };
  int n = num_tiles - 1;
  for (; n >= num_full_tiles; --n) process_tile(n, Constant<true>());
  for (; n >= 0; --n) process_tile(n, Constant<false>());
  store_output(rO, rows, static_cast<size_t>(head) * p.seqlen * p.head_dim, p);
}
