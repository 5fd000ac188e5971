// What the GPU can do at best: FMA in registers, products on tensor cores, 16-byte reads of shared memory without
// conflicts, 16-byte reads of L2. The measured roofs of a roofline.
//
// Threads: any number of blocks of NUM_THREADS; each thread does num_rounds rounds of NUM_FMAS FMA, of NUM_PRODUCTS
// products of its warp or warpgroup, or of NUM_READS reads.
#if HAS_WGMMA
#include "device/ptx/wgmma.cuh"
#elif HAS_TENSOR
#include "device/ptx/mma_sync.cuh"
#endif

struct Params {
  float* out;            // (1,), never written: its store only keeps the work from being removed
  const float4* source;  // (source_size,), for reads of L2
  int source_size;
  int num_rounds;
};

constexpr int kNumThreads = NUM_THREADS, kFmas = NUM_FMAS, kReads = NUM_READS, kChains = 16;

// Many independent chains, so that the latency of one is hidden by the others
extern "C" __global__ void __launch_bounds__(kNumThreads) fma_kernel(const Params p) {
  float x[kChains];
#pragma unroll
  for (int c = 0; c < kChains; ++c) x[c] = static_cast<float>(threadIdx.x + c);
  float a = 1.0f + 1e-7f * blockIdx.x, b = 1e-9f * threadIdx.x;
#pragma unroll 1
  for (int round = 0; round < p.num_rounds; ++round) {
#pragma unroll
    for (int n = 0; n < kFmas / kChains; ++n) {
#pragma unroll
      for (int c = 0; c < kChains; ++c) x[c] = fmaf(x[c], a, b);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChains; ++c) sum += x[c];
  if (sum == -1.0f) *p.out = sum;
}

// A warp reads 512 consecutive bytes with each instruction
extern "C" __global__ void __launch_bounds__(kNumThreads) shared_read_kernel(const Params p) {
  __shared__ float4 shared[kNumThreads + kReads];
  for (int index = threadIdx.x; index < kNumThreads + kReads; index += kNumThreads)
    shared[index] = make_float4(index, 1.0f, 2.0f, 3.0f);
  __syncthreads();
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int first = threadIdx.x;
#pragma unroll 1
  for (int round = 0; round < p.num_rounds; ++round) {
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
      float4 x;
      unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&shared[first + n]));
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                   : "r"(address));
      sum.x += x.x;
    }
  }
  if (sum.x == -1.0f) *p.out = sum.x;
}

// Every block reads the whole source, kReads 16-byte words of a thread at a time, past L1
extern "C" __global__ void __launch_bounds__(kNumThreads) l2_read_kernel(const Params p) {
  float sum = 0.0f;
  int stride = gridDim.x * kNumThreads, at = blockIdx.x * kNumThreads + threadIdx.x;
#pragma unroll 1
  for (int round = 0; round < p.num_rounds; ++round) {
    float4 x[kReads];
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[n].x), "=f"(x[n].y), "=f"(x[n].z), "=f"(x[n].w)
                   : "l"(p.source + at));
      at += stride;
      at -= at >= p.source_size ? p.source_size : 0;
    }
#pragma unroll
    for (int n = 0; n < kReads; ++n) sum += x[n].x;
  }
  if (sum == -1.0f) *p.out = sum;
}

#if HAS_TENSOR
constexpr int kProducts = NUM_PRODUCTS;

// Operands of about normal size: the clock of a tensor core depends on how many bits toggle
__device__ unsigned operand(unsigned index) {
  unsigned x = index * 2654435761u;
  x ^= x >> 15;
  return (x & 0x807f807fu) | 0x3f003f00u;  // two bfloat16 with magnitudes from 0.5 to 1
}

// The largest product of the architecture: wgmma on 64 x 256 x 16, else mma.sync on 16 x 8 x 16
extern "C" __global__ void __launch_bounds__(kNumThreads) tensor_kernel(const Params p) {
  using namespace flashtile;
#if HAS_WGMMA
  __shared__ __align__(1024) unsigned tile[320 * 32];  // A: 64 rows of 128 bytes, B: 256
  for (int index = threadIdx.x; index < 320 * 32; index += kNumThreads) tile[index] = operand(index);
  fence_proxy_async();
  __syncthreads();
  float d[128] = {};
  u32 a = tile_base(tile, 64 * 128), b = tile_base(tile + 64 * 32, 256 * 128);
#pragma unroll 1
  for (int round = 0; round < p.num_rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kProducts; ++n)
      Wgmma<bf16_t, 256>::ss<false>(d, tile_descriptor(a + 2 * (n % 4)), tile_descriptor(b + 2 * (n % 4)), 1);
    wgmma_commit();
    wgmma_wait<0>();
  }
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < 128; ++n) sum += d[n];
#else
  constexpr int kTiles = 8;
  u32 a[4] = {operand(threadIdx.x), operand(threadIdx.x + 1), operand(threadIdx.x + 2), operand(threadIdx.x + 3)};
  float d[kTiles][4] = {};
#pragma unroll 1
  for (int round = 0; round < p.num_rounds; ++round) {
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      float (&x)[4] = d[n % kTiles];
      mma_m16n8k16<bf16_t>(x, a, a[n % 4], a[(n + 1) % 4], x[0], x[1], x[2], x[3]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) sum += d[n][0];
#endif
  if (sum == -1.0f) *p.out = sum;
}
#endif
