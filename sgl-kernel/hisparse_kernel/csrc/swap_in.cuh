// swap-in: resolve selected positions to hot rows, load missing rows from the host, update the residency state.
//
// One launch. A cluster of `gridDim.x` CTAs serves one request of the batch (`blockIdx.y`): every CTA resolves the
// whole selection for itself, from the same inputs, and then copies its share of the missing rows. The first CTA
// writes the LRU order and the last one everything else. The cluster barrier keeps them from writing state that
// another CTA has still to read; nothing else passes between CTAs, so no scratch memory is needed.
//
// Rounds: a warp owns consecutive LRU rows (or entries), `rounds * 32` of them, lane by lane, so that order within
// a CTA is the order of (warp, round, lane) and one scan over the warps' counts ranks everything.
#pragma once

#include "hisparse.cuh"
#include "position_table.cuh"

namespace hisparse {

struct SwapInParams {
  const int32_t* selected;  // [batch, top_k]
  int64_t selected_stride;
  Indices seq_lens;              // [batch]
  Indices req_pool_indices;      // [batch]
  const int32_t* num_real_reqs;  // [1]
  const int32_t* req_to_token;   // [num_regions, max_context]
  int64_t req_to_token_stride;
  Rows host;                  // [slots]
  Rows hot;                   // [num_regions * (num_lru_rows + page_size)]
  int32_t* owners;            // [num_regions, num_lru_rows]
  int16_t* lru_order;         // [num_regions, num_lru_rows]
  const int32_t* tail_start;  // [num_regions]
  int32_t* out;               // [batch, top_k]
  int64_t out_stride;
  unsigned long long* counters;  // [3]
  int num_regions, max_context, top_k, num_lru_rows, page_size, row_chunks;
};

// What a kernel is compiled for: threads of a CTA, rounds that fit its registers, the table.
template <int kThreads_, int kEntryRounds_, int kRowRounds_, class Table_>
struct SwapInShape {
  using Table = Table_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kEntryRounds = kEntryRounds_;
  static constexpr int kRowRounds = kRowRounds_;
  static constexpr int kMaxTopK = kEntryRounds * kThreads;
  static constexpr int kMaxLruRows = kRowRounds * kThreads;
  static constexpr int kCtasPerSm = 1024 / kThreads;  // 64 registers a thread
  static constexpr int kUnroll = kEntryRounds > 8 ? 1 : 32;  // what does not fit registers may as well be a loop
  static_assert(kWarps <= kWarp, "the warps' counts are scanned by one warp");
  static_assert(kRowRounds <= 32 && kEntryRounds <= 32, "a thread keeps one bit a round");
};

template <class Shape>
struct SwapInShared {
  union {
    typename Shape::Table::Cells cells;  // until the misses are known
    int32_t slot[Shape::kMaxTopK];       // from then on: host slot of each miss, -1 = outside the pool
  };
  typename Shape::Table::GroupRows group_rows;
  uint16_t victim[Shape::kMaxTopK];               // LRU row that each miss may take
  uint32_t hit_word[Shape::kMaxLruRows / kWarp];  // bit of LRU row r: its position is selected
  uint32_t bad_word[Shape::kMaxTopK / kWarp];     // bit of miss k: slot[k] is -1
  int bad_before[Shape::kMaxTopK / kWarp];        // bits set in earlier words
  uint32_t row_counts[Shape::kWarps];             // of each warp: hits | misses << 16
  uint32_t entry_counts[Shape::kWarps];           // of each warp: entries in the tail | resident entries << 16
  int repeated;                                   // some position was selected twice
};

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

template <class Shape>
class SwapIn {
  using Table = typename Shape::Table;
  static constexpr int kEntries = Shape::kEntryRounds;
  static constexpr int kRows = Shape::kRowRounds;

