// Two tables over the positions of one selection, in shared memory, with open addressing.
//
// A table groups the entries of a selection by position. `insert` and `find` give a *group*; a group remembers one
// LRU row. Both serve the same phases of swap-in (and one serves seed):
//   KeyTable    keys beside each other in shared memory: fast, for selections of at most a quarter of kCells
//   EntryTable  2 bytes a cell, keys looked up in the selection: for any selection up to 32,767 entries
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
  static_assert(kBytes % (16 * kThreads) == 0);
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
#pragma unroll
  for (int i = 0; i < kBytes / 16; i += kThreads) static_cast<uint4*>(data)[i + threadIdx.x] = ones;
}

// A group is the cell that holds its position. Which entry of a group came first is not known from inserting;
// `s.repeated` says whether any position came twice, and only then do the entries settle it (`claim`, `first`).
template <int kLog2Cells>
struct KeyTable {
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

  // Three steps with a barrier between them; the keys are gone afterwards.
  __device__ __forceinline__ void propose(int group, int entry) { cells.key[group] = entry; }
  __device__ __forceinline__ void claim(int group, int entry) { atomicMin(&cells.key[group], entry); }
  __device__ __forceinline__ int first(int group) const { return cells.key[group]; }
};

// A group is its first entry, known once all entries are in; rows live in the request's part of `out`, which has an
// element an entry. Needs the CTA to be alone with its request.
struct EntryTable {
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
