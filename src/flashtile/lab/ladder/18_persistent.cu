// 18 persistent: a block for each multiprocessor walks over the query tiles, those with the most keys first.
//
// Changed:   the grid has as many blocks as the GPU has multiprocessors. Each takes every gridDim-th query tile; the
//            producer runs ahead into the next one. Under a causal mask tiles are ordered by length inside sections
//            of 16 heads, whose K and V stay in L2. This is the design of families/fwd_sm90/fwd_sm90.cuh.
// Why:       in 17 a block starts with empty stages and ends with stores, while nothing else runs on its
//            multiprocessor; and the last blocks of a causal grid leave most multiprocessors idle.
// Predicted: prologue and epilogue overlap with products: 1.04 times as fast full, 1.1 causal. At least 0.9 of the
//            production kernel.
// Measured:  full 0.503 ms and causal 0.326 ms at d 64: 1.06 and 1.02 times as fast, 0.97 and 0.82 of the speed of the
//            production kernel. At d 128 0.810 and 0.505 ms, 0.92 and 0.80 of it: production has three consumers
//            there, since P goes through shared memory. Full, the tensor cores are busy for 61 % of the time. Causal,
//            the order of tiles costs most of what the persistent grid saves.
//
// Threads and shared memory: as in 16, and a barrier for an empty Q.
// launch: block_m=(192 if d<=64 else 128) block_n=128 threads=(512 if d<=64 else 384)
// launch: shared=2*((d+63)//64*64)*(block_m+4*block_n)+128 arch=90 last_arch=90 dtype=bf16 maps=1 blocks=1

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
constexpr int kNumConsumers = kBlockM / 64;
constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : 240, kProducerRegisters = kNumConsumers == 3 ? 32 : 24;

struct Shared {
  bf16 sQ[kSlabs][kBlockM][64];
  bf16 sK[2][kSlabs][kBlockN][64];
  bf16 sV[2][kSlabs][kBlockN][64];
  unsigned long long full_q, empty_q, full_k[2], empty_k[2], full_v[2], empty_v[2];
  char padding[48];
};
static_assert(128 * (kNumConsumers + 1) == kNumThreads && kBlockN == 128 && IS_WIDE && sizeof(Shared) == SHARED_BYTES);

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
// Arrives for a warp. Scope: warp.
__device__ void barrier_arrive(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
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
// Changes the number of registers of each thread. (PTX ISA: setmaxnreg) Scope: warpgroup.
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters)); }
__device__ void drop_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters)); }
// The turn of a consumer: barrier 1 + c completes when consumer c waits and the one before it has arrived. (PTX ISA:
// bar) Scope: warpgroup.
__device__ void wait_turn(int consumer) { asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory"); }
__device__ void pass_turn(int consumer) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (consumer + 1) % kNumConsumers) : "memory");
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
// P = 2^(S - m), in place. Scope: thread.
template <bool kIsEdge>
__device__ void exponentiate(float (&rS)[64], Rows& rows, const Params& p) {
#pragma unroll
  for (int x = 0; x < 64; ++x) {
    int r = x / 2 % 2;
    float reference = kIsEdge && rows.m[r] == -infinity() ? 0.0f : rows.m[r];  // a row may have seen no key yet
    rS[x] = exp2_approx(fmaf(rS[x], p.scale_log2, -reference));
    rows.l[r] += rS[x];
  }
}
// Packs P: an accumulator of S has the layout of an operand. Scope: thread.
__device__ void pack_weights(unsigned (&rP)[8][4], const float (&rS)[64]) {
#pragma unroll
  for (int x = 0; x < 32; ++x) rP[x / 4][x % 4] = pack(rS[2 * x], rS[2 * x + 1]);
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

// One query tile: its head, first query and number of key tiles.
struct Work {
  int head, i_begin, num_tiles;
};
// Work item number `index`: tile after tile of a head; under a causal mask the longest of kSection heads first. Scope:
// thread.
constexpr int kSection = 16;
__device__ Work find_work(const MappedParams& params, int index) {
  const Params& p = params.p;
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM, num_heads = params.num_tiles / num_m_blocks;
  int head = index / num_m_blocks, m_block = index % num_m_blocks;
  if (p.is_causal) {
    int first = head / kSection * kSection, size = min(kSection, num_heads - first);
    int rest = index - first * num_m_blocks;
    head = first + rest % size;
    m_block = num_m_blocks - 1 - rest / size;
  }
  int i_begin = m_block * kBlockM, num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  return {head, i_begin, (num_keys + kBlockN - 1) / kBlockN};
}

// Copies Q and all key tiles of each work item, K ahead of V. Scope: one thread.
__device__ void produce(const MappedParams& params, Shared& shared) {
  int count = 0, num_items = 0;  // key tiles and work items so far
  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x, ++num_items) {
    Work work = find_work(params, index);
    barrier_wait(shared.empty_q, num_items % 2 ^ 1);
    barrier_expect(shared.full_q, sizeof(shared.sQ));
    copy_tile(shared.sQ, params.map_q, shared.full_q, work.i_begin, work.head);
    for (int n = work.num_tiles - 1; n >= 0; --n, ++count) {
      // Wait for an empty stage; the first time it is empty already
      int stage = count % 2, parity = count / 2 % 2 ^ 1;
      barrier_wait(shared.empty_k[stage], parity);
      barrier_expect(shared.full_k[stage], sizeof(shared.sK[0]));
      copy_tile(shared.sK[stage], params.map_k, shared.full_k[stage], n * kBlockN, work.head);
      barrier_wait(shared.empty_v[stage], parity);
      barrier_expect(shared.full_v[stage], sizeof(shared.sV[0]));
      copy_tile(shared.sV[stage], params.map_v, shared.full_v[stage], n * kBlockN, work.head);
    }
  }
}