 public:
  __device__ __forceinline__ SwapIn(const SwapInParams& params, SwapInShared<Shape>& shared)
      : p(params),
        s(shared),
        table(make_table(params, shared)),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        is_first_cta(blockIdx.x == 0),
        is_last_cta(blockIdx.x == gridDim.x - 1),
        entry_rounds(rounds_for(params.top_k)),
        row_rounds(rounds_for(params.num_lru_rows)) {}

  __device__ __forceinline__ void load_selection() {
    const int32_t* selected = p.selected + blockIdx.y * p.selected_stride;
    for_entries([&](int j, int entry) { position[j] = entry < p.top_k ? __ldg(selected + entry) : -1; });
  }

  // False for padding, and for a region that does not exist.
  __device__ __forceinline__ bool find_request() {
    region = p.req_pool_indices[blockIdx.y];
    seq_len = p.seq_lens[blockIdx.y];
    return blockIdx.y < __ldg(p.num_real_reqs) && region >= 0 && region < p.num_regions;
  }

  __device__ __forceinline__ void refuse() {
    if (is_first_cta) for_entries([&](int, int entry) {
      if (entry < p.top_k) out_row()[entry] = -1;
    });
  }

  __device__ __forceinline__ void load_state() {
    tail_start = __ldg(p.tail_start + region);
    const int32_t* owners = p.owners + region * p.num_lru_rows;
    const int16_t* order = p.lru_order + region * p.num_lru_rows;
    for_rows([&](int j, int row) { owner[j] = row < p.num_lru_rows ? owners[row] : -1; });
    for_rows([&](int j, int place) { order_row[j] = place < p.num_lru_rows ? order[place] : 0; });
  }

  __device__ __forceinline__ void clear_table() {
    table.template clear<Shape::kThreads>();
    if (threadIdx.x == 0) s.repeated = 0;
  }

  __device__ __forceinline__ void insert_selection() {
    int repeated = 0;
    for_entries([&](int j, int entry) {
      const int32_t at = position[j];
      const bool valid = at >= 0 && at < seq_len;
      const bool in_tail = valid && at >= tail_start && at >= seq_len - p.page_size;
      tail_bits |= in_tail << j;
      wanted_bits |= (valid && !in_tail) << j;
      if (valid && !in_tail) group[j] = table.insert(at, entry, repeated);
    });
    if (repeated) s.repeated = 1;
  }

  // Which LRU rows hold a selected position. Tells the group its row, and everyone the row's bit.
  __device__ __forceinline__ void probe_rows() {
    for_rows([&](int j, int row) {
      const int found = owner[j] >= 0 ? table.find(owner[j]) : kNoGroup;
      if (found != kNoGroup) table.set_row(found, row);
      const unsigned hits = __ballot_sync(kAllLanes, found != kNoGroup);
      if (lane == 0) s.hit_word[row / kWarp] = hits;
    });
  }

  // Sorts the entries into resident and missing; the first entry of a missing group stands for it.
  __device__ __forceinline__ void find_misses() {
    uint32_t first_bits = first_entries();
    const int32_t* slots = p.req_to_token + region * p.req_to_token_stride;
    for_entries([&](int j, int) {
      row[j] = kNoRow;
      if (!is(wanted_bits, j)) return;
      row[j] = table.row(group[j]);
      if (row[j] == kNoRow && is(first_bits, j)) {
        miss_bits |= 1u << j;
        slot[j] = __ldg(slots + min(position[j], p.max_context - 1));
      }
    });
  }

