// 04 register blocks: each thread computes 4 x 4 scores and 4 rows of output columns from values it loads once.
//
// Changed:   256 threads stand as 16 x 16 over a tile of 64 queries x 64 keys. A thread loads 16 bytes of each of its 4
//            rows of Q and 4 rows of K and does 64 FMA with them. The weights go to shared memory, where the threads
//            that compute O read them back.
// Why:       in 03 a value from shared memory was used once by each thread that loaded it: 4 bytes for each FMA, where
//            the pipe delivers 128 bytes and the FMA units take 128 operands a cycle.
// Predicted: shared bytes per FMA from 4 to 2, so at best half of the FMA ceiling, 9 ms; with the softmax and the
//            barriers 12 ms. Rows of d + 4 floats keep bank conflicts near 0.
// Measured:  8.92 ms, 2.14 times as fast. 1.7 bytes per FMA: a load of Q or P, where a warp reads two rows only, takes
//            2 cycles, not 4. The shared-memory pipe is at 78 %, the FMA pipe at 52 %. Bank conflicts 2.4 %.
//
// Threads: lanes of a warp stand as 2 row groups x 16 column groups. Rows of a thread: 8 warp + row_group + 2 t; its
// keys: column_group
// + 16 n; its output columns: 2 column_group + 32 u + (0..1). A warp writes and reads its own rows of P, so P needs no
// block barrier.
// Shared memory: sQ [kBlockM][kHeadDim + 4], sK, sV [kBlockN][kHeadDim + 4], sP [kBlockM][kBlockN + 8].
// launch: block_m=64 block_n=64|32|16 threads=256 shared=4*((block_m+2*block_n)*(d+4)+block_m*(block_n+8)) arch=61

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
constexpr int kRowStride = kHeadDim + 4, kScoreStride = kBlockN + 8;
constexpr int kRows = 4;               // per thread
constexpr int kCols = kBlockN / 16;    // keys per thread
constexpr int kPairs = kHeadDim / 32;  // float2 of an output row of a thread

struct Shared {
  float sQ[kBlockM][kRowStride];
  float sK[kBlockN][kRowStride];
  float sV[kBlockN][kRowStride];
  float sP[kBlockM][kScoreStride];
};
static_assert(kBlockM == kNumThreads / 16 * kRows && kBlockN % 16 == 0 && sizeof(Shared) == SHARED_BYTES);

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

// Loads rows [first, first + kTileRows) of a tensor to shared memory. Scope: block.
template <int kTileRows>
__device__ void load_tile(float (*tile)[kRowStride], const float* tensor, int first, const Params& p) {
#pragma unroll 4
  for (int index = threadIdx.x; index < kTileRows * kHeadDim / 4; index += kNumThreads) {
    int r = index / (kHeadDim / 4), c = index % (kHeadDim / 4) * 4;
    *reinterpret_cast<float4*>(&tile[r][c]) = load_four(tensor, first + r, c, p);
  }
}

// Maximum and sum over the 16 lanes that share a row. Scope: half a warp.
__device__ float row_max(float x) {
  for (int lanes = 8; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ float row_sum(float x) {
  for (int lanes = 8; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) register_blocks_kernel(const Params p) {
  extern __shared__ __align__(16) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = blockIdx.x % num_m_blocks * kBlockM;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int row = threadIdx.x / 32 * 2 * kRows + threadIdx.x % 32 / 16;  // this thread's first row inside the block
  int column_group = threadIdx.x % 16;

  load_tile<kBlockM>(shared.sQ, p.q + head, i_begin, p);
  float m[kRows], l[kRows];
  float2 rO[kRows][kPairs];
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    m[t] = -infinity();
    l[t] = 0.0f;
#pragma unroll
    for (int u = 0; u < kPairs; ++u) rO[t][u] = make_float2(0.0f, 0.0f);
  }

  for (int j_begin = 0; j_begin < p.seqlen; j_begin += kBlockN) {
    // Load a tile of K and V
    __syncthreads();
    load_tile<kBlockN>(shared.sK, p.k + head, j_begin, p);
    load_tile<kBlockN>(shared.sV, p.v + head, j_begin, p);
    __syncthreads();

    // S = Q K^T, four columns of the head dim at a time
    float rS[kRows][kCols] = {};
#pragma unroll 2
    for (int c = 0; c < kHeadDim; c += 4) {
      float4 rQ[kRows];
#pragma unroll
      for (int t = 0; t < kRows; ++t) rQ[t] = *reinterpret_cast<const float4*>(&shared.sQ[row + 2 * t][c]);
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        float4 rK = *reinterpret_cast<const float4*>(&shared.sK[column_group + 16 * n][c]);
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          rS[t][n] = fmaf(rQ[t].x, rK.x, fmaf(rQ[t].y, rK.y, fmaf(rQ[t].z, rK.z, fmaf(rQ[t].w, rK.w, rS[t][n]))));
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      // Mask, raise the maximum, rescale l and O
      int i = i_begin + row + 2 * t;
      float tile_max = -infinity();
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        int j = j_begin + column_group + 16 * n;
        rS[t][n] = j < p.seqlen && (!p.is_causal || j <= i) ? rS[t][n] * p.scale_log2 : -infinity();
        tile_max = fmaxf(tile_max, rS[t][n]);
      }
      float m_new = fmaxf(m[t], row_max(tile_max));
      float alpha = exp2f(m[t] - m_new), sum = 0.0f;
      m[t] = m_new;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        float weight = exp2f(rS[t][n] - m_new);
        sum += weight;
        shared.sP[row + 2 * t][column_group + 16 * n] = weight;
      }
      l[t] = l[t] * alpha + row_sum(sum);
#pragma unroll
      for (int u = 0; u < kPairs; ++u) rO[t][u] = make_float2(rO[t][u].x * alpha, rO[t][u].y * alpha);
    }
    __syncwarp();

    // O += P V, four keys at a time
#pragma unroll 2
    for (int j = 0; j < kBlockN; j += 4) {
      float rP[kRows][4];
#pragma unroll
      for (int t = 0; t < kRows; ++t)
        *reinterpret_cast<float4*>(rP[t]) = *reinterpret_cast<const float4*>(&shared.sP[row + 2 * t][j]);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
#pragma unroll
        for (int u = 0; u < kPairs; ++u) {
          float2 rV = *reinterpret_cast<const float2*>(&shared.sV[j + x][2 * column_group + 32 * u]);
#pragma unroll
          for (int t = 0; t < kRows; ++t)
            rO[t][u] = make_float2(fmaf(rP[t][x], rV.x, rO[t][u].x), fmaf(rP[t][x], rV.y, rO[t][u].y));
        }
      }
    }
  }
  // Normalise and store
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    int i = i_begin + row + 2 * t;
    float* gO = p.o + head + static_cast<size_t>(i) * p.head_dim;
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      int c = 2 * column_group + 32 * u;
      if (i < p.seqlen && c < p.head_dim) gO[c] = rO[t][u].x / l[t];
      if (i < p.seqlen && c + 1 < p.head_dim) gO[c + 1] = rO[t][u].y / l[t];
    }
  }
}
