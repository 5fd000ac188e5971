// Options of the Hopper kernels that own keys (bwd_sm90.cuh, bwd_sm90_dkdv.cuh): bool mask, softcap, ALiBi, bias and
// dropout between S^T, dP^T and P^T, dS^T. A consumer has 64 keys.
//
// Threads:  one warp for each consumer prepares the mask and the bias of each tile of 64 keys x 64 queries. Consumers
//           draw dropout bits themselves.
// Shared:   bits of a bool mask: a word for each consumer warp and pair of queries, one bit for each of the warp's 16
//           keys and of the two queries. A bias: [stage][64 queries][64 keys], in rows of 128 bytes whose
//           16-byte chunks are swizzled as in tile/smem_tile.cuh. Barriers: full and empty of each, per consumer.
// Scores:   base 2 without a bias, natural with one (attn/score_unit.cuh).
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/dropout.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/score.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tile/pipeline.cuh"

namespace flashtile {

// Bits of one tile for each consumer. Words of a warp are ordered so that a thread's eight are contiguous: those of
// queries 2 x and 2 x + 1 are at 8 * (x % 4) + x / 4.
template <bool kIsOn, i32 kNumConsumers>
struct BitTiles {
  alignas(16) u32 words[kNumConsumers][4][32];
  u64 full[kNumConsumers], empty[kNumConsumers];
  u64 is_full[kNumConsumers];  // nonzero: every bit is set
};
template <i32 kNumConsumers>
struct BitTiles<false, kNumConsumers> {};

template <class Element, i32 kNumConsumers, i32 kNumStages>
struct BiasTiles {
  Element tiles[kNumConsumers][kNumStages][64 * 64];
  u64 full[kNumConsumers][kNumStages], empty[kNumConsumers][kNumStages];
};
template <i32 kNumConsumers, i32 kNumStages>
struct BiasTiles<NoBias, kNumConsumers, kNumStages> {};

template <class Config, class Mask, class ScoreMod>
struct OptionStorage : BiasTiles<typename ScoreMod::BiasElement, Config::kNumConsumers, Config::kNumBiasStages>,
                       BitTiles<Mask::kHasBool, Config::kNumConsumers> {};

template <class Config, class Mask, class ScoreMod, class Dropout>
struct BwdSm90Options {
  using Storage = OptionStorage<Config, Mask, ScoreMod>;
  using Band = flashtile::Mask<Mask::kHasBand, false>;
  using BiasElement = typename ScoreMod::BiasElement;
  using BiasStages = Ring<Config::kNumBiasStages>;
  using Bias = BiasTiles<BiasElement, Config::kNumConsumers, Config::kNumBiasStages>;
  using MaskBits = BitTiles<Mask::kHasBool, Config::kNumConsumers>;
  using Scores = Score<ScoreMod>;
  static constexpr bool kIsHalfTile = Config::kBlockN < kMaskTile;  // the block owns half of a tile of the mask's bits
  static constexpr bool kChangesTiles = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr i32 kNumTiles = ScoreMod::kHasBias + Mask::kHasBool;  // that warps prepare
  static constexpr bool kHasTiles = kNumTiles > 0;
  static constexpr i32 kScores = Config::kBlockM / 2;  // registers per thread of S^T
  using T = typename Config::Element;
  static constexpr i32 kNumOptions = ScoreMod::kNumOptions + Mask::kHasBool + Dropout::kIsOn;
  // P^T is computed while dP^T is in flight, unless that takes too many registers
  static constexpr bool kIsSplit =
      kNumOptions < 2 || (Config::kHeadDim + Config::kHeadDimV <= 128 && !ScoreMod::kHasDerivative);
  // Registers per thread: warps that prepare tiles need more than 24
  static constexpr i32 kProducerRegisters = Config::kProducerRegisters + 16 * kNumTiles;
  static constexpr i32 kConsumerRegisters = Config::kConsumerRegisters - 8 * kNumTiles;

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    if constexpr (Mask::kHasBool) {
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        mbarrier_init(shared.MaskBits::full[consumer], 1);
        mbarrier_init(shared.MaskBits::empty[consumer], 4);
      }
    }
    if constexpr (ScoreMod::kHasBias) {
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        for (i32 stage = 0; stage < Config::kNumBiasStages; ++stage) {
          mbarrier_init(shared.Bias::full[consumer][stage], 32);
          mbarrier_init(shared.Bias::empty[consumer][stage], 4);
        }
      }
    }
  }

  // The query tiles of [m_begin, m_end) from the first to the last one with a query that sees a key of the tile. Tiles
  // are those of the mask's map. Scope: warp.
  template <class Tile>
  FT_DEVICE static Range visible_tiles(const Params& p, const Tile& tile) {
    static_assert(Config::kBlockM == kMaskGroup && kMaskTile % Config::kBlockN == 0);
    MaskLayout<kMaskTile> layout(p);
    i32 n = tile.j_begin / kMaskTile, begin = tile.m_end, end = tile.m_begin;
    for (i32 h = 0; h < (layout.num_heads == 1 ? 1 : tile.num_heads); ++h) {
      i32 plane = layout.plane(tile.s.batch_idx, tile.first_head + h);
#pragma unroll 4
      for (i32 m = tile.m_begin + static_cast<i32>(threadIdx.x % 32); m < tile.m_end; m += 32) {
        i64 index = layout.tiles_index(plane, layout.num_rows == 1 ? 0 : m, n / kMaskWord);
        u32 visible = reinterpret_cast<const uint2*>(p.mask_tiles)[index].x;
        if (visible >> n % kMaskWord & 1u) begin = min_of(begin, m), end = max_of(end, m + 1);
      }
    }
    begin = __reduce_min_sync(0xffffffffu, begin), end = __reduce_max_sync(0xffffffffu, end);
    return {begin, max_of(begin, end)};
  }

  // ---- Producer. Scope: warp.

  // The words of queries i and i + 1 for the warps of a consumer. Queries past the last one, whose P is 0 anyway, have
  // all bits. Scope: thread.
  FT_DEVICE static void load_words(const Params& p, const Sequence& s, i32 consumer, i32 head, i32 i, i32 j_begin,
                                   u32 (&words)[4]) {
    MaskLayout<kMaskTile> layout(p);
    i32 plane = layout.plane(s.batch_idx, head);
    uint4 rows[2];
#pragma unroll
    for (i32 x = 0; x < 2; ++x) {
      i32 row = i + x;
      if constexpr (mutates(Mutation::bwd_sm90_mask_row)) row = max_of(row - 1, 0);
      rows[x] = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
      if (i + x < s.seqlen_q)
        rows[x] = reinterpret_cast<const uint4*>(p.mask_bits)[layout.bits_index(plane, row, j_begin / kMaskTile)];
    }
    // The consumer's half of the keys: word t has bit 2 b + e of key 8 b + 2 t + e, of both queries
    if constexpr (kIsHalfTile) consumer = j_begin / 64 % 2;
    u32 half = consumer == 0 ? 0x5410u : 0x7632u;
    u32 x0 = __byte_perm(rows[0].x, rows[1].x, half), x1 = __byte_perm(rows[0].y, rows[1].y, half);
    u32 x2 = __byte_perm(rows[0].z, rows[1].z, half), x3 = __byte_perm(rows[0].w, rows[1].w, half);
    // A nibble for each warp: keys 0 .. 3, 4 .. 7, 8 .. 11 and 12 .. 15 of its 16
    constexpr u32 kLow = 0x33333333u;
    u32 a = (x0 & kLow) | (x1 & kLow) << 2, b = (x2 & kLow) | (x3 & kLow) << 2;
    u32 c = (x0 >> 2 & kLow) | (x1 & ~kLow), d = (x2 >> 2 & kLow) | (x3 & ~kLow);
#pragma unroll
    for (i32 warp = 0; warp < 4; ++warp) {
      constexpr u32 kNibbles = 0x000f000fu;
      words[warp] = (a >> 4 * warp & kNibbles) | (b >> 4 * warp & kNibbles) << 4 | (c >> 4 * warp & kNibbles) << 8 |
                    (d >> 4 * warp & kNibbles) << 12;
    }
  }

  // Stores a lane's words of tile number count for the four consumer warps, as soon as the tile before has been read.
  FT_DEVICE static void store_words(MaskBits& tiles, i32 consumer, u32 count, const u32 (&words)[4]) {
    i32 lane = threadIdx.x % 32;
    bool is_full = __all_sync(0xffffffffu, (words[0] & words[1] & words[2] & words[3]) == 0xffffffffu);
    mbarrier_wait(tiles.empty[consumer], count % 2 ^ 1);
#pragma unroll
    for (i32 warp = 0; warp < 4; ++warp) tiles.words[consumer][warp][lane % 4 * 8 + lane / 4] = words[warp];
    if (lane == 31) tiles.is_full[consumer] = is_full;
    __syncwarp();
    arrive_warp(tiles.full[consumer]);
  }

  // Passes on the tile before.
  FT_DEVICE static void repeat_words(MaskBits& tiles, i32 consumer, u32 count) {
    mbarrier_wait(tiles.empty[consumer], count % 2 ^ 1);
    arrive_warp(tiles.full[consumer]);
  }

  // Starts copying rows of the bias in pieces of kBytes.
  template <i32 kBytes>
  FT_DEVICE static void copy_bias(u32 tile, const BiasElement* rows, i64 row_stride, i32 num_rows, i32 num_keys) {
    constexpr i32 kSize = sizeof(BiasElement), kPieces = 64 * kSize / kBytes;  // of a row
    constexpr i32 kLanes = kPieces < 32 ? kPieces : 32, kRows = 32 / kLanes;   // of one pass of the warp
    i32 lane = threadIdx.x % 32, key = lane % kLanes * (kBytes / kSize);
    rows += lane / kLanes * row_stride + key;
#pragma unroll 2
    for (i32 row = lane / kLanes; row < 64; row += kRows, rows += kRows * row_stride) {
#pragma unroll
      for (i32 part = 0; part < kPieces / kLanes; ++part) {
        i32 first = part * kLanes * (kBytes / kSize);  // key of the part
        i32 num_valid = row < num_rows ? clamp((num_keys - first - key) * kSize, 0, kBytes) : 0;
        cp_async<kBytes>(tile + bias_offset(row, first + key), rows + first, num_valid);
      }
    }
  }
  // The byte offset of an element in its tile. A row of a float32 tile has two pieces of 128 bytes. Scope: thread.
  FT_DEVICE static u32 bias_offset(i32 row, i32 key) {
    i32 byte = key * static_cast<i32>(sizeof(BiasElement));
    return byte / 128 * (64 * 128) + row * 128 + (byte % 128 / 16 ^ row % 8) * 16 + byte % 16;
  }

  // Fills the bias of tile number count.
  FT_DEVICE static void load_bias(const Params& p, const Sequence& s, Bias& tiles, i32 consumer, u32 count, i32 head,
                                  i32 i_begin, i32 j_begin, bool is_loaded) {
    u32 stage = BiasStages::stage(count);
    u32 barrier = shared_address(&tiles.full[consumer][stage]), tile = shared_address(tiles.tiles[consumer][stage]);
    BiasStages::wait_empty(tiles.empty[consumer], count);
    if constexpr (mutates(Mutation::bwd_sm90_bias_row)) i_begin = max_of(i_begin - 1, 0);
    const BiasElement* rows = static_cast<const BiasElement*>(p.bias) + s.batch_idx * p.bias_strides[0] +
                              head * p.bias_strides[1] + i_begin * p.bias_strides[2] + j_begin * p.bias_strides[3];
    i32 num_rows = s.seqlen_q - i_begin, num_keys = s.seqlen_k - j_begin;
    i64 bytes = (p.bias_strides[0] | p.bias_strides[1] | p.bias_strides[2]) * sizeof(BiasElement);
    bytes |= reinterpret_cast<i64>(p.bias);
    if (is_loaded || num_keys <= 0) {
      // What the stage holds stays, or is not read
    } else if (p.bias_strides[3] == 1 && bytes % 16 == 0) {
      copy_bias<16>(tile, rows, p.bias_strides[2], num_rows, num_keys);
    } else if (p.bias_strides[3] == 1 && bytes % 4 == 0) {
      copy_bias<4>(tile, rows, p.bias_strides[2], num_rows, num_keys);
    } else {
#pragma unroll 1
      for (i32 x = threadIdx.x % 32; x < 64 * 64; x += 32) {
        i32 row = x / 64, key = x % 64;
        bool is_valid = row < num_rows && key < num_keys;
        BiasElement element = from_float<BiasElement>(0.0f);
        if (is_valid) element = rows[row * p.bias_strides[2] + key * p.bias_strides[3]];
        char* to = reinterpret_cast<char*>(tiles.tiles[consumer][stage]) + bias_offset(row, key);
        *reinterpret_cast<BiasElement*>(to) = element;
      }
      mbarrier_arrive(tiles.full[consumer][stage]);
      return;
    }
    arrive_after_copies(barrier);
  }

  // Prepares query tile m of head number h of the block for one consumer. count is the number of tiles before it, first
  // that of the tiles before the first with the same keys.
  template <class Tile>
  FT_DEVICE static void prepare(const Params& p, Storage& shared, const Tile& tile, i32 consumer, i32 h, i32 m,
                                u32 count, u32 first) {
    const Sequence& s = tile.s;
    i32 head = tile.first_head + h, j_begin = tile.j_begin + 64 * consumer;
    i32 i_begin = m * Config::kBlockM, i = i_begin + 2 * static_cast<i32>(threadIdx.x % 32);
    if constexpr (ScoreMod::kHasBias) {
      bool is_loaded = p.bias_strides[2] == 0 && (p.bias_strides[1] == 0 || tile.num_heads == 1) &&
                       count - first >= Config::kNumBiasStages;
      load_bias(p, s, shared, consumer, count, head, i_begin, j_begin, is_loaded);
    }
    if constexpr (Mask::kHasBool) {
      bool is_same = p.mask_strides[2] == 0 && (p.mask_strides[1] == 0 || tile.num_heads == 1) && count > first;
      if (is_same) {
        repeat_words(shared, consumer, count);
      } else {
        u32 words[4];
        load_words(p, s, consumer, head, i, tile.j_begin, words);
        store_words(shared, consumer, count, words);
      }
    }
  }

  // Prepares every tile for one consumer: the query tiles [m_begin, m_end) of num_heads heads from first_head on, all
  // of the sequence s, with the consumer's half of the keys from j_begin on. count grows.
  template <class Tile>
  FT_DEVICE static void produce(const Params& p, Storage& shared, const Tile& tile, i32 consumer, u32& count) {
    u32 first = count;
    for (i32 h = 0; h < tile.num_heads && kHasTiles; ++h) {
      for (i32 m = tile.m_begin; m < tile.m_end; ++m, ++count) prepare(p, shared, tile, consumer, h, m, count, first);
    }
  }

  // ---- Consumer. An object of this class is what one consumer needs of one tile. Products in flight keep shared
  // memory busy: a load takes some 400 clocks. So bits are loaded before the consumer's turn, the rest in one go after
  // it.

  struct Bits {
    u32 seen;        // by the mask: bit b + 8 r + 16 e is row r, column 8 b + e of the fragment
    u32 kept;        // by dropout, in the order of `is_kept`
    bool is_masked;  // false if the mask hides nothing of this tile
  };
  // Waits for the mask's bits of tile number count and draws those of dropout. Scope: warp.
  FT_DEVICE static Bits load_bits(const Params& p, Storage& shared, const Sequence& s, i32 consumer, u32 count,
                                  i32 head, i32 i_begin, i32 j_begin) {
    Bits bits{};
    if constexpr (Mask::kHasBool) {
      mbarrier_wait(shared.MaskBits::full[consumer], count % 2);
      bits.is_masked = shared.MaskBits::is_full[consumer] == 0;
      bits.seen = take_bits(shared, consumer);
    }
    if constexpr (Dropout::kIsOn) bits.kept = draw_bits(p, s, head, i_begin, j_begin);
    return bits;
  }
  // A thread's bits of the mask, and the release of their tile. Scope: warp.
  FT_DEVICE static u32 take_bits(MaskBits& tiles, i32 consumer) {
    i32 lane = threadIdx.x % 32;
    const uint4* words = reinterpret_cast<const uint4*>(tiles.words[consumer][threadIdx.x % 128 / 32] + lane % 4 * 8);
    uint4 low = words[0], high = words[1];
    const u32 pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    u32 bits = 0;
#pragma unroll
    for (i32 b = 0; b < 8; ++b) bits += (pairs[b] >> lane / 4 & 0x01010101u) << b;
    asm volatile("" : "+r"(bits)::"memory");
    __syncwarp();
    release_stage(tiles.empty[consumer]);
    return bits;
  }
  // A thread's dropout bits. The 8 keys of a row of lanes are one group: a lane draws the groups of every 32nd query,
  // packs a bit for each key, and one shuffle brings the bits of four elements. Scope: warp.
  FT_DEVICE static u32 draw_bits(const Params& p, const Sequence& s, i32 head, i32 i_begin, i32 j_begin) {
    DropoutBits random(p, s, head);
    i32 lane = threadIdx.x % 32, group = (j_begin + static_cast<i32>(threadIdx.x) % 128 / 32 * 16) / 8;
    u32 drawn = 0, bits = 0, threshold = random.threshold << 16;
#pragma unroll
    for (i32 part = 0; part < 4; ++part) {
      uint4 words = random.words(i_begin + 32 * (part % 2) + lane, group + part / 2);
      const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        if (pairs[w] << 16 >= threshold) drawn |= 1u << (8 * part + 2 * w);
        if (pairs[w] >= threshold) drawn |= 2u << (8 * part + 2 * w);
      }
    }