// Computes 64 queries of each work item. Scope: warpgroup.
__device__ void consume(const MappedParams& params, Shared& shared) {
  const Params& p = params.p;
  int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  int count = 0, num_items = 0;  // key tiles and work items so far
  // The first turn is that of consumer 0
  if (warpgroup == kNumConsumers - 1) pass_turn(warpgroup);

  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x, ++num_items) {
    Work work = find_work(params, index);
    int num_full_tiles = (p.is_causal ? min(work.i_begin + 1, p.seqlen) : p.seqlen) / kBlockN;
    Rows rows = {work.i_begin + row};
    rows.m[0] = rows.m[1] = -infinity();
    unsigned rP[8][4];
    barrier_wait(shared.full_q, num_items % 2);
    float rO[kSlabs][32] = {};

    // Softmax of the first tile
    {
      float rS[64];
      barrier_wait(shared.full_k[count % 2], count / 2 % 2);
      start_scores(rS, shared.sQ, 64 * warpgroup, shared.sK[count % 2]);
      wgmma_wait<0>();
      pin(rS);
      barrier_arrive(shared.empty_k[count % 2]);
      if (work.num_tiles == 1) barrier_arrive(shared.empty_q);
      raise_maximum<true>(rS, rows, (work.num_tiles - 1) * kBlockN, p);
      exponentiate<true>(rS, rows, p);
      pack_weights(rP, rS);
    }
    auto process_tile = [&](int n, auto edge) {
      constexpr bool kIsEdge = decltype(edge)::kValue;
      int before = count % 2, before_parity = count / 2 % 2;
      ++count;
      int stage = count % 2;
      // Start S = Q K^T, then O += P V of the tile before
      float rS[64];
      barrier_wait(shared.full_k[stage], count / 2 % 2);
      wait_turn(warpgroup);
      start_scores(rS, shared.sQ, 64 * warpgroup, shared.sK[stage]);
      barrier_wait(shared.full_v[before], before_parity);
      start_output(rO, rP, shared.sV[before]);
      pass_turn(warpgroup);
      // Softmax, while O += P V runs
      wgmma_wait<1>();
      pin(rS);
      barrier_arrive(shared.empty_k[stage]);
      if (n == 0) barrier_arrive(shared.empty_q);
      bool is_risen = raise_maximum<kIsEdge>(rS, rows, n * kBlockN, p);
      exponentiate<kIsEdge>(rS, rows, p);
      wgmma_wait<0>();
      pin_output(rO);
      barrier_arrive(shared.empty_v[before]);
      if (is_risen) rescale(rO, rows);
      pack_weights(rP, rS);
    };
    int n = work.num_tiles - 2;
    for (; n >= num_full_tiles; --n) process_tile(n, Constant<true>());
    for (; n >= 0; --n) process_tile(n, Constant<false>());
    // O += P V of the last tile
    barrier_wait(shared.full_v[count % 2], count / 2 % 2);
    start_output(rO, rP, shared.sV[count % 2]);
    wgmma_wait<0>();
    pin_output(rO);
    barrier_arrive(shared.empty_v[count % 2]);
    ++count;
    store_output(rO, rows, static_cast<size_t>(work.head) * p.seqlen * p.head_dim, p);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    persistent_kernel(const __grid_constant__ MappedParams params) {
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  if (threadIdx.x == 0) {
    barrier_init(shared.full_q, 1);
    barrier_init(shared.empty_q, 4 * kNumConsumers);
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(shared.full_k[stage], 1);
      barrier_init(shared.full_v[stage], 1);
      barrier_init(shared.empty_k[stage], 4 * kNumConsumers);
      barrier_init(shared.empty_v[stage], 4 * kNumConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x / 128 == kNumConsumers) {
    drop_registers();
    if (threadIdx.x % 128 == 0) produce(params, shared);
  } else {
    take_registers();
    consume(params, shared);
  }
}
