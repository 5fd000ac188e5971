// 00 naive: attention as it is written down, one thread for each query row.
//
// Changed:   nothing yet. A thread walks over all keys of its row; it reads Q, K and V from global memory and keeps its
//            output there, too. Only the running maximum m and sum l are in registers. Even so nothing of size N x N is
//            stored: the softmax is online.
// Why:       the point to start from, and a definition to read.
// Predicted: neighbouring threads read rows d floats apart, so each warp-wide access of Q and O touches 32 sectors for
//            128 bytes: 32 per request where 4 would do. Q and O of 2048 resident threads do not fit in L1: over 100
//            times the least DRAM bytes. 1000 ms.
// Measured:  1494 ms. 2977 times the least DRAM bytes, 799 GB: Q and O of a wave fit in no cache, which was guessed 30
//            times too low. 16.5 sectors per load, the mean of 32 for Q and O and 1 for K and V, which all lanes read
//            together. L2 at 70 % of its peak, the FMA pipe at 0.7 %.
//
// Threads: thread x of block b has row (b % num_m_blocks) * kBlockM + x of head b / num_m_blocks. Shared memory: none.
// launch: block_m=128 block_n=1 threads=128 shared=0 arch=61

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

constexpr int kBlockM = BLOCK_M;

__device__ float infinity() { return __int_as_float(0x7f800000); }

extern "C" __global__ void naive_kernel(const Params p) {
  // Find this thread's row
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i = blockIdx.x % num_m_blocks * kBlockM + threadIdx.x;
  if (i >= p.seqlen) return;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  const float* gQ = p.q + head + static_cast<size_t>(i) * p.head_dim;
  const float* gK = p.k + head;
  const float* gV = p.v + head;
  float* gO = p.o + head + static_cast<size_t>(i) * p.head_dim;

  float m = -infinity(), l = 0.0f;
  for (int c = 0; c < p.head_dim; ++c) gO[c] = 0.0f;
  int num_keys = p.is_causal ? i + 1 : p.seqlen;
  for (int j = 0; j < num_keys; ++j) {
    // Compute the score of key j
    float s = 0.0f;
    for (int c = 0; c < p.head_dim; ++c) s += gQ[c] * gK[c];
    s *= p.scale_log2;
    // Raise the maximum and rescale l and O
    float m_new = fmaxf(m, s);
    float alpha = exp2f(m - m_new), weight = exp2f(s - m_new);
    m = m_new;
    l = l * alpha + weight;
    for (int c = 0; c < p.head_dim; ++c) gO[c] = gO[c] * alpha + weight * gV[c];
    gK += p.head_dim;
    gV += p.head_dim;
  }
  // Normalise
  for (int c = 0; c < p.head_dim; ++c) gO[c] /= l;
}
