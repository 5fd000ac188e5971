// Options of the Hopper forward (fwd_sm90.cuh): bool mask, band, softcap, ALiBi and bias between S and the softmax.
//
// Threads:  with a bias, one warp of the producer's warpgroup for each consumer copies its bias tiles. Consumers load
//           the bits of a mask (attn/mask_bits.cuh) from global memory, before their products.
// Shared:   a bias: [consumer][stage][64 queries][kBlockN keys], in pieces of 128 bytes a row whose 16-byte chunks are
//           swizzled as in tile/smem_tile.cuh. TMA copies it, or cp.async where rows are broadcast or not aligned.
//           Barriers: full and empty of each.
// Scores:   dot products without score modifiers; base 2 with them; natural with a bias (attn/score_unit.cuh).
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/score.cuh"
#include "device/attn/work_item.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/tma.cuh"
#include "device/tile/fragment.cuh"
#include "device/tile/pipeline.cuh"
#include "families/fwd_sm90/params.cuh"

namespace flashtile {

// Where a bias tile comes from.
template <typename BiasElement>
struct BiasRows {
  const BiasElement* first;  // its first element
  i32 num_rows, num_keys;    // from there on, of the sequence
  i32 num_heads;

  FT_DEVICE bool operator==(const BiasRows& other) const {
    return first == other.first && num_rows == other.num_rows && num_keys == other.num_keys &&
           num_heads == other.num_heads;
  }
};

template <class Config, typename BiasElement>
struct FwdBiasTiles {
  static constexpr i32 kPieces = (Config::kBlockN * static_cast<i32>(sizeof(BiasElement)) + 127) / 128;  // of a row
  static constexpr i32 kTileBytes = 64 * 128 * kPieces;
  // Two stages where shared memory holds them
  static constexpr i32 kOtherBytes = 1024 + 2 * (Config::kNumConsumers * (Config::kElementsQ + Config::kElementsP) +
                                                 Config::kNumStages * (Config::kElementsK + Config::kElementsV));
  static constexpr i32 kNumStages = kOtherBytes + 2 * Config::kNumConsumers * kTileBytes <= 227 * 1024 ? 2 : 1;
  alignas(1024) char tiles[Config::kNumConsumers][kNumStages][kTileBytes];
  u64 full[Config::kNumConsumers][kNumStages], empty[Config::kNumConsumers][kNumStages];
  BiasRows<BiasElement> held[Config::kNumConsumers][kNumStages];
};
template <class Config>
struct FwdBiasTiles<Config, NoBias> {
  static constexpr i32 kNumStages = 1;
};

template <class Config, class Mask, class ScoreMod, class SeqInfo>
struct FwdSm90Options {
  using BiasElement = typename ScoreMod::BiasElement;
  using Bias = FwdBiasTiles<Config, BiasElement>;
  using Tile = QueryTile<Config, Mask, SeqInfo>;
  using Packing = HeadPacking<Config>;
  using Rows = FragmentRows<Config>;
  static constexpr i32 kNumBiasStages = Bias::kNumStages;
  using BiasStages = Ring<kNumBiasStages>;
  using Scores = Score<ScoreMod>;
  using Tanh = typename Scores::Tanh;
  static constexpr i32 kBlockN = Config::kBlockN, kScores = kBlockN / 2;
  static constexpr bool kIsRough = kIsSame<typename Config::Element, bf16_t>;  // so may the softcap's tanh be
  static constexpr u32 kAllColumns = 0xffffffffu;
  using Offset = MaskOffset<Config>;

  // Lets the key tiles of a work item begin and end with one that the bool mask leaves. Scope: thread.
  template <class Item>
  FT_DEVICE static void trim(const FwdSm90Params& params, Item& item) {
    if constexpr (Mask::kHasBool) {
      const Params& p = params.base;
      Tile& tile = item.tile;
      i32 head = tile.coord.head, i_end = min_of(tile.i_begin + Packing::block_queries(p), tile.s.seqlen_q);
      if (!tile.has_keys()) return;
      item.template find<kBlockN>(p, tile.s.batch_idx, head, Packing::num_heads(p, head), tile.i_begin, i_end);
      item.trim(tile.n_begin, tile.n_end);
    }
  }

  // ---- Consumer

  // What a thread keeps of its two rows of a work item. Scope: thread.
  struct RowState {
    Offset bits[2];  // where its rows of the mask's bits begin
    typename Scores::Rows scores;

