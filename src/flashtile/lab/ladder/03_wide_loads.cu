// 03 wide loads: 16 bytes a load, Q in registers, scores that never leave them.
//
// Changed:   four threads share a query row, each with a quarter of its columns of Q and O in registers, as float4. K
//            and V are read 16 bytes at a time, the same address by all 8 rows of a warp. A score is a sum over four
//            threads (two butterfly steps), after which all four hold it: the weights need no way through shared memory
//            or shuffles. The maximum is raised once for 8 keys.
// Why:       02 spent two shared loads on each FMA of S and one on each of O.
// Predicted: shared load instructions per FMA from 1.5 to 0.25. If a 16-byte load that is broadcast took one cycle of
//            the pipe, FMAs would bind, at 7 ms. It fills 512 bytes of registers, at 128 a cycle: 4 cycles, 20 ms.
// Measured:  19.1 ms, 1.48 times as fast. 0.25 shared loads per FMA, and the pipe is still full, at 93 %: a broadcast
//            of 16 bytes does take 4 cycles. The FMA pipe is at 29 %.
//
// Threads: thread x has row x / 4 of the block's and columns 4 * (x % 4) + 16 u + (0..3). Shared memory: sK, sV
// [kBlockN][kHeadDim].
// launch: block_m=64 block_n=64|32 threads=256 shared=4*2*block_n*d arch=61

struct Params {
  const float* q;  // (batch * heads, seqlen, head_dim), contiguous
  const float* k;  // the same
  const float* v;  // the same
  float* o;        // the same
  int seqlen;
  int head_dim;
  float scale_log2;  // softmax scale * log2(e): all exponentials are base 2
  int is_causal;     // query i sees keys 0..i
};

constexpr int kHeadDim = HEAD_DIM;  // head_dim rounded up to a multiple of 32
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N, kNumThreads = NUM_THREADS;
constexpr int kVectors = kHeadDim / 16;  // float4 of a thread's part of a row
constexpr int kChunk = 8;                // keys between two updates of the maximum
static_assert(kNumThreads == 4 * kBlockM && kBlockN % kChunk == 0 && 4 * 2 * kBlockN * kHeadDim == SHARED_BYTES);

__device__ float infinity() { return __int_as_float(0x7f800000); }
// Loads four columns of a row, zeros outside the tensor. IS_WIDE: rows start on 16-byte boundaries. Scope: thread.
__device__ float4 load_four(const float* tensor, int row, int column, const Params& p) {
  if (row >= p.seqlen || column >= p.head_dim) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* source = tensor + static_cast<size_t>(row) * p.head_dim + column;
#if IS_WIDE
  return *reinterpret_cast<const float4*>(source);
#else
  int left = p.head_dim - column;
  return make_float4(source[0], left > 1 ? source[1] : 0.0f, left > 2 ? source[2] : 0.0f, left > 3 ? source[3] : 0.0f);
#endif
}

// Stores four columns of a row; drops what lies outside the tensor. Scope: thread.
__device__ void store_four(float* tensor, int row, int column, const Params& p, float4 x) {
  if (row >= p.seqlen || column >= p.head_dim) return;
  float* target = tensor + static_cast<size_t>(row) * p.head_dim + column;
#if IS_WIDE
  *reinterpret_cast<float4*>(target) = x;
#else
  int left = p.head_dim - column;
  target[0] = x.x;
  if (left > 1) target[1] = x.y;
  if (left > 2) target[2] = x.z;
  if (left > 3) target[3] = x.w;
#endif
}

extern "C" __global__ void __launch_bounds__(kNumThreads) wide_loads_kernel(const Params p) {
  extern __shared__ __align__(16) float shared[];
  float (*sK)[kHeadDim] = reinterpret_cast<float (*)[kHeadDim]>(shared);
  float (*sV)[kHeadDim] = sK + kBlockN;

  // Find this thread's row and columns
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i = blockIdx.x % num_m_blocks * kBlockM + threadIdx.x / 4;
  int first = 4 * (threadIdx.x % 4);
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;

  float4 rQ[kVectors], rO[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    rQ[u] = load_four(p.q + head, i, first + 16 * u, p);
    rO[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  float m = -infinity(), l = 0.0f;
  for (int j_begin = 0; j_begin < p.seqlen; j_begin += kBlockN) {
    // Load a tile of K and V
    __syncthreads();
    for (int index = threadIdx.x; index < kBlockN * kHeadDim / 4; index += kNumThreads) {
      int r = index / (kHeadDim / 4), c = index % (kHeadDim / 4) * 4;
      *reinterpret_cast<float4*>(&sK[r][c]) = load_four(p.k + head, j_begin + r, c, p);
      *reinterpret_cast<float4*>(&sV[r][c]) = load_four(p.v + head, j_begin + r, c, p);
    }
    __syncthreads();
#pragma unroll 1
    for (int n = 0; n < kBlockN; n += kChunk) {
      // Scores of 8 keys: this thread's columns, then the sum over the row's four threads
      float rS[kChunk], chunk_max = -infinity();
#pragma unroll
      for (int x = 0; x < kChunk; ++x) {
        float s = 0.0f;
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          float4 k = *reinterpret_cast<const float4*>(&sK[n + x][first + 16 * u]);
          s = fmaf(rQ[u].x, k.x, fmaf(rQ[u].y, k.y, fmaf(rQ[u].z, k.z, fmaf(rQ[u].w, k.w, s))));
        }
        s += __shfl_xor_sync(0xffffffffu, s, 1);
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        int j = j_begin + n + x;
        rS[x] = j < p.seqlen && (!p.is_causal || j <= i) ? s * p.scale_log2 : -infinity();
        chunk_max = fmaxf(chunk_max, rS[x]);
      }
      // Raise the maximum and rescale l and O
      float m_new = fmaxf(m, chunk_max);
      float alpha = exp2f(m - m_new);
      m = m_new;
      l *= alpha;
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        rO[u] = make_float4(rO[u].x * alpha, rO[u].y * alpha, rO[u].z * alpha, rO[u].w * alpha);
      // Add the 8 keys' values
#pragma unroll
      for (int x = 0; x < kChunk; ++x) {
        float weight = exp2f(rS[x] - m);
        l += weight;
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          float4 v = *reinterpret_cast<const float4*>(&sV[n + x][first + 16 * u]);
          rO[u].x = fmaf(weight, v.x, rO[u].x);
          rO[u].y = fmaf(weight, v.y, rO[u].y);
          rO[u].z = fmaf(weight, v.z, rO[u].z);
          rO[u].w = fmaf(weight, v.w, rO[u].w);
        }
      }
    }
  }
  // Normalise and store
  float factor = 1.0f / l;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    float4 o = make_float4(rO[u].x * factor, rO[u].y * factor, rO[u].z * factor, rO[u].w * factor);
    store_four(p.o + head, i, first + 16 * u, p, o);
  }
}
