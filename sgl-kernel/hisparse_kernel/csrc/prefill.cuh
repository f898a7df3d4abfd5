// What prefill and admission need besides the store: gather host rows, seed and reset regions.
#pragma once

#include "hisparse.cuh"
#include "position_table.cuh"

namespace hisparse {

// ---- gather: workspace[row_ids[i]] = host[slots[i]] -------------------------------------------------------------

constexpr int kGatherThreads = 512;

struct GatherParams {
  Indices slots, row_ids;  // [n]
  Rows host, workspace;
  int64_t num_rows;
  int row_chunks;
};

template <class Row, int kInFlight>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  copy_rows<Row, kInFlight>(blockIdx.x * kGatherThreads + threadIdx.x, gridDim.x * kGatherThreads,
                            static_cast<unsigned>(p.num_rows), p.row_chunks, [&](unsigned i) {
                              const int64_t slot = p.slots[i], row = p.row_ids[i];
                              const bool inside = p.host.contains(slot) && p.workspace.contains(row);
                              return Move{inside ? p.host.at(slot) : nullptr, p.workspace.at(row)};
                            });
}

// ---- seed: the first distinct candidates become LRU rows 0, 1, ... ----------------------------------------------

constexpr int kSeedThreads = 1024;
constexpr int kSeedWarps = kSeedThreads / kWarp;

struct SeedParams {
  const int32_t* candidates;  // [n, m]
  int64_t candidates_stride;
  Indices regions, workspace_starts;  // [n]
  Rows workspace, hot;
  int32_t* owners;      // [num_regions, num_lru_rows]
  int16_t* lru_order;   // [num_regions, num_lru_rows]
  int num_regions, num_candidates, num_lru_rows, page_size, row_chunks;
};

struct SeedShared {
  EntryTable::Cells cells;
  uint16_t entry[EntryTable::kMaxEntries + 1];  // candidate of each LRU row
  int warp_count[kSeedWarps];
};

// Fills `s.entry` with the first entries of distinct positions, in order, and returns how many there are, at most
// num_lru_rows. A position whose workspace row does not exist counts as none.
__device__ __forceinline__ int distinct_candidates(const SeedParams& p, SeedShared& s, const int32_t* candidates,
                                                   int64_t start) {
  EntryTable table{s.cells, candidates, nullptr};
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int repeated = 0;
  table.clear<kSeedThreads>();
  __syncthreads();
  const auto is_candidate = [&](int i) {
    return i < p.num_candidates && candidates[i] >= 0 && p.workspace.contains(start + candidates[i]);
  };
  for (int i = threadIdx.x; i < p.num_candidates; i += kSeedThreads) {
    if (is_candidate(i)) table.insert(candidates[i], i, repeated);
  }
  __syncthreads();
  int count = 0;
  for (int base = 0; base < p.num_candidates && count < p.num_lru_rows; base += kSeedThreads) {
    const int i = base + threadIdx.x;
    const bool is_first = is_candidate(i) && table.find(candidates[i]) == i;
    const unsigned ballot = __ballot_sync(kAllLanes, is_first);
    if (lane == 0) s.warp_count[warp] = __popc(ballot);
    __syncthreads();
    const int counts = s.warp_count[lane];
    const int before = __reduce_add_sync(kAllLanes, lane < warp ? counts : 0);
    const int row = count + before + __popc(ballot & ((1u << lane) - 1));
    if (is_first && row < p.num_lru_rows) s.entry[row] = i;
    count += __reduce_add_sync(kAllLanes, counts);
    __syncthreads();
  }
  return min(count, p.num_lru_rows);
}

// gridDim.x CTAs work for one request; each finds the candidates for itself and copies its share of the rows.
template <class Row, int kInFlight>
__global__ void __launch_bounds__(kSeedThreads, 1) seed_kernel(const __grid_constant__ SeedParams p) {
  extern __shared__ uint4 shared[];
  SeedShared& s = *reinterpret_cast<SeedShared*>(shared);
  const int64_t region = p.regions[blockIdx.y], start = p.workspace_starts[blockIdx.y];
  if (region < 0 || region >= p.num_regions) return;
  const int32_t* candidates = p.candidates + blockIdx.y * p.candidates_stride;
  const int count = distinct_candidates(p, s, candidates, start);
  const int64_t region_start = region * (p.num_lru_rows + p.page_size);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.num_lru_rows; i += kSeedThreads) {
      const int unused = p.num_lru_rows - count;
      p.lru_order[region * p.num_lru_rows + i] = static_cast<int16_t>(i < unused ? count + i : p.num_lru_rows - 1 - i);
      if (i < count) p.owners[region * p.num_lru_rows + i] = candidates[s.entry[i]];
    }
  }
  const int from = count * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
  const int to = count * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  copy_rows<Row, kInFlight>(threadIdx.x, kSeedThreads, to - from, p.row_chunks, [&](unsigned i) {
    return Move{p.workspace.at(start + candidates[s.entry[from + i]]), p.hot.at(region_start + from + i)};
  });
}

// ---- reset: nothing resident, rows in order, tail from seq_len on -----------------------------------------------

constexpr int kResetThreads = 256;

struct ResetParams {
  int32_t* owners;      // [layers, num_regions, num_lru_rows]
  int16_t* lru_order;   // [layers, num_regions, num_lru_rows]
  int32_t* tail_start;  // [num_regions]
  Indices regions, seq_lens;  // [n]
  int num_regions, num_lru_rows;
};

// blockIdx.x: which of the n regions; blockIdx.y: layer.
__global__ void __launch_bounds__(kResetThreads) reset_kernel(const __grid_constant__ ResetParams p) {
  const int64_t region = p.regions[blockIdx.x];
  if (region < 0 || region >= p.num_regions) return;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * p.num_regions + region) * p.num_lru_rows;
  for (int i = threadIdx.x; i < p.num_lru_rows; i += kResetThreads) {
    p.owners[first + i] = -1;
    p.lru_order[first + i] = static_cast<int16_t>(i);
  }
  if (blockIdx.y == 0 && threadIdx.x == 0) p.tail_start[region] = static_cast<int32_t>(p.seq_lens[blockIdx.x]);
}

}  // namespace hisparse
