// 01 shared tiles: K and V pass through shared memory, and a warp works on each query row.
//
// Changed:   a block loads 32 keys at a time into shared memory, where its 4 rows read them. The 32 lanes of a warp
//            split the head dim: all global accesses are coalesced, and a score is a sum over lanes (five butterfly
//            steps). O is still updated in global memory, once a tile instead of once a key, and normalised in a pass
//            of its own.
// Why:       in 00 one access touched 32 sectors, and every key was fetched by every thread.
// Predicted: sectors per global request from 32 to 4. What limits now is the pipe that shared loads and shuffles share,
//            one warp instruction a cycle: 2 loads of K, 5 shuffles, 2 loads of V for each score, 42 ms at least. L2
//            still delivers 137 GB, since each block reads all of K and V for 4 rows, 25 ms that overlap. 60 ms.
// Measured:  67.9 ms, 22 times as fast. 4 sectors per load, DRAM bytes at the least there can be, 142 GB from L2. The
//            shared-memory pipe is at 62 %, not full: the FMA pipe is busy for 39 % of the time with 6 % of it useful,
//            the rest being the butterflies' adds, a rescaling for each key and exponentials.
//
// Threads: warp w has row w of the block's 4; lane x has columns x, x + 32, ... Shared memory: sK, sV
// [kBlockN][kHeadDim].
// launch: block_m=4 block_n=32|16 threads=128 shared=4*2*block_n*d arch=61

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
constexpr int kColumns = kHeadDim / 32;  // per lane
static_assert(kNumThreads == 32 * kBlockM && 4 * 2 * kBlockN * kHeadDim == SHARED_BYTES);

__device__ float infinity() { return __int_as_float(0x7f800000); }
// Sum over the 32 lanes; every lane gets it. Scope: warp.
__device__ float warp_sum(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) shared_tiles_kernel(const Params p) {
  extern __shared__ float shared[];
  float (*sK)[kHeadDim] = reinterpret_cast<float (*)[kHeadDim]>(shared);
  float (*sV)[kHeadDim] = sK + kBlockN;

  // Find this warp's row
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i = blockIdx.x % num_m_blocks * kBlockM + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  const float* gQ = p.q + head + static_cast<size_t>(i) * p.head_dim;
  float* gO = p.o + head + static_cast<size_t>(i) * p.head_dim;
  bool is_row = i < p.seqlen;

  float rQ[kColumns];
#pragma unroll
  for (int u = 0; u < kColumns; ++u) {
    int c = lane + 32 * u;
    rQ[u] = is_row && c < p.head_dim ? gQ[c] : 0.0f;
    if (is_row && c < p.head_dim) gO[c] = 0.0f;
  }
  float m = -infinity(), l = 0.0f;
  for (int j_begin = 0; j_begin < p.seqlen; j_begin += kBlockN) {
    // Load a tile of K and V, zeros past the end
    __syncthreads();
    for (int index = threadIdx.x; index < kBlockN * kHeadDim; index += kNumThreads) {
      int r = index / kHeadDim, c = index % kHeadDim;
      size_t source = head + static_cast<size_t>(j_begin + r) * p.head_dim + c;
      bool is_inside = j_begin + r < p.seqlen && c < p.head_dim;
      sK[r][c] = is_inside ? p.k[source] : 0.0f;
      sV[r][c] = is_inside ? p.v[source] : 0.0f;
    }
    __syncthreads();
    // Load the partial output
    float rO[kColumns];
#pragma unroll
    for (int u = 0; u < kColumns; ++u) rO[u] = is_row && lane + 32 * u < p.head_dim ? gO[lane + 32 * u] : 0.0f;
    for (int j = 0; j < kBlockN; ++j) {
      // Compute the score of key j, with the whole warp
      float s = 0.0f;
#pragma unroll
      for (int u = 0; u < kColumns; ++u) s += rQ[u] * sK[j][lane + 32 * u];
      bool is_seen = j_begin + j < p.seqlen && (!p.is_causal || j_begin + j <= i);
      s = is_seen ? warp_sum(s) * p.scale_log2 : -infinity();
      // Raise the maximum and rescale l and O
      float m_new = fmaxf(m, s);
      float alpha = exp2f(m - m_new), weight = exp2f(s - m_new);
      m = m_new;
      l = l * alpha + weight;
#pragma unroll
      for (int u = 0; u < kColumns; ++u) rO[u] = rO[u] * alpha + weight * sV[j][lane + 32 * u];
    }
    // Store the partial output
#pragma unroll
    for (int u = 0; u < kColumns; ++u) {
      if (is_row && lane + 32 * u < p.head_dim) gO[lane + 32 * u] = rO[u];
    }
  }
  // Normalise
#pragma unroll
  for (int u = 0; u < kColumns; ++u) {
    if (is_row && lane + 32 * u < p.head_dim) gO[lane + 32 * u] /= l;
  }
}
