// Tables over the positions of one selection, in shared memory.
//
// A table groups the entries of a selection by position, and a *group* remembers one LRU row:
//   RankTable   a bit for every position of the context; a group is the rank of its bit. No search, so loads of
//               many positions overlap; for contexts of up to kPositions
//   KeyTable    open addressing, keys beside each other: for selections of at most a quarter of kCells
//   EntryTable  open addressing, 2 bytes a cell, keys looked up in the selection: for any selection up to 32,767
//               entries; serves seed too
#pragma once

#include "hisparse.cuh"

namespace hisparse {

constexpr int kNoGroup = -1;
constexpr int kNoRow = -1;

// Fibonacci hashing: consecutive positions, which selections are full of, land far apart.
template <int kLog2Cells>
__device__ __forceinline__ unsigned home_cell(int32_t position) {
  return (static_cast<uint32_t>(position) * 2654435769u) >> (32 - kLog2Cells);
}

// Fills kBytes at `data` with ones, by all threads of the CTA.
template <int kThreads, int kBytes>
__device__ __forceinline__ void fill_with_ones(void* data) {
  static_assert(kBytes % 16 == 0);
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
#pragma unroll
  for (int i = threadIdx.x; i < kBytes / 16; i += kThreads) static_cast<uint4*>(data)[i] = ones;
}

// Bit p: position p is selected. `rank` = selected positions below p = base of p's segment (the words that one warp
// counts) + those before p's word in its segment + those before p in its word.
template <int kThreads, int kWordsPerThread, int kMaxEntries>
struct RankTable {
  static constexpr bool kIsRanked = true;
  static constexpr bool kGroupIsFirstEntry = false;
  static constexpr int kWords = kThreads * kWordsPerThread;
  static constexpr int kPositions = kWords * 32;
  static constexpr int kWordsPerSegment = kWordsPerThread * kWarp;
  struct alignas(16) Cells {
    uint32_t word[kWords];
  };
  struct alignas(16) GroupRows {
    int16_t row[kMaxEntries];
    uint16_t before_word[kWords];  // selected positions in earlier words of the segment
    uint32_t segment_counts[kThreads / kWarp];  // selected positions | entries << 16
    int first_entry[kMaxEntries];  // only where positions repeat
  };

  // A position looked up: its word's bits below it, and whether its own is set.
  struct Place {
    int word;
    int before_in_word;
    bool is_selected;
  };

  Cells& cells;
  GroupRows& groups;

  __device__ __forceinline__ void clear() {
    fill_with_ones<kThreads, sizeof(groups.row)>(groups.row);
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kWords / 4; i += kThreads) reinterpret_cast<uint4*>(cells.word)[i + threadIdx.x] = none;
  }
  __device__ __forceinline__ void select(int32_t position) {
    atomicOr(&cells.word[position >> 5], 1u << (position & 31));
  }
  __device__ __forceinline__ Place place(int32_t position) const {
    const uint32_t word = cells.word[position >> 5];
    const uint32_t bit = 1u << (position & 31);
    return {position >> 5, __popc(word & (bit - 1)), (word & bit) != 0};
  }
  // Counts this thread's words, and its `entries` that have been selected; by all threads, after a barrier that
  // follows the last `select`.
  __device__ __forceinline__ void count_words(int entries) {
    uint32_t count = 0, before[kWordsPerThread];
    const uint32_t* words = cells.word + threadIdx.x * kWordsPerThread;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(words + i);
      before[i] = count, count += __popc(four.x);
      before[i + 1] = count, count += __popc(four.y);
      before[i + 2] = count, count += __popc(four.z);
      before[i + 3] = count, count += __popc(four.w);
    }
    const uint32_t through = sum_through_lane(count | entries << 16);
    const uint32_t first = (through & 0xffff) - count;
    uint2* out = reinterpret_cast<uint2*>(groups.before_word + threadIdx.x * kWordsPerThread);
#pragma unroll
    for (int i = 0; i < kWordsPerThread; i += 4) {
      out[i / 4] = make_uint2(first + before[i] | (first + before[i + 1]) << 16,
                              first + before[i + 2] | (first + before[i + 3]) << 16);
    }
    if (threadIdx.x % kWarp == kWarp - 1) groups.segment_counts[threadIdx.x / kWarp] = through;
  }
  // After a barrier that follows `count_words`: the base of segment `lane`, to be handed to `rank`.
  // `repeated`: more entries than positions were selected.
  __device__ __forceinline__ int segment_base(bool& repeated) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t counts = lane < kThreads / kWarp ? groups.segment_counts[lane] : 0;
    const uint32_t through = sum_through_lane(counts);
    const uint32_t total = __shfl_sync(kAllLanes, through, kWarp - 1);
    repeated = (total & 0xffff) != total >> 16;
    return (through - counts) & 0xffff;
  }
  // By all lanes together; of use where the place is selected.
  __device__ __forceinline__ int rank(const Place& place, int base_of_my_segment) const {
    const int base = __shfl_sync(kAllLanes, base_of_my_segment, place.word / kWordsPerSegment);
    return place.is_selected ? base + groups.before_word[place.word] + place.before_in_word : 0;
  }
  __device__ __forceinline__ int row(int group) const { return groups.row[group]; }
  __device__ __forceinline__ void set_row(int group, int row) { groups.row[group] = static_cast<int16_t>(row); }

  __device__ __forceinline__ void propose(int group, int entry) { atomicExch(&groups.first_entry[group], entry); }
  __device__ __forceinline__ void claim(int group, int entry) { atomicMin(&groups.first_entry[group], entry); }
  __device__ __forceinline__ int first(int group) const { return groups.first_entry[group]; }
};

