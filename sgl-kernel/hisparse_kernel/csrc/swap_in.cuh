// One CTA's part of swap-in, phase by phase; swap_in_kernel.cuh says how the CTAs work together.
#pragma once

#include "ctas.cuh"
#include "swap_in_shape.cuh"

namespace hisparse {

template <class Shape>
class SwapIn {
  using Table = typename Shape::Table;

 public:
  __device__ __forceinline__ SwapIn(const SwapInParams& params, SwapInShared<Shape>& shared)
      : p(params),
        s(shared),
        table(make_table(params, shared)),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        entries_per_thread(Shape::kExact ? Shape::kEntries : (params.top_k + Shape::kThreads - 1) / Shape::kThreads),
        rows_per_thread(Shape::kExact ? Shape::kRows : (params.num_lru_rows + Shape::kThreads - 1) / Shape::kThreads) {
  }

  // ---- inputs ----

  __device__ __forceinline__ void load_selection() {
    const int32_t* selected = selected_row(p);
    for_entries([&](int j, int entry) { position[j] = exists(entry) ? __ldg(selected + entry) : -1; });
  }

  __device__ __forceinline__ void load_request() {
    num_real = __ldg(p.num_real_reqs);
    given_region = p.req_pool_indices[blockIdx.y];
    region = static_cast<int>(given_region);
    const int64_t given_len = p.seq_lens[blockIdx.y];
    seq_len = static_cast<int32_t>(given_len < p.max_context ? given_len : p.max_context);
  }

  // Not padding, and a region that exists.
  __device__ __forceinline__ bool is_real() const {
    return static_cast<int>(blockIdx.y) < num_real && given_region >= 0 && given_region < p.num_regions;
  }

  __device__ __forceinline__ void refuse() {
    if (blockIdx.x != 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.top_k; i += Shape::kThreads) out_row()[i] = kNoRow;
  }

  __device__ __forceinline__ void load_state() {
    tail_from = max(__ldg(p.tail_start + region), seq_len - p.page_size);
    const int32_t* owners = owners_row();
    const int16_t* order = order_row();
    if constexpr (Shape::kExact) {
      load_consecutive(owner, owners + threadIdx.x * Shape::kRows);
      load_consecutive(placed, order + threadIdx.x * Shape::kRows);
    } else {
      for_rows([&](int i, int row) { owner[i] = is_row(row) ? owners[row] : -1; });
      for_rows([&](int i, int place) { placed[i] = is_row(place) ? order[place] : 0; });
    }
  }

  // ---- resolve ----

  __device__ __forceinline__ void clear_table() {
    if constexpr (Table::kIsRanked) {
      table.clear();
    } else {
      table.template clear<Shape::kThreads>();
      if (threadIdx.x == 0) s.repeated = 0;
    }
  }

  // Puts the selection into the table, and finds the LRU rows that hold a selected position: tells their groups the
  // row, and everyone that the row is a hit.
  __device__ __forceinline__ void resolve() {
    classify_entries();
    if constexpr (Table::kIsRanked) {
      resolve_by_rank();
    } else {
      resolve_by_search();
    }
  }

  // Sorts the entries into resident and missing; the first entry of a missing group stands for it.
  __device__ __forceinline__ void find_misses() {
    const uint32_t first_bits = first_entries();
    const int32_t* slots = p.req_to_token + static_cast<int64_t>(region) * p.req_to_token_stride;
    for_entries([&](int j, int) {
      row[j] = kNoRow;
      if (!is(wanted_bits, j)) return;
      row[j] = table.row(group[j]);
      if (row[j] == kNoRow && is(first_bits, j)) {
        miss_bits |= 1u << j;
        slot[j] = __ldg(slots + position[j]);
      }
      resident_bits |= static_cast<uint32_t>(row[j] != kNoRow) << j;
    });
  }

