// What swap-in is called with, what it is compiled for, and what it keeps in shared memory.
#pragma once

#include "hisparse.cuh"
#include "position_table.cuh"

#include <type_traits>

namespace hisparse {

struct SwapInParams {
  const int32_t* selected;  // [batch, top_k]
  int selected_stride;
  Indices seq_lens;              // [batch]
  Indices req_pool_indices;      // [batch]
  const int32_t* num_real_reqs;  // [1]
  const int32_t* req_to_token;   // [num_regions, max_context]
  int req_to_token_stride;
  Rows host;                  // [slots]
  Rows hot;                   // [num_regions * (num_lru_rows + page_size)]
  int32_t* owners;            // [num_regions, num_lru_rows]
  int16_t* lru_order;         // [num_regions, num_lru_rows]
  const int32_t* tail_start;  // [num_regions]
  int32_t* out;               // [batch, top_k]
  int out_stride;
  unsigned long long* counters;  // [3]
  int num_regions, max_context, top_k, num_lru_rows, page_size, row_chunks;
  int gate_width;  // CTAs of the device that may copy at a time; 0: all
};

// What a kernel is compiled for: threads of a CTA, entries and rows a thread may own, the table. kExact: top_k and
// num_lru_rows are exactly what the threads can own, so that nothing needs a bound.
template <int kThreads_, int kEntries_, int kRows_, class Table_, bool kExact_>
struct SwapInShape {
  using Table = Table_;
  static constexpr bool kExact = kExact_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kEntries = kEntries_;
  static constexpr int kRows = kRows_;
  static constexpr int kMaxTopK = kEntries * kThreads;
  static constexpr int kMaxLruRows = kRows * kThreads;
  static constexpr int kCtasPerSm = 1024 / kThreads;  // 64 registers a thread
  static constexpr int kUnroll = kEntries > 8 || kRows > 16 ? 1 : 32;  // what does not fit registers may be a loop
  static_assert(kWarps <= kWarp, "the warps' counts are scanned by one warp");
  static_assert(kEntries <= 32 && kRows <= 32, "a thread keeps one bit of each");

  static bool fits(const SwapInParams& p) {
    if constexpr (Table::kIsRanked) {
      if (p.max_context > Table::kPositions) return false;
    }
    return kExact ? p.top_k == kMaxTopK && p.num_lru_rows == kMaxLruRows
                  : p.top_k <= kMaxTopK && p.num_lru_rows <= kMaxLruRows;
  }
};

// kCount consecutive values, in loads of up to 16 bytes where kExact makes their addresses multiples of that.
template <int kCount, class T>
__device__ __forceinline__ void load_consecutive(T (&values)[kCount], const T* source) {
  constexpr int kBytes = kCount * sizeof(T);
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<int4*>(values)[i] = reinterpret_cast<const int4*>(source)[i];
  } else if constexpr (kBytes % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 8; ++i) reinterpret_cast<int2*>(values)[i] = reinterpret_cast<const int2*>(source)[i];
  } else {
    static_assert(kBytes % 4 == 0);
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) reinterpret_cast<int*>(values)[i] = reinterpret_cast<const int*>(source)[i];
  }
}

// The counterpart for bytes that lie in shared memory at a multiple of kCount.
template <int kCount>
__device__ __forceinline__ void store_consecutive(uint8_t* target, const uint8_t (&values)[kCount]) {
  using Word = std::conditional_t<kCount % 4 == 0, uint32_t, uint16_t>;
  static_assert(kCount % sizeof(Word) == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += sizeof(Word)) {
    Word word = 0;
#pragma unroll
    for (int b = 0; b < static_cast<int>(sizeof(Word)); ++b) word |= static_cast<Word>(values[i + b]) << 8 * b;
    *reinterpret_cast<Word*>(target + i) = word;
  }
}

template <class Shape>
struct SwapInShared {
  static constexpr int kMissWords = Shape::kMaxTopK / kWarp;
  union {
    typename Shape::Table::Cells cells;  // until the misses are known
    int32_t slot[Shape::kMaxTopK];       // from then on: host slot of each miss, -1 = outside the pool
  };
  typename Shape::Table::GroupRows group_rows;
  uint16_t victim[Shape::kMaxTopK];  // LRU row that each miss may take
  alignas(16) int16_t new_order[Shape::kExact ? Shape::kMaxLruRows : 8];
  union {
    alignas(16) uint8_t is_hit[Shape::kMaxLruRows];  // of each LRU row, until counted: its position is selected
    struct {
      uint32_t word[kMissWords];    // bit of miss k: slot[k] is -1
      int before[kMissWords];  // bits set in earlier words
    } bad;
  };
  uint32_t warp_ranks[Shape::kWarps];    // of each warp: hits | misses << 16
  uint32_t warp_entries[Shape::kWarps];  // of each warp: entries in the tail | resident entries << 16
  int repeated;                          // some position was selected twice
};
constexpr size_t kMaxSharedBytes = 227 * 1024;

}  // namespace hisparse
