// 07 production tile: 128 queries x 64 keys, 8 x 8 scores for each thread, one buffer each for K and V.
//
// Changed:   four warps instead of eight share a tile twice as tall, so a thread has 8 x 8 scores. K and V have one
//            buffer each again and are copied half an iteration apart: K(n + 1) while P(n) V(n) is computed, V(n + 1)
//            while S(n + 1) is. The exponential is the bare ex2 instruction. This is the tile of the production kernel,
//            families/fwd_simt/fwd_simt.cuh.
// Why:       06 is bound by shared loads, near 2 bytes for each FMA; a larger block of scores for each thread halves
//            them.
// Predicted: shared bytes per FMA from 2 to 1: FMA issue binds. 104 KiB and 128 threads a block: two blocks, 8 warps,
//            12 % occupancy, and that is enough since each warp has 64 independent FMA. The production kernel takes 7.3
//            ms; so should this.
// Measured:  6.66 ms full and 3.72 causal, 1.29 and 1.20 times as fast, and 1.18 and 1.13 times as fast as torch's
//            memory-efficient kernel, which uses tensor cores. 0.81 bytes of shared memory per FMA, its pipe at 50 %;
//            the FMA pipe at 67 %. The production kernel, which takes every option, needed 7.31 and 4.10 ms then, and
//            6.83 and 3.86 since it stores P as this one does (docs/tiles.md).
//
// Threads: lanes of a warp stand as 4 row groups x 8 column groups. Rows of a thread: 4 kRows warp + row_group + 4 t;
// its keys:
// column_group + 8 n; its output columns: 4 column_group + 32 u + (0..3). Each warp writes and reads its own rows of P.
// Shared memory: sQ [kBlockM][kHeadDim + 4], sK, sV [kBlockN][kHeadDim + 4], sP [kBlockM][kBlockN + 8].
// launch: block_m=(128 if arch<100 else 64) block_n=64|32|16 threads=(128 if d<=64 else 256)
// launch: shared=4*((block_m+2*block_n)*(d+4)+block_m*(block_n+8)) arch=80

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
constexpr int kRows = kBlockM / (kNumThreads / 8);  // per thread
constexpr int kCols = kBlockN / 8;                  // keys per thread
constexpr int kVectors = kHeadDim / 32;             // float4 of an output row of a thread

struct Shared {
  float sQ[kBlockM][kRowStride];
  float sK[kBlockN][kRowStride];
  float sV[kBlockN][kRowStride];
  float sP[kBlockM][kScoreStride];
};
static_assert(kBlockM % (kNumThreads / 8) == 0 && kBlockN % 8 == 0 && sizeof(Shared) == SHARED_BYTES);

__device__ float infinity() { return __int_as_float(0x7f800000); }
// Starts copying four columns of a row to shared memory, zeros outside the tensor. IS_WIDE: rows start on 16-byte
// boundaries, else one column at a time. (PTX ISA: cp.async) Scope: thread.
__device__ void copy_four(float* target, const float* tensor, int row, int column, const Params& p) {
  constexpr int kStep = IS_WIDE ? 4 : 1;
#pragma unroll
  for (int x = 0; x < 4; x += kStep) {
    bool is_inside = row < p.seqlen && column + x < p.head_dim;
    const float* source = is_inside ? tensor + static_cast<size_t>(row) * p.head_dim + column + x : tensor;
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target + x));
    int num_bytes = is_inside ? 4 * kStep : 0;
    if constexpr (IS_WIDE) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(num_bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source), "r"(num_bytes)
                   : "memory");
    }
  }
}
__device__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's copy groups are in flight. Scope: thread.
template <int kPending>
__device__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Starts copying rows [first, first + kTileRows) of a tensor to shared memory. Scope: block.
template <int kTileRows>
__device__ void copy_tile(float (*tile)[kRowStride], const float* tensor, int first, const Params& p) {
#pragma unroll 4
  for (int index = threadIdx.x; index < kTileRows * kHeadDim / 4; index += kNumThreads) {
    int r = index / (kHeadDim / 4), c = index % (kHeadDim / 4) * 4;
    copy_four(&tile[r][c], tensor, first + r, c, p);
  }
}