#pragma unroll
    for (i32 x = 0; x < 8; ++x) {
      u32 got = __shfl_sync(0xffffffffu, drawn, 8 * (x / 2) + fragment_column() + x % 2) >> lane / 4;
      bits += (got & 0x01010101u) << x;
    }
    return bits;
  }
  // Whether the mask, or dropout, leaves row r, column 8 b + e. Scope: thread.
  FT_DEVICE bool is_seen(i32 b, i32 r, i32 e) const { return (bits.seen & 1u << (b + 8 * r + 16 * e)) != 0; }
  FT_DEVICE bool is_kept(i32 b, i32 r, i32 e) const {
    if constexpr (!Dropout::kIsOn) return true;
    if constexpr (mutates(Mutation::bwd_sm90_dropout)) r ^= 1;
    return (bits.kept & 1u << (2 * (b % 4) + e + 8 * (b / 4 + 2 * r))) != 0;
  }

  // Words of the bias that a thread has of columns 8 b .. 8 b + 15: pairs of elements in 16 bits, or elements
  static constexpr i32 kBiasWords = sizeof(BiasElement) == 4 ? 8 : 4;
  // All of the bias is loaded ahead if registers allow, else two columns of tiles at a time
  static constexpr bool kLoadsBiasAhead = ScoreMod::kHasBias && sizeof(BiasElement) == 2 && kNumOptions == 1;
  static constexpr i32 kBiasFragments = kLoadsBiasAhead ? kScores / 8 : 2;

  static constexpr bool kLoadsLseAhead = Config::kHasOneProduct && kNumOptions == 1;
  static constexpr i32 kLsesAhead = kLoadsLseAhead            ? kScores / 4
                                    : !Config::kHasOneProduct ? (kIsSplit ? 4 : 2)
                                    : kNumOptions > 2         ? 1
                                                              : 2;
  static constexpr i32 kDeltasAhead = ScoreMod::kHasDerivative ? 3 : kScores / 4;

  const Params& p;
  Storage& shared;
  i32 consumer;
  u32 count;
  float2 lse[kScores / 4];
  Bits bits;
  u32 bias[kBiasFragments][kBiasWords];
  typename Scores::template BackwardTile<true> scores;

  // Waits for the bias of tile number count, and loads it. Scope: warpgroup.
  FT_DEVICE BwdSm90Options(const Params& p, Storage& shared, const Sequence& s, i32 consumer, u32 count, i32 head,
                           i32 i_begin, i32 j_begin, const Bits& bits, const float* sLse)
      : p(p), shared(shared), consumer(consumer), count(count), bits(bits) {
    if constexpr (kChangesTiles) {
#pragma unroll
      for (i32 b = 0; b < kLsesAhead; ++b) lse[b] = stats(sLse, b);
    }
    if constexpr (Scores::kHasRows) {
      scores.open(p, s, head);
      i32 distance = i_begin + fragment_column() + s.offset - j_begin - fragment_row();
      if constexpr (mutates(Mutation::bwd_sm90_alibi)) distance -= s.offset;
      scores.place(distance);
      if constexpr (ScoreMod::kHasFunction) scores.place_at(i_begin + fragment_column(), j_begin + fragment_row());
    }
    if constexpr (ScoreMod::kHasBias) {
      BiasStages::wait_full(shared.Bias::full[consumer], count);
#pragma unroll
      for (i32 x = 0; x < (kLoadsBiasAhead ? kBiasFragments : 1); ++x) load_bias_fragment(2 * x);
      if constexpr (kLoadsBiasAhead) release_bias();
    }
  }

  // Starts loading the bias of columns 8 b .. 8 b + 15. Scope: warp.
  FT_DEVICE void load_bias_fragment(i32 b) {
    i32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    u32(&words)[kBiasWords] = bias[b / 2 % kBiasFragments];
    if constexpr (sizeof(BiasElement) == 2) {
      u32 tile = shared_address(shared.Bias::tiles[consumer][BiasStages::stage(count)]);
      ldmatrix_x4_trans(words, tile + bias_offset(lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8) + b * 1024);
    } else {
      const char* tile = reinterpret_cast<const char*>(shared.Bias::tiles[consumer][BiasStages::stage(count)]);
#pragma unroll
      for (i32 x = 0; x < 8; ++x) {
        u32 offset = bias_offset(fragment_column() + x % 2, 16 * warp + lane / 4 + x / 2 % 2 * 8);
        words[x] = *reinterpret_cast<const u32*>(tile + offset + (b + x / 4) * 1024);
      }
    }
  }
  // Scope: warp.
  FT_DEVICE void release_bias() {
    __syncwarp();
    release_stage(shared.Bias::empty[consumer][BiasStages::stage(count)]);
  }
  // The bias of row r, column 8 b + e. Scope: thread.
  FT_DEVICE float bias_of(i32 b, i32 r, i32 e) const {
    if constexpr (!ScoreMod::kHasBias) {
      return 0.0f;
    } else if constexpr (sizeof(BiasElement) == 2) {
      u32 pair = bias[b / 2 % kBiasFragments][b % 2 * 2 + r];
      return to_float(BiasElement{static_cast<u16>(e == 0 ? pair : pair >> 16)});
    } else {
      return __int_as_float(bias[b / 2 % kBiasFragments][b % 2 * 4 + 2 * r + e]);
    }
  }
  // Before the scores of columns 8 b .. 8 b + 7: starts loading the bias of the columns after the next ones, or
  // releases its tile. Scope: warp.
  FT_DEVICE void advance_bias(i32 b) {
    if constexpr (ScoreMod::kHasBias && !kLoadsBiasAhead) {
      if (b % 2 == 0 && b + 2 < kScores / 4) load_bias_fragment(b + 2);
      if (b + 2 == kScores / 4) release_bias();
    }
  }

  // True if the fast softcap would not be accurate.
  FT_DEVICE bool needs_exact_tanh() const { return Scores::needs_exact_tanh(p); }

  // The factor of dV that its sums lack.
  FT_DEVICE static float dv_factor(const Params& p) {
    float factor = 1.0f / Scores::kProbFactor;
    return Dropout::kIsOn ? factor * p.keep_factor : factor;
  }

  // From the dot product S to the exponent of P (attn/score.cuh). Scope: thread.
  template <bool kIsChecked, bool kIsOfDot>
  FT_DEVICE float exponent(float dot, i32 b, i32 e, i32 r, float& derivative) const {
    float shift = scores.shift(r, 8 * b + e), row_lse = e == 0 ? lse[b].x : lse[b].y;
    float found = scores.template exponent<kIsChecked, kIsOfDot>(p, dot, r, 8 * b + e, row_lse, bias_of(b, r, e), shift,
                                                                 derivative);
    if constexpr (mutates(Mutation::bwd_sm90_softcap)) derivative = 0.25f;
    return found;
  }

  // Columns 8 b .. 8 b + 7: turns S^T into P^T. Where scores have a derivative, rS becomes P^T times it, and with
  // kIsOfDot P^T itself is packed. With kIsChecked, P is 0 outside the columns seen[r], and bounded. Scope: thread.
  template <bool kIsChecked, bool kIsMasked, bool kIsOfDot = true>
  FT_DEVICE void exponentiate_columns(i32 b, const Range (&seen)[2], float (&rS)[kScores],
                                      u32 (&packed_p)[kScores / 2]) const {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float kept[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        i32 x = 4 * b + 2 * r + e, column = 8 * b + e;
        float derivative;
        float power = exponent<kIsChecked, kIsOfDot>(rS[x], b, e, r, derivative);
        if constexpr (kIsChecked) {
          power = power > Scores::kLargestExponent ? Scores::kLargestExponent : power;
          power = column >= seen[r].begin && column < seen[r].end ? power : -infinity();
        }
        float prob = exp2_approx(power);
        if constexpr (kIsMasked) prob = is_seen(b, r, e) ? prob : 0.0f;
        if constexpr (ScoreMod::kHasDerivative) {
          rS[x] = Scores::weighted(prob, derivative);
          kept[e] = is_kept(b, r, e) ? prob : 0.0f;
        } else {
          rS[x] = prob;
        }
      }
      if constexpr (ScoreMod::kHasDerivative && kIsOfDot) packed_p[2 * b + r] = pack_two<T>(kept[0], kept[1]);
    }
  }

  // P * (dP - delta) with dropout of dP, of row r, column 8 b + e. Scope: thread.
  FT_DEVICE float score_gradient(float prob, float dp, float2 delta, i32 b, i32 r, i32 e) const {
    float row_delta = e == 0 ? delta.x : delta.y;
    if constexpr (!Dropout::kIsOn) return prob * (dp - row_delta);
    return prob * fmaf(is_kept(b, r, e) ? dp : 0.0f, p.keep_factor, -row_delta);
  }

  // Columns 8 b .. 8 b + 7: dS^T = P^T * (dP^T - delta), with dropout of dP^T and of the packed P^T. Scope: thread.
  FT_DEVICE void differentiate_columns(i32 b, float2 delta, const float (&rP)[kScores], const float (&rdP)[kScores],
                                       u32 (&packed_p)[kScores / 2], u32 (&packed_ds)[kScores / 2]) const {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float ds[2], kept[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        i32 x = 4 * b + 2 * r + e;
        kept[e] = is_kept(b, r, e) ? rP[x] : 0.0f;
        ds[e] = score_gradient(rP[x], rdP[x], delta, b, r, e);
      }
      packed_ds[2 * b + r] = pack_two<T>(ds[0], ds[1]);
      if constexpr (!ScoreMod::kHasDerivative) packed_p[2 * b + r] = pack_two<T>(kept[0], kept[1]);
    }
  }

  FT_DEVICE static void pin(float& a, float& b, float& c, float& d) {
    asm volatile("" : "+f"(a), "+f"(b), "+f"(c), "+f"(d)::"memory");
  }

  // After columns 8 b .. 8 b + 7: starts loading the lse of later ones. Scope: thread.
  FT_DEVICE void advance_lse(const float* sLse, i32 b) {
    if (b + kLsesAhead < kScores / 4) lse[b + kLsesAhead] = stats(sLse, b + kLsesAhead);
  }
  // With kLoadsLseAhead: nothing of lse is loaded after this. Scope: thread.
  FT_DEVICE void pin_lse() {
#pragma unroll
    for (i32 b = 0; b < kScores / 4; b += 2) pin(lse[b].x, lse[b].y, lse[b + 1].x, lse[b + 1].y);
  }

  // Statistics of a thread's queries among columns 8 b .. 8 b + 7. Scope: thread.
  FT_DEVICE static float2 stats(const float* sStats, i32 b) {
    return *reinterpret_cast<const float2*>(sStats + 8 * b + fragment_column());
  }

  // P^T and dS^T from S^T, which is complete, and dP^T, which is in flight. Scope: warpgroup.
  template <bool kIsChecked, bool kIsMasked>
  FT_DEVICE void differentiate(const Range (&seen)[2], const float* sLse, const float* sDelta, float (&rS)[kScores],
                               float (&rdP)[kScores], u32 (&packed_p)[kScores / 2], u32 (&packed_ds)[kScores / 2]) {
    float2 delta[kScores / 4];
    // Compute P^T while dP^T is in flight, unless that takes too many registers
    if constexpr (kIsSplit) {
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
        advance_bias(b);
        exponentiate_columns<kIsChecked, kIsMasked>(b, seen, rS, packed_p);
        advance_lse(sLse, b);
        // Finish these columns before the next: the checked body, which is rare, must not take more registers
        if constexpr (kIsChecked) pin(rS[4 * b], rS[4 * b + 1], rS[4 * b + 2], rS[4 * b + 3]);
      }
#pragma unroll
      for (i32 b = 0; b < kDeltasAhead; ++b) delta[b] = stats(sDelta, b);
      pin_registers(rS);
      wgmma_wait<0>();
      pin_registers(rdP);
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
        differentiate_columns(b, delta[b], rS, rdP, packed_p, packed_ds);
        if (b + kDeltasAhead < kScores / 4) delta[b + kDeltasAhead] = stats(sDelta, b + kDeltasAhead);
      }
    } else {
      wgmma_wait<0>();
      pin_registers(rdP);
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
        if (b % 2 == 0) {
          delta[b] = stats(sDelta, b);
          delta[b + 1] = stats(sDelta, b + 1);
        }
        advance_bias(b);
        exponentiate_columns<kIsChecked, kIsMasked>(b, seen, rS, packed_p);
        advance_lse(sLse, b);
        differentiate_columns(b, delta[b], rS, rdP, packed_p, packed_ds);
        pin(rdP[4 * b], rdP[4 * b + 1], rdP[4 * b + 2], rdP[4 * b + 3]);
      }
    }
  }

  // Adds the gradient of the bias, P^T * (dP^T - delta), to rSum. S^T and dP^T are
  // complete. With kIsChecked, nothing is added outside the columns seen[r]: rows there may be NaN. Scope: warpgroup.
  template <bool kIsChecked, bool kIsMasked>
  FT_DEVICE void add_score_gradient(const Range (&seen)[2], const float* sLse, const float2 (&delta)[kScores / 4],
                                    float (&rS)[kScores], const float (&rdP)[kScores], float (&rSum)[kScores]) {
    u32 no_p[kScores / 2];
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      advance_bias(b);
      exponentiate_columns<kIsChecked, kIsMasked, false>(b, seen, rS, no_p);
      advance_lse(sLse, b);
#pragma unroll
      for (i32 y = 0; y < 4; ++y) {
        i32 x = 4 * b + y, r = y / 2, e = y % 2, column = 8 * b + e;
        float ds = score_gradient(rS[x], rdP[x], delta[b], b, r, e);
        if constexpr (kIsChecked) ds = column >= seen[r].begin && column < seen[r].end ? ds : 0.0f;
        rSum[x] += ds;
      }
    }
  }
};

}  // namespace flashtile