    template <class Item>
    FT_DEVICE RowState(const FwdSm90Params& params, const Item& item, i32 consumer) {
      if constexpr (Mask::kHasBool || Scores::kHasRows) {
        const Params& p = params.base;
        const Tile& tile = item.tile;
        Rows rows(p, tile, consumer);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          // Rows past the last query are computed but must not read past it
          i32 head = rows.head(tile, r), i = clamp(rows.i[r], 0, tile.s.seqlen_q - 1);
          if constexpr (Mask::kHasBool) {
            i32 i_first = max_of(tile.i_begin, 0);
            if constexpr (mutates(Mutation::fwd_sm90_mask_row)) i = max_of(i - 1, i_first);
            bits[r] = item.template row_offset<Config>(head - tile.coord.head, i - i_first);
          }
          scores.template find<!Config::kPacksHeads>(r, p, tile.s, head, i);
        }
      }
    }
  };

  // Bits of the mask of a tile, for each row. They are loaded before the products, which hide the latency.
  struct Early {
    u32 seen[2];
  };
  template <bool kIsMasked, class Item>
  FT_DEVICE static Early load_early(const Item& item, const RowState& rows, i32 n) {
    Early early{{kAllColumns, kAllColumns}};
    if constexpr (Mask::kHasBool && kIsMasked) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const uint4* words = item.bits + (rows.bits[r] + static_cast<Offset>(n));
        early.seen[r] = reinterpret_cast<const u32*>(words)[threadIdx.x % 4];
      }
    }
    return early;
  }

  // From dot products to scores, and -inf where a query does not see a key. Scope: warp.
  template <bool kIsMasked>
  FT_DEVICE static void modify(const FwdSm90Params& params, Bias& bias, const Tile& tile, i32 consumer, i32 n,
                               Early early, const RowState& state, u32& num_biases, float (&rS)[kScores]) {
    const Params& p = params.base;
    // Use the loaded bits no earlier than here: a product issued after such a use would wait for the loads
    if constexpr (Mask::kHasBool && kIsMasked) asm volatile("" : "+r"(early.seen[0]), "+r"(early.seen[1]));
    if constexpr (ScoreMod::kChangesScores) {
      auto apply = [&](auto is_exact) {
        constexpr Tanh kTanh = kIsRough ? Tanh::kRough : decltype(is_exact)::kValue ? Tanh::kExact : Tanh::kFast;
        // Where all keys of the warp's rows are on one side of the diagonal, the sign of the distances is known
        i32 side = ScoreMod::kHasAlibi ? side_of_diagonal(p, tile, consumer, n) : 0;
        if (ScoreMod::kHasAlibi && side != 0) {
          score<kTanh, true>(p, bias, tile, consumer, n, state, side, num_biases, rS);
        } else {
          score<kTanh, false>(p, bias, tile, consumer, n, state, 0, num_biases, rS);
        }
      };
      if (ScoreMod::kHasSoftcap && !kIsRough && Scores::needs_exact_tanh(p)) {
        apply(Constant<true>());
      } else {
        apply(Constant<false>());
      }
    }
    if constexpr (kIsMasked) {
      Rows rows(p, tile, consumer);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        u32 seen = early.seen[r];
        // The edges of the sequence and of the band
        if constexpr (Mask::kHasBand || SeqInfo::kHasLengths || !Mask::kHasBool) {
          i32 i = min_of(rows.i[r], tile.s.seqlen_q - 1), j_first = n * kBlockN + fragment_column();
          Range keys = key_range<Mask>(p, tile.s, i, i + 1);
          i32 end = keys.end - j_first;
          if constexpr (mutates(Mutation::fwd_sm90_mask_offset)) end += Mask::kHasBand ? 1 : 0;
          seen &= columns_below(end);
          if constexpr (Mask::kHasBand) seen &= ~columns_below(keys.begin - j_first);
        }
#pragma unroll
        for (i32 x = 0; x < kScores / 2; ++x) {
          float& score = rS[x / 2 * 4 + 2 * r + x % 2];
          score = (seen >> x & 1u) != 0 ? score : -infinity();
        }
      }
    }
  }

  // 1 where no query of the consumer is before a key of tile n, -1 where none is after one, else 0. Scope: thread.
  FT_DEVICE static i32 side_of_diagonal(const Params& p, const Tile& tile, i32 consumer, i32 n) {
    i32 num_queries = Packing::num_queries(p);
    i32 first = tile.i_begin + num_queries * consumer + tile.s.offset - n * kBlockN;  // query before key
    return first >= kBlockN - 1 ? 1 : first + num_queries - 1 <= 0 ? -1 : 0;
  }

  // With kIsOneSided, `side` is the sign of all distances. Scope: warp.
  template <Tanh kTanh, bool kIsOneSided>
  FT_DEVICE static void score(const Params& p, Bias& bias, const Tile& tile, i32 consumer, i32 n, const RowState& state,
                              i32 side, u32& num_biases, float (&rS)[kScores]) {
    typename Scores::template ForwardTile<kTanh, kIsOneSided> scores(p);
    if constexpr (Scores::kHasRows) {
      Rows rows(p, tile, consumer);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 distance = rows.i[r] + tile.s.offset - n * kBlockN - fragment_column();
        if constexpr (mutates(Mutation::fwd_sm90_alibi)) distance -= tile.s.offset;
        scores.place(r, state.scores, distance, side);
        if constexpr (ScoreMod::kHasFunction) {
          scores.place_at(r, tile.s, state.scores, rows.i[r], n * kBlockN + fragment_column());
        }
      }
    }
    u32 address = 0;
    if constexpr (ScoreMod::kHasBias) {
      BiasStages::wait_full(bias.full[consumer], num_biases);
      address = shared_address(bias.tiles[consumer][BiasStages::stage(num_biases)]);
    }