  // Ranks: how many hits and misses lie before this thread's, and how many there are in all.
  __device__ __forceinline__ void count() {
    uint32_t mine = count_bits(miss_bits) << 16;
    for_rows([&](int i, int place) {
      const uint32_t hit = is_row(place) ? s.is_hit[placed[i]] : 0;
      hit_bits |= hit << i;
      mine += hit;
    });
    const uint32_t through = sum_through_lane(mine);
    const uint32_t entries = __reduce_add_sync(kAllLanes, count_bits(tail_bits) | count_bits(resident_bits) << 16);
    if (lane == kWarp - 1) {
      s.warp_ranks[warp] = through;
      s.warp_entries[warp] = entries;
    }
    __syncthreads();
    const uint32_t ranks = lane < Shape::kWarps ? s.warp_ranks[lane] : 0;
    const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? ranks : 0) + through - mine;
    const uint32_t total = __reduce_add_sync(kAllLanes, ranks);
    hits_before = before & 0xffff, misses_before = before >> 16;
    num_hits = total & 0xffff, num_misses = total >> 16;
    num_loaded = num_misses;
  }

  // The k-th miss gets the k-th evictable row, and is loaded if its slot lies in the host pool.
  __device__ __forceinline__ void assign_victims() {
    for_ranked_rows([&](int lru_row, bool hit, int rank) {
      if (!hit && rank < num_misses) s.victim[rank] = static_cast<uint16_t>(lru_row);
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

  // ---- outputs ----

  // New order: evictable rows that stay, then loaded rows, then hits.
  __device__ __forceinline__ void write_order() {
    // Through shared memory where sizes are exact, to write whole lines.
    int16_t* const target = Shape::kExact ? s.new_order : order_row();
    if (any_bad) {
      place_around_bad_misses(target);
    } else {
      const int num_evictable = num_lru_rows() - num_hits;
      for_ranked_rows([&](int lru_row, bool hit, int rank) {
        const int moved = hit ? num_evictable : rank < num_misses ? num_evictable - num_misses : -num_misses;
        target[rank + moved] = static_cast<int16_t>(lru_row);
      });
    }
    if constexpr (Shape::kExact) {
      __syncthreads();
      const uint4* source = reinterpret_cast<const uint4*>(s.new_order);
      for (int i = threadIdx.x; i < Shape::kMaxLruRows / 8; i += Shape::kThreads) {
        reinterpret_cast<uint4*>(order_row())[i] = source[i];
      }
    }
  }

  __device__ __forceinline__ void write_owners() {
    for_ranked_misses([&](int j, int rank) {
      if (s.slot[rank] < 0) return;
      row[j] = s.victim[rank];
      owners_row()[row[j]] = position[j];
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
      if (!is(wanted_bits & ~miss_bits & ~resident_bits, j)) return;
      row[j] = table.row(group[j]);
      served += row[j] != kNoRow;
    });
    __syncthreads();
    return served;
  }

  __device__ __forceinline__ void write_out() {
    const int repeats_served = has_repeats ? follow_first_entries() : 0;
    write_counters(repeats_served);
    const int region_start = region * (num_lru_rows() + p.page_size);
    for_entries([&](int j, int entry) {
      if (!exists(entry)) return;
      if (is(tail_bits, j)) row[j] = num_lru_rows() + position[j] % p.page_size;
      out_row()[entry] = row[j] == kNoRow ? kNoRow : region_start + row[j];
    });
  }

  __device__ __forceinline__ void write_counters(int repeats_served) {
    if (has_repeats) {
      repeats_served = __reduce_add_sync(kAllLanes, repeats_served);
      if (lane == 0 && repeats_served > 0) atomicAdd(p.counters + kHit, repeats_served);
    }
    if (warp != 0) return;
    const uint32_t total = __reduce_add_sync(kAllLanes, lane < Shape::kWarps ? s.warp_entries[lane] : 0);
    const int increment = lane == kTail ? total & 0xffff : lane == kHit ? total >> 16 : num_loaded;
    if (lane <= kMiss && increment > 0) atomicAdd(p.counters + lane, increment);
  }

  template <class Row, int kInFlight>
  __device__ __forceinline__ void copy_missing_rows() {
    const int from = num_misses * blockIdx.x / gridDim.x, to = num_misses * (blockIdx.x + 1) / gridDim.x;
    uint4* const hot_region = p.hot.at(static_cast<int64_t>(region) * (num_lru_rows() + p.page_size));
    copy_rows<Row, kInFlight>(threadIdx.x, Shape::kThreads, to - from, p.row_chunks, [&](unsigned i) {
      const int from_slot = s.slot[from + i];
      return Move{from_slot < 0 ? nullptr : p.host.at(from_slot), hot_region + s.victim[from + i] * p.hot.stride};
    });
  }

  __device__ __forceinline__ bool has_misses() const { return num_misses > 0; }

 private:
  static __device__ __forceinline__ auto make_table(const SwapInParams& p, SwapInShared<Shape>& s) {
    if constexpr (Table::kGroupIsFirstEntry) {
      return Table{s.cells, selected_row(p), p.out + static_cast<int64_t>(blockIdx.y) * p.out_stride};
    } else {
      return Table{s.cells, s.group_rows};
    }
  }
  static __device__ __forceinline__ bool is(uint32_t bits, int j) { return bits >> j & 1; }
  // Bits of this thread's entries. A population count takes as long as eight additions.
  static __device__ __forceinline__ uint32_t count_bits(uint32_t bits) {
    if constexpr (Shape::kEntries > 4) return __popc(bits);
    uint32_t count = 0;
#pragma unroll
    for (int j = 0; j < Shape::kEntries; ++j) count += bits >> j & 1;
    return count;
  }
  static __device__ __forceinline__ const int32_t* selected_row(const SwapInParams& p) {
    return p.selected + static_cast<int64_t>(blockIdx.y) * p.selected_stride;
  }
  __device__ __forceinline__ int32_t* out_row() const {
    return p.out + static_cast<int64_t>(blockIdx.y) * p.out_stride;
  }
  __device__ __forceinline__ int32_t* owners_row() const {
    return p.owners + static_cast<int64_t>(region) * num_lru_rows();
  }
  __device__ __forceinline__ int16_t* order_row() const {
    return p.lru_order + static_cast<int64_t>(region) * num_lru_rows();
  }
  __device__ __forceinline__ int num_lru_rows() const { return Shape::kExact ? Shape::kMaxLruRows : p.num_lru_rows; }
  __device__ __forceinline__ bool is_row(int row) const { return Shape::kExact || row < p.num_lru_rows; }
  __device__ __forceinline__ bool exists(int entry) const { return Shape::kExact || entry < p.top_k; }

  // body(j, entry): this thread's j-th entry, which may lie behind the last one.
  template <class Body>
  __device__ __forceinline__ void for_entries(Body body) const {
#pragma unroll(Shape::kUnroll)
    for (int j = 0; j < Shape::kEntries; ++j) {
      if (j < entries_per_thread) body(j, static_cast<int>(threadIdx.x) * entries_per_thread + j);
    }
  }
  // body(i, row): this thread's i-th row or place, which may lie behind the last one.
  template <class Body>
  __device__ __forceinline__ void for_rows(Body body) const {
#pragma unroll(Shape::kUnroll)
    for (int i = 0; i < Shape::kRows; ++i) {
      if (i < rows_per_thread) body(i, static_cast<int>(threadIdx.x) * rows_per_thread + i);
    }
  }
  // body(LRU row, hit, rank among the hits or among the evictable rows), oldest row first.
  template <class Body>
  __device__ __forceinline__ void for_ranked_rows(Body body) const {
    int hits = hits_before;
    for_rows([&](int i, int place) {
      if (!is_row(place)) return;
      const bool hit = is(hit_bits, i);
      body(placed[i], hit, hit ? hits : place - hits);
      hits += hit;
    });
  }
  // body(j, rank among the misses), for this thread's missing entries.
  template <class Body>
  __device__ __forceinline__ void for_ranked_misses(Body body) const {
    int misses = misses_before;
    for_entries([&](int j, int) {
      if (is(miss_bits, j)) body(j, misses++);
    });
  }

  __device__ __forceinline__ void classify_entries() {
    for_entries([&](int j, int) {
      const bool valid = static_cast<uint32_t>(position[j]) < static_cast<uint32_t>(max(seq_len, 0));
      const bool in_tail = position[j] >= tail_from;
      tail_bits |= static_cast<uint32_t>(valid && in_tail) << j;
      wanted_bits |= static_cast<uint32_t>(valid && !in_tail) << j;
    });
  }

  __device__ __forceinline__ void resolve_by_search() {
    int repeated = 0;
    for_entries([&](int j, int entry) {
      if (is(wanted_bits, j)) group[j] = table.insert(position[j], entry, repeated);
    });
    if (repeated) atomicExch(&s.repeated, 1);
    __syncthreads();
    if constexpr (Table::kGroupIsFirstEntry) {
      for_entries([&](int j, int) {
        if (is(wanted_bits, j)) group[j] = table.find(position[j]);
      });
    }
    for_rows([&](int i, int row) {
      const int found = owner[i] >= 0 ? table.find(owner[i]) : kNoGroup;
      if (found != kNoGroup) table.set_row(found, row);
      s.is_hit[row] = found != kNoGroup;
    });
    __syncthreads();
    has_repeats = Table::kGroupIsFirstEntry || s.repeated;
  }

  __device__ __forceinline__ void resolve_by_rank() {
    for_entries([&](int j, int) {
      if (is(wanted_bits, j)) table.select(position[j]);
    });
    __syncthreads();
    typename Table::Place place_of_entry[Shape::kEntries], place_of_owner[Shape::kRows];
    alignas(16) uint8_t is_hit[Shape::kRows];
    for_rows([&](int i, int) {
      const bool exists = static_cast<uint32_t>(owner[i]) < static_cast<uint32_t>(max(seq_len, 0));
      place_of_owner[i] = table.place(exists ? owner[i] : 0);
      place_of_owner[i].is_selected &= exists;
      is_hit[i] = place_of_owner[i].is_selected;
    });
    store_consecutive(s.is_hit + threadIdx.x * Shape::kRows, is_hit);
    for_entries([&](int j, int) {
      place_of_entry[j] = table.place(is(wanted_bits, j) ? position[j] : 0);
      place_of_entry[j].is_selected &= is(wanted_bits, j);
    });
    table.count_words(count_bits(wanted_bits));
    __syncthreads();
    const int base = table.segment_base(has_repeats);
    for_rows([&](int i, int row) {
      const int rank = table.rank(place_of_owner[i], base);
      if (place_of_owner[i].is_selected) table.set_row(rank, row);
    });
    for_entries([&](int j, int) { group[j] = table.rank(place_of_entry[j], base); });
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t first_entries() {
    uint32_t bits = wanted_bits;
    if constexpr (Table::kGroupIsFirstEntry) {
      for_entries([&](int j, int entry) {
        if (is(wanted_bits, j) && group[j] != entry) bits &= ~(1u << j);
      });
    } else if (has_repeats) {
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
      if (lane == 0) s.bad.word[word] = bits;
    }
    __syncthreads();
    int before = 0;
    for (int word = 0; word < words; ++word) {
      if (threadIdx.x == 0) s.bad.before[word] = before;
      before += __popc(s.bad.word[word]);
    }
    __syncthreads();
    return before;
  }
  // The new order where some misses were not loaded: their victims stay evictable, in their places.
  __device__ __forceinline__ void place_around_bad_misses(int16_t* target) {
    const int num_evictable = num_lru_rows() - num_hits;
    for_ranked_rows([&](int lru_row, bool hit, int rank) {
      int to = hit ? num_evictable + rank : rank - num_loaded;
      if (!hit && rank < num_misses) {
        const int bad = bad_misses_before(rank);
        to = s.slot[rank] < 0 ? bad : num_evictable - num_loaded + rank - bad;
      }
      target[to] = static_cast<int16_t>(lru_row);
    });
  }
  __device__ __forceinline__ int bad_misses_before(int rank) const {
    return s.bad.before[rank / kWarp] + __popc(s.bad.word[rank / kWarp] & ((1u << rank % kWarp) - 1));
  }

  const SwapInParams& p;
  SwapInShared<Shape>& s;
  Table table;
  const int lane, warp;
  const int entries_per_thread, rows_per_thread;

  int64_t given_region = 0;
  int region = 0;
  int32_t num_real = 0, seq_len = 0, tail_from = 0;
  // Of this thread's entries; bits are numbered alike.
  int32_t position[Shape::kEntries], group[Shape::kEntries], row[Shape::kEntries], slot[Shape::kEntries];
  uint32_t tail_bits = 0, wanted_bits = 0, resident_bits = 0, miss_bits = 0;
  // Of this thread's rows: who owns the i-th, and which LRU row is at the i-th place of the order.
  alignas(16) int32_t owner[Shape::kRows];
  alignas(16) int16_t placed[Shape::kRows];
  uint32_t hit_bits = 0;
  int hits_before = 0, misses_before = 0, num_hits = 0, num_misses = 0, num_loaded = 0;
  int any_bad = 0;
  bool has_repeats = false;
};

}  // namespace hisparse
