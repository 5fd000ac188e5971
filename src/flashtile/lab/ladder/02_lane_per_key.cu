// 02 lane per key: each lane computes the whole score of one key, the output stays in registers and is stored once.
//
// Changed:   a lane takes a key instead of a slice of the head dim, so a score needs no sum over lanes; only the row's
//            maximum and sum do, once for 32 keys. A block has 32 rows instead of 4. O lives in registers, is
//            normalised there and stored once.
// Why:       in 01 five of nine slots of the shared-memory pipe went to butterflies, each block read K and V for 4 rows
//            only, and O made a round trip through L1 with every tile.
// Predicted: shuffles per score from 5 to 1.3, L2 traffic from 137 GB to 17 GB. 32 lanes read one column of 32 rows:
//            rows of d + 1 floats put them on 32 banks, so bank conflicts stay 0 (without the 1 it is a 32-way
//            conflict). Shared loads bind: 2 for each FMA of S, 1 for each of O, and a shuffle for each weight: 34 ms
//            at least. 38 ms.
// Measured:  28.3 ms, 2.4 times as fast and 10 ms less than predicted: the compiler reads Q 16 bytes at a time, so
//            there are 1.13 shared loads for each FMA instead of 1.5. L2 traffic 15.7 GB, bank conflicts 0.2 %. The
//            shared-memory pipe is full, at 94 %.
//
// Threads: warp w has rows kRows * w ...; for S lane x has key x of 32, for O columns x, x + 32, ...
// Shared memory: sQ [kBlockM][kHeadDim], sK, sV [kBlockN][kHeadDim + 1].
// launch: block_m=32 block_n=64|32 threads=256 shared=4*(block_m*d+2*block_n*(d+1)) arch=61

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
constexpr int kRows = kBlockM / (kNumThreads / 32);  // per warp
constexpr int kColumns = kHeadDim / 32;              // per lane
static_assert(kBlockN % 32 == 0 && 4 * (kBlockM * kHeadDim + 2 * kBlockN * (kHeadDim + 1)) == SHARED_BYTES);

__device__ float infinity() { return __int_as_float(0x7f800000); }
// Maximum and sum over the 32 lanes; every lane gets them. Scope: warp.
__device__ float warp_max(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ float warp_sum(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) lane_per_key_kernel(const Params p) {
  extern __shared__ float shared[];
  float (*sQ)[kHeadDim] = reinterpret_cast<float (*)[kHeadDim]>(shared);
  float (*sK)[kHeadDim + 1] = reinterpret_cast<float (*)[kHeadDim + 1]>(shared + kBlockM * kHeadDim);
  float (*sV)[kHeadDim + 1] = sK + kBlockN;

  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = blockIdx.x % num_m_blocks * kBlockM;
  int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * kRows;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;

  // Load Q, zeros past the end
  for (int index = threadIdx.x; index < kBlockM * kHeadDim; index += kNumThreads) {
    int r = index / kHeadDim, c = index % kHeadDim;
    bool is_inside = i_begin + r < p.seqlen && c < p.head_dim;
    sQ[r][c] = is_inside ? p.q[head + static_cast<size_t>(i_begin + r) * p.head_dim + c] : 0.0f;
  }
  float m[kRows], l[kRows], rO[kRows][kColumns];
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    m[t] = -infinity();
    l[t] = 0.0f;
#pragma unroll
    for (int u = 0; u < kColumns; ++u) rO[t][u] = 0.0f;
  }

  for (int j_begin = 0; j_begin < p.seqlen; j_begin += kBlockN) {
    // Load a tile of K and V
    __syncthreads();
    for (int index = threadIdx.x; index < kBlockN * kHeadDim; index += kNumThreads) {
      int r = index / kHeadDim, c = index % kHeadDim;
      size_t source = head + static_cast<size_t>(j_begin + r) * p.head_dim + c;
      bool is_inside = j_begin + r < p.seqlen && c < p.head_dim;
      sK[r][c] = is_inside ? p.k[source] : 0.0f;
      sV[r][c] = is_inside ? p.v[source] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      int i = i_begin + first_row + t;
      for (int n = 0; n < kBlockN; n += 32) {
        // Compute the score of this lane's key
        float s = 0.0f;
#pragma unroll 8
        for (int c = 0; c < kHeadDim; ++c) s += sQ[first_row + t][c] * sK[n + lane][c];
        int j = j_begin + n + lane;
        s = j < p.seqlen && (!p.is_causal || j <= i) ? s * p.scale_log2 : -infinity();
        // Raise the maximum and rescale l and O
        float m_new = fmaxf(m[t], warp_max(s));
        float alpha = exp2f(m[t] - m_new), weight = exp2f(s - m_new);
        m[t] = m_new;
        l[t] = l[t] * alpha + warp_sum(weight);
#pragma unroll
        for (int u = 0; u < kColumns; ++u) rO[t][u] *= alpha;
        // Add the 32 keys' values, each with the weight its lane holds
#pragma unroll 8
        for (int x = 0; x < 32; ++x) {
          float one = __shfl_sync(0xffffffffu, weight, x);
#pragma unroll
          for (int u = 0; u < kColumns; ++u) rO[t][u] += one * sV[n + x][lane + 32 * u];
        }
      }
    }
  }
  // Normalise and store
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    int i = i_begin + first_row + t;
#pragma unroll
    for (int u = 0; u < kColumns; ++u) {
      int c = lane + 32 * u;
      if (i < p.seqlen && c < p.head_dim) p.o[head + static_cast<size_t>(i) * p.head_dim + c] = rO[t][u] / l[t];
    }
  }
}