  // Ranks: how many hits and misses lie before this warp's, and how many there are in all.
  __device__ __forceinline__ void count() {
    uint32_t hits = 0, misses = 0, tails = 0, residents = 0;
    for_rows([&](int j, int place) {
      const unsigned holder = static_cast<unsigned>(order_row[j]);
      const bool hit = place < p.num_lru_rows && is(s.hit_word[holder / kWarp], holder % kWarp);
      hit_bits |= hit << j;
      hits += __popc(__ballot_sync(kAllLanes, hit));
    });
    for_entries([&](int j, int) {
      misses += __popc(__ballot_sync(kAllLanes, is(miss_bits, j)));
      tails += __popc(__ballot_sync(kAllLanes, is(tail_bits, j)));
      residents += __popc(__ballot_sync(kAllLanes, row[j] != kNoRow));
    });
    if (lane == 0) {
      s.row_counts[warp] = hits | misses << 16;
      s.entry_counts[warp] = tails | residents << 16;
    }
    __syncthreads();
    const uint32_t counts = lane < Shape::kWarps ? s.row_counts[lane] : 0;
    const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? counts : 0);
    const uint32_t total = __reduce_add_sync(kAllLanes, counts);
    hits_before = before & 0xffff, misses_before = before >> 16;
    num_hits = total & 0xffff, num_misses = total >> 16;
    num_loaded = num_misses;
  }

  // The k-th miss gets the k-th evictable row, and is loaded if its slot lies in the host pool.
  __device__ __forceinline__ void assign_victims() {
    for_ranked_rows([&](int j, int, bool hit, int rank) {
      if (!hit && rank < num_misses) s.victim[rank] = order_row[j];
    });
    int bad = 0;
    for_ranked_misses([&](int j, int rank) {
      const bool in_pool = p.host.contains(slot[j]);
      s.slot[rank] = in_pool ? slot[j] : -1;
      bad |= !in_pool;
    });
    any_bad = __syncthreads_or(bad);
    if (any_bad) num_loaded = num_misses - rank_bad_misses(s, num_misses);
  }

  // New order: evictable rows that stay, then loaded rows, then hits.
  __device__ __forceinline__ void write_order() {
    int16_t* order = p.lru_order + region * p.num_lru_rows;
    const int num_evictable = p.num_lru_rows - num_hits;
    for_ranked_rows([&](int j, int place, bool hit, int rank) {
      if (place >= p.num_lru_rows) return;
      int to;
      if (hit) {
        to = num_evictable + rank;
      } else if (rank >= num_misses) {
        to = rank - num_loaded;
      } else {
        const int bad = any_bad ? bad_misses_before(rank) : 0;
        const bool stays = any_bad && s.slot[rank] < 0;
        to = stays ? bad : num_evictable - num_loaded + rank - bad;
      }
      order[to] = static_cast<int16_t>(order_row[j]);
    });
  }

  __device__ __forceinline__ void write_owners() {
    int32_t* owners = p.owners + region * p.num_lru_rows;
    for_ranked_misses([&](int j, int rank) {
      if (s.slot[rank] < 0) return;
      row[j] = s.victim[rank];
      owners[row[j]] = position[j];
    });
  }

  // Entries that repeat a missing position follow its first entry. Returns how many of this thread's got a row.
  __device__ __forceinline__ int follow_first_entries() {
    for_entries([&](int j, int) {
      if (is(miss_bits, j)) table.set_row(group[j], row[j]);
    });
    __syncthreads();
    int served = 0;
    for_entries([&](int j, int) {
      if (!is(wanted_bits, j) || is(miss_bits, j) || row[j] != kNoRow) return;
      row[j] = table.row(group[j]);
      served += row[j] != kNoRow;
    });
    __syncthreads();
    return served;
  }

  __device__ __forceinline__ void write_out() {
    const int region_start = static_cast<int>(region) * (p.num_lru_rows + p.page_size);
    for_entries([&](int j, int entry) {
      if (entry >= p.top_k) return;
      const int in_region = is(tail_bits, j) ? p.num_lru_rows + position[j] % p.page_size : row[j];
      out_row()[entry] = in_region == kNoRow ? -1 : region_start + in_region;
    });
  }