// 2^x, one instruction. (PTX ISA: ex2) Scope: thread.
__device__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Maximum and sum over the 8 lanes that share a row. Scope: a quarter of a warp.
__device__ float row_max(float x) {
  for (int lanes = 4; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ float row_sum(float x) {
  for (int lanes = 4; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) production_tile_kernel(const Params p) {
  extern __shared__ __align__(16) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);

  // Last rows first: under a causal mask they see the most keys
  int num_m_blocks = (p.seqlen + kBlockM - 1) / kBlockM;
  int i_begin = (num_m_blocks - 1 - static_cast<int>(blockIdx.x % num_m_blocks)) * kBlockM;
  int num_keys = p.is_causal ? min(i_begin + kBlockM, p.seqlen) : p.seqlen;
  size_t head = static_cast<size_t>(blockIdx.x / num_m_blocks) * p.seqlen * p.head_dim;
  int row = threadIdx.x / 32 * 4 * kRows + threadIdx.x % 32 / 8;  // this thread's first row inside the block
  int column_group = threadIdx.x % 8;

  // One copy group per tile, empty ones after the last, so that the number in flight is always known
  auto copy_keys = [&](float (*tile)[kRowStride], const float* tensor, int j_begin) {
    if (j_begin < num_keys) copy_tile<kBlockN>(tile, tensor + head, j_begin, p);
    copy_commit();
  };
  copy_tile<kBlockM>(shared.sQ, p.q + head, i_begin, p);
  copy_keys(shared.sK, p.k, 0);
  copy_keys(shared.sV, p.v, 0);
  float m[kRows], l[kRows];
  float4 rO[kRows][kVectors];
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    m[t] = -infinity();
    l[t] = 0.0f;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) rO[t][u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  for (int j_begin = 0; j_begin < num_keys; j_begin += kBlockN) {
    // Wait for the K tile
    copy_wait<1>();
    __syncthreads();
    // S = Q K^T, four columns of the head dim at a time; unrolled twice it is 3 % slower on an NVIDIA H200
    float rS[kRows][kCols] = {};
#pragma unroll 1
    for (int c = 0; c < kHeadDim; c += 4) {
      float4 rQ[kRows];
#pragma unroll
      for (int t = 0; t < kRows; ++t) rQ[t] = *reinterpret_cast<const float4*>(&shared.sQ[row + 4 * t][c]);
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        float4 rK = *reinterpret_cast<const float4*>(&shared.sK[column_group + 8 * n][c]);
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          rS[t][n] = fmaf(rQ[t].w, rK.w, fmaf(rQ[t].z, rK.z, fmaf(rQ[t].y, rK.y, fmaf(rQ[t].x, rK.x, rS[t][n]))));
        }
      }
    }
    // Load the next K tile into the released buffer
    __syncthreads();
    copy_keys(shared.sK, p.k, j_begin + kBlockN);

    // Mask only the tiles that cross the diagonal or the end
    if (j_begin + kBlockN > p.seqlen || (p.is_causal && j_begin + kBlockN > i_begin + 1)) {
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        int last = p.is_causal ? min(i_begin + row + 4 * t, p.seqlen - 1) : p.seqlen - 1;
#pragma unroll
        for (int n = 0; n < kCols; ++n) rS[t][n] = j_begin + column_group + 8 * n <= last ? rS[t][n] : -infinity();
      }
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      // Raise the maximum and rescale l and O
      float tile_max = rS[t][0];
#pragma unroll
      for (int n = 1; n < kCols; ++n) tile_max = fmaxf(tile_max, rS[t][n]);
      float m_new = fmaxf(m[t], row_max(tile_max) * p.scale_log2);
      float alpha = exp2_approx(m[t] - m_new), sum = 0.0f;
      m[t] = m_new;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        float weight = exp2_approx(fmaf(rS[t][n], p.scale_log2, -m_new));
        sum += weight;
        shared.sP[row + 4 * t][column_group + 8 * n] = weight;
      }
      l[t] = l[t] * alpha + row_sum(sum);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        rO[t][u] = make_float4(rO[t][u].x * alpha, rO[t][u].y * alpha, rO[t][u].z * alpha, rO[t][u].w * alpha);
      }
    }

    // Wait for the V tile; the barrier also orders this warp's P
    copy_wait<1>();
    __syncthreads();
    // O += P V, four keys at a time
#pragma unroll 1
    for (int j = 0; j < kBlockN; j += 4) {
      float rP[kRows][4];
#pragma unroll
      for (int t = 0; t < kRows; ++t)
        *reinterpret_cast<float4*>(rP[t]) = *reinterpret_cast<const float4*>(&shared.sP[row + 4 * t][j]);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          float4 rV = *reinterpret_cast<const float4*>(&shared.sV[j + x][4 * column_group + 32 * u]);
#pragma unroll
          for (int t = 0; t < kRows; ++t) {
            rO[t][u].x = fmaf(rP[t][x], rV.x, rO[t][u].x);
            rO[t][u].y = fmaf(rP[t][x], rV.y, rO[t][u].y);
            rO[t][u].z = fmaf(rP[t][x], rV.z, rO[t][u].z);
            rO[t][u].w = fmaf(rP[t][x], rV.w, rO[t][u].w);
          }
        }
      }
    }
    // Load the next V tile into the released buffer
    __syncthreads();
    copy_keys(shared.sV, p.v, j_begin + kBlockN);
  }
  // Normalise and store
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    int i = i_begin + row + 4 * t;
    if (i >= p.seqlen) continue;
    float* gO = p.o + head + static_cast<size_t>(i) * p.head_dim;
    float factor = 1.0f / l[t];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      int c = 4 * column_group + 32 * u;
      float4 o = make_float4(rO[t][u].x * factor, rO[t][u].y * factor, rO[t][u].z * factor, rO[t][u].w * factor);
#if IS_WIDE
      if (c < p.head_dim) *reinterpret_cast<float4*>(gO + c) = o;
#else
      const float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        if (c + x < p.head_dim) gO[c + x] = values[x];
      }
#endif
    }
  }
}