// A group is the cell that holds its position. Which entry of a group came first is not known from inserting;
// `s.repeated` says whether any position came twice, and only then do the entries settle it (`claim`, `first`).
template <int kLog2Cells>
struct KeyTable {
  static constexpr bool kIsRanked = false;
  static constexpr bool kGroupIsFirstEntry = false;
  static constexpr int kCells = 1 << kLog2Cells;
  static constexpr int kMaxEntries = kCells / 4;
  struct alignas(16) Cells {
    int32_t key[kCells];  // -1 = empty; after probing, the first entry of each group
  };
  struct alignas(16) GroupRows {
    int16_t row[kCells];
  };

  Cells& cells;
  GroupRows& rows;

  template <int kThreads>
  __device__ __forceinline__ void clear() {
    fill_with_ones<kThreads, sizeof(Cells)>(&cells);
    fill_with_ones<kThreads, sizeof(GroupRows)>(&rows);
  }
  __device__ __forceinline__ int insert(int32_t position, int /*entry*/, int& repeated) {
    unsigned cell = home_cell<kLog2Cells>(position);
#pragma unroll 1
    while (true) {
      const int32_t key = atomicCAS(&cells.key[cell], -1, position);
      if (key == position) repeated = 1;
      if (key == -1 || key == position) return cell;
      cell = (cell + 1) & (kCells - 1);
    }
  }
  __device__ __forceinline__ int find(int32_t position) const {
    unsigned cell = home_cell<kLog2Cells>(position);
    int32_t key = cells.key[cell];
#pragma unroll 1
    while (key != position && key != -1) {
      cell = (cell + 1) & (kCells - 1);
      key = cells.key[cell];
    }
    return key == position ? static_cast<int>(cell) : kNoGroup;
  }
  __device__ __forceinline__ int row(int group) const { return rows.row[group]; }
  __device__ __forceinline__ void set_row(int group, int row) { rows.row[group] = static_cast<int16_t>(row); }

  // Three steps with a barrier between them; the keys are gone afterwards. Any entry may win the first step; it is
  // atomic for racecheck's sake.
  __device__ __forceinline__ void propose(int group, int entry) { atomicExch(&cells.key[group], entry); }
  __device__ __forceinline__ void claim(int group, int entry) { atomicMin(&cells.key[group], entry); }
  __device__ __forceinline__ int first(int group) const { return cells.key[group]; }
};

// A group is its first entry, known once all entries are in; rows live in the request's part of `out`, which has an
// element an entry. Needs the CTA to be alone with its request.
struct EntryTable {
  static constexpr bool kIsRanked = false;
  static constexpr bool kGroupIsFirstEntry = true;
  static constexpr int kLog2Cells = 16;
  static constexpr int kCells = 1 << kLog2Cells;
  static constexpr int kMaxEntries = kCells / 2 - 1;
  static constexpr unsigned short kEmpty = 0xffff;
  struct alignas(16) Cells {
    unsigned short entry[kCells];
  };
  struct GroupRows {};

  Cells& cells;
  const int32_t* positions;  // the selection, [entries]
  int32_t* rows;             // [entries]; null where rows are not asked for

  template <int kThreads>
  __device__ __forceinline__ void clear() {
    fill_with_ones<kThreads, sizeof(Cells)>(&cells);
  }
  __device__ __forceinline__ int insert(int32_t position, int entry, int& /*repeated*/) {
    const unsigned short mine = static_cast<unsigned short>(entry);
    unsigned cell = home_cell<kLog2Cells>(position);
    while (true) {
      unsigned short seen = atomicCAS(&cells.entry[cell], kEmpty, mine);
      if (seen == kEmpty) break;
      if (positions[seen] == position) {  // the cell is this position's for good: make it name the first entry
        while (seen > mine) {
          const unsigned short now = atomicCAS(&cells.entry[cell], seen, mine);
          if (now == seen) break;
          seen = now;
        }
        break;
      }
      cell = (cell + 1) & (kCells - 1);
    }
    if (rows != nullptr) rows[entry] = kNoRow;
    return kNoGroup;  // not known yet: `find` after the barrier
  }
  __device__ __forceinline__ int find(int32_t position) const {
    unsigned cell = home_cell<kLog2Cells>(position);
    while (true) {
      const unsigned short entry = cells.entry[cell];
      if (entry == kEmpty) return kNoGroup;
      if (positions[entry] == position) return entry;
      cell = (cell + 1) & (kCells - 1);
    }
  }
  __device__ __forceinline__ int row(int group) const { return rows[group]; }
  __device__ __forceinline__ void set_row(int group, int row) { rows[group] = row; }
};

}  // namespace hisparse