  __device__ __forceinline__ void write_counters(int repeats_served) {
    if (has_repeats()) {
      repeats_served = __reduce_add_sync(kAllLanes, repeats_served);
      if (lane == 0 && repeats_served > 0) atomicAdd(p.counters + kHit, repeats_served);
    }
    if (warp != 0) return;
    const uint32_t total = __reduce_add_sync(kAllLanes, lane < Shape::kWarps ? s.entry_counts[lane] : 0);
    const int increment[3] = {static_cast<int>(total & 0xffff), static_cast<int>(total >> 16), num_loaded};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (lane == i && increment[i] > 0) atomicAdd(p.counters + i, increment[i]);
    }
  }

  template <class Row, int kInFlight>
  __device__ __forceinline__ void copy_missing_rows() {
    const int from = num_misses * blockIdx.x / gridDim.x, to = num_misses * (blockIdx.x + 1) / gridDim.x;
    const int64_t region_start = region * (p.num_lru_rows + p.page_size);
    copy_rows<Row, kInFlight>(threadIdx.x, Shape::kThreads, to - from, p.row_chunks, [&](unsigned i) {
      const int from_slot = s.slot[from + i];
      return Move{from_slot < 0 ? nullptr : p.host.at(from_slot), p.hot.at(region_start + s.victim[from + i])};
    });
  }

  __device__ __forceinline__ bool has_misses() const { return num_misses > 0; }
  __device__ __forceinline__ bool has_repeats() const { return Table::kGroupIsFirstEntry || s.repeated; }
  __device__ __forceinline__ bool writes_order() const { return is_first_cta; }
  __device__ __forceinline__ bool writes_rows() const { return is_last_cta; }

 private:
  static __device__ __forceinline__ auto make_table(const SwapInParams& p, SwapInShared<Shape>& s) {
    if constexpr (Table::kGroupIsFirstEntry) {
      return Table{s.cells, p.selected + blockIdx.y * p.selected_stride, p.out + blockIdx.y * p.out_stride};
    } else {
      return Table{s.cells, s.group_rows};
    }
  }
  static __device__ __forceinline__ int rounds_for(int count) { return (count + Shape::kThreads - 1) / Shape::kThreads; }
  static __device__ __forceinline__ bool is(uint32_t bits, int j) { return bits >> j & 1; }
  __device__ __forceinline__ int32_t* out_row() const { return p.out + blockIdx.y * p.out_stride; }

  template <class Body>
  __device__ __forceinline__ void for_entries(Body body) const {
#pragma unroll(Shape::kUnroll)
    for (int j = 0; j < kEntries; ++j) {
      if (j < entry_rounds) body(j, (warp * entry_rounds + j) * kWarp + lane);
    }
  }
  template <class Body>
  __device__ __forceinline__ void for_rows(Body body) const {
#pragma unroll(Shape::kUnroll)
    for (int j = 0; j < kRows; ++j) {
      if (j < row_rounds) body(j, (warp * row_rounds + j) * kWarp + lane);
    }
  }
  // body(j, place in the LRU order, hit, rank among the hits or among the evictable rows), oldest row first.
  template <class Body>
  __device__ __forceinline__ void for_ranked_rows(Body body) const {
    int hits = hits_before;
    for_rows([&](int j, int place) {
      const bool hit = is(hit_bits, j);
      const unsigned ballot = __ballot_sync(kAllLanes, hit);
      const int before = hits + __popc(ballot & ((1u << lane) - 1));
      hits += __popc(ballot);
      if (place < p.num_lru_rows) body(j, place, hit, hit ? before : place - before);
    });
  }
  // body(j, rank among the misses), for this thread's missing entries.
  template <class Body>
  __device__ __forceinline__ void for_ranked_misses(Body body) const {
    int misses = misses_before;
    for_entries([&](int j, int) {
      const unsigned ballot = __ballot_sync(kAllLanes, is(miss_bits, j));
      if (is(miss_bits, j)) body(j, misses + __popc(ballot & ((1u << lane) - 1)));
      misses += __popc(ballot);
    });
  }

  __device__ __forceinline__ uint32_t first_entries() {
    uint32_t bits = wanted_bits;
    if constexpr (Table::kGroupIsFirstEntry) {
      for_entries([&](int j, int entry) {
        if (is(wanted_bits, j) && group[j] != entry) bits &= ~(1u << j);
      });
    } else if (s.repeated) {
      for_entries([&](int j, int entry) {
        if (is(wanted_bits, j)) table.propose(group[j], entry);
      });
      __syncthreads();
      for_entries([&](int j, int entry) {
        if (is(wanted_bits, j)) table.claim(group[j], entry);
      });
      __syncthreads();
      for_entries([&](int j, int entry) {
        if (is(wanted_bits, j) && table.first(group[j]) != entry) bits &= ~(1u << j);
      });
    }
    return bits;
  }

  // Rare: only when a selected position has no host row. Returns how many have none. (Static and not inlined, so
  // that it costs the common path neither registers nor a stack frame.)
  static __device__ __noinline__ int rank_bad_misses(SwapInShared<Shape>& s, int num_misses) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int words = (num_misses + kWarp - 1) / kWarp;
    for (int word = warp; word < words; word += Shape::kWarps) {
      const int k = word * kWarp + lane;
      const unsigned bits = __ballot_sync(kAllLanes, k < num_misses && s.slot[k] < 0);
      if (lane == 0) s.bad_word[word] = bits;
    }
    __syncthreads();
    int before = 0;
    for (int word = 0; word < words; ++word) {
      if (threadIdx.x == 0) s.bad_before[word] = before;
      before += __popc(s.bad_word[word]);
    }
    __syncthreads();
    return before;
  }
  __device__ __forceinline__ int bad_misses_before(int rank) const {
    return s.bad_before[rank / kWarp] + __popc(s.bad_word[rank / kWarp] & ((1u << rank % kWarp) - 1));
  }

 public:
  // EntryTable knows a group only when all entries are in.
  __device__ __forceinline__ void find_groups() {
    if constexpr (Table::kGroupIsFirstEntry) {
      for_entries([&](int j, int) {
        if (is(wanted_bits, j)) group[j] = table.find(position[j]);
      });
    }
  }

 private:
  const SwapInParams& p;
  SwapInShared<Shape>& s;
  Table table;
  const int lane, warp;
  const bool is_first_cta, is_last_cta;
  const int entry_rounds, row_rounds;

  int64_t region = 0, seq_len = 0;
  int32_t tail_start = 0;
  // One element a round; bits are numbered by round.
  int32_t position[kEntries], group[kEntries], row[kEntries], slot[kEntries];
  int32_t owner[kRows], order_row[kRows];
  uint32_t tail_bits = 0, wanted_bits = 0, miss_bits = 0, hit_bits = 0;
  int hits_before = 0, misses_before = 0, num_hits = 0, num_misses = 0, num_loaded = 0;
  int any_bad = 0;
};

// kInFlight: chunks a thread has under way while copying.
template <class Shape, class Row, int kInFlight>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    swap_in_kernel(const __grid_constant__ SwapInParams params) {
  extern __shared__ uint4 shared[];
  SwapIn<Shape> step(params, *reinterpret_cast<SwapInShared<Shape>*>(shared));
  step.load_selection();
  if (!step.find_request()) {
    step.refuse();
    return;
  }
  step.load_state();
  step.clear_table();
  __syncthreads();
  step.insert_selection();
  __syncthreads();
  step.find_groups();
  step.probe_rows();
  __syncthreads();
  step.find_misses();
  step.count();
  if (gridDim.x > 1) cluster_arrive();
  if (step.has_misses()) step.assign_victims();
  if (gridDim.x > 1) cluster_wait();
  if (step.writes_order()) step.write_order();
  if (step.writes_rows()) {
    step.write_owners();
    const int repeats_served = step.has_repeats() ? step.follow_first_entries() : 0;
    step.write_out();
    step.write_counters(repeats_served);
  }
  step.template copy_missing_rows<Row, kInFlight>();
}

}  // namespace hisparse
