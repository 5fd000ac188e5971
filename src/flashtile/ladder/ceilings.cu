// What the GPU can do at best: FMA in registers, and 16-byte reads of shared memory without conflicts. The measured
// roofs of the ladder.
//
// Threads: any number of blocks of kNumThreads; each thread does num_rounds rounds of kFmas FMA or kReads reads.

struct Params {
  float* out;  // (1,), never written: its store only keeps the work from being removed
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