#pragma unroll
    for (i32 b = 0; b < kScores / 4; b += 2) {
      float added[8];
      if constexpr (ScoreMod::kHasBias) load_bias_fragment(address, b, added);
#pragma unroll
      for (i32 x = 0; x < 8; ++x) {
        i32 r = x / 2 % 2, column = 8 * (b + x / 4) + x % 2;
        scores.score(p, rS[4 * b + x], r, column, ScoreMod::kHasBias ? added[x] : 0.0f);
      }
    }
    if constexpr (ScoreMod::kHasBias) {
      __syncwarp();
      release_stage(bias.empty[consumer][BiasStages::stage(num_biases)]);
      ++num_biases;
    }
  }

  // ---- Bias tiles

  // The byte offset of an element in its tile. Scope: thread.
  FT_DEVICE static u32 bias_offset(i32 row, i32 key) {
    i32 byte = key * static_cast<i32>(sizeof(BiasElement));
    return byte / 128 * (64 * 128) + row * 128 + (byte % 128 / 16 ^ row % 8) * 16 + byte % 16;
  }

  // The bias of columns 8 b .. 8 b + 15 of the fragment. Scope: warp.
  FT_DEVICE static void load_bias_fragment(u32 tile, i32 b, float (&added)[8]) {
    i32 lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16;
    if constexpr (sizeof(BiasElement) == 2) {
      u32 words[4];
      ldmatrix_x4(words, tile + bias_offset(first_row + lane % 16, 8 * b + lane / 16 * 8));
#pragma unroll
      for (i32 x = 0; x < 8; ++x) {
        u32 pair = words[x / 2];
        added[x] = to_float(BiasElement{static_cast<u16>(x % 2 == 0 ? pair : pair >> 16)});
      }
    } else {
#pragma unroll
      for (i32 x = 0; x < 4; ++x) {
        u32 from = tile + bias_offset(first_row + lane / 4 + x % 2 * 8, 8 * (b + x / 2) + fragment_column());
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(added[2 * x]), "=f"(added[2 * x + 1]) : "r"(from));
      }
    }
  }

  FT_DEVICE static void init(Bias& bias) {
    if constexpr (ScoreMod::kHasBias) {
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        for (i32 stage = 0; stage < kNumBiasStages; ++stage) {
          mbarrier_init(bias.full[consumer][stage], 32);
          mbarrier_init(bias.empty[consumer][stage], 4);
          bias.held[consumer][stage].first = nullptr;
        }
      }
    }
  }

  using Source = BiasRows<BiasElement>;

  // The address of key 0 of a row of a tile; null where it has no query. Scope: thread.
  FT_DEVICE static const BiasElement* row_of(const Params& p, const Source& source, i32 row) {
    if constexpr (Config::kPacksHeads) {
      i32 num_queries = Packing::num_queries(p), head = row / num_queries, i = row - head * num_queries;
      bool is_query = head < source.num_heads && i < source.num_rows;
      return is_query ? source.first + head * p.bias_strides[1] + i * p.bias_strides[2] : nullptr;
    } else {
      return row < source.num_rows ? source.first + row * p.bias_strides[2] : nullptr;
    }
  }

  // Starts copying a tile in pieces of kBytes. Scope: warp.
  template <i32 kBytes>
  FT_DEVICE static void copy_bias(const Params& p, u32 tile, const Source& source) {
    constexpr i32 kSize = sizeof(BiasElement), kKeys = kBytes / kSize, kPieces = kBlockN / kKeys;  // of a row
#pragma unroll 2
    for (i32 x = threadIdx.x % 32; x < 64 * kPieces; x += 32) {
      i32 row = x / kPieces, key = x % kPieces * kKeys;
      const BiasElement* from = row_of(p, source, row);
      i32 num_valid = from == nullptr ? 0 : clamp((source.num_keys - key) * kSize, 0, kBytes);
      cp_async<kBytes>(tile + bias_offset(row, key), num_valid > 0 ? from + key : source.first, num_valid);
    }
  }

  // Copies a tile element by element. Scope: warp.
  FT_DEVICE static void copy_bias_elements(const Params& p, u32 tile, const Source& source) {
    constexpr i32 kAtOnce = 8;  // loads in flight
    i32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (i32 x = lane; x < 8 * kBlockN; x += 32) {
      // One key of 8 rows
      i32 first_row = x / kBlockN * 8, key = x % kBlockN;
      BiasElement elements[kAtOnce];
#pragma unroll
      for (i32 y = 0; y < kAtOnce; ++y) {
        const BiasElement* from = row_of(p, source, first_row + y);
        elements[y] = from_float<BiasElement>(0.0f);
        if (from != nullptr && key < source.num_keys) elements[y] = from[key * p.bias_strides[3]];
      }
#pragma unroll
      for (i32 y = 0; y < kAtOnce; ++y) store_shared(tile + bias_offset(first_row + y, key), elements[y]);
    }
  }
  FT_DEVICE static void store_shared(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
  }
  template <typename T>
  FT_DEVICE static void store_shared(u32 address, T x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x.bits) : "memory");
  }

  // Starts copying a tile by TMA. Scope: warp.
  FT_DEVICE static void load_boxes(const FwdSm90Params& params, Bias& bias, const Tile& tile, i32 consumer, u32 stage,
                                   i32 i_first, i32 j_first) {
    constexpr i32 kKeys = 128 / static_cast<i32>(sizeof(BiasElement));  // of a box
    const Params& p = params.base;
    u64& full = bias.full[consumer][stage];
    if (elect_lane()) {
      i32 batch_idx = p.bias_strides[0] == 0 ? 0 : tile.s.batch_idx;
      i32 head = p.bias_strides[1] == 0 ? 0 : tile.coord.head;
      mbarrier_arrive_expect(full, Bias::kTileBytes);
      for (i32 piece = 0; piece < Bias::kPieces; ++piece) {
        load_box(bias.tiles[consumer][stage] + piece * (64 * 128), params.bias_map, full, j_first + piece * kKeys,
                 i_first, head, batch_idx);
      }
    } else {
      mbarrier_arrive(full);
    }
  }

  // Fills tile number count of one consumer. A tile that its stage holds is not copied again. Scope: warp.
  FT_DEVICE static void load_bias(const FwdSm90Params& params, Bias& bias, const Tile& tile, i32 consumer, i32 n,
                                  u32 count) {
    const Params& p = params.base;
    u32 stage = BiasStages::stage(count);
    u32 to = shared_address(bias.tiles[consumer][stage]);
    i32 i_first = tile.i_begin + Packing::num_queries(p) * consumer, j_first = n * kBlockN;
    if constexpr (mutates(Mutation::fwd_sm90_bias_row)) i_first = max_of(i_first - 1, 0);
    i64 first = tile.s.batch_idx * p.bias_strides[0] + tile.coord.head * p.bias_strides[1] +
                i_first * p.bias_strides[2] + j_first * p.bias_strides[3];
    Source source{static_cast<const BiasElement*>(p.bias) + first, tile.s.seqlen_q - i_first, tile.s.seqlen_k - j_first,
                  Packing::num_heads(p, tile.coord.head)};
    i64 bytes = (p.bias_strides[0] | p.bias_strides[1] | p.bias_strides[2]) * sizeof(BiasElement);
    bytes |= reinterpret_cast<i64>(p.bias);
    BiasStages::wait_empty(bias.empty[consumer], count);
    Source& held = bias.held[consumer][stage];
    if (!(held == source)) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) held = source;
      __syncwarp();
      if (!Config::kPacksHeads && p.bias_strides[3] == 1 && bytes % 16 == 0 && p.bias_strides[2] != 0) {
        load_boxes(params, bias, tile, consumer, stage, i_first, j_first);
        return;
      }
      if (p.bias_strides[3] == 1 && bytes % 16 == 0) {
        copy_bias<16>(p, to, source);
      } else if (p.bias_strides[3] == 1 && bytes % 4 == 0) {
        copy_bias<4>(p, to, source);
      } else {
        copy_bias_elements(p, to, source);
        mbarrier_arrive(bias.full[consumer][stage]);
        return;
      }
    }
    arrive_after_copies(shared_address(&bias.full[consumer][stage]));
  }
};

}  // namespace flashtile
