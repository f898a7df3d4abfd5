// Launcher of swap_in; hisparse_kernel.cuda_ops has checked every tensor.
#pragma once

#include "swap_in_kernel.cuh"

namespace hisparse {

constexpr int kSwapInFlight = 4;

template <class Shape, class Row>
void launch_swap_in(const SwapInParams& params, Launch to) {
  to.threads = Shape::kThreads;
  to.shared_bytes = sizeof(SwapInShared<Shape>);
  if (Shape::Table::kGroupIsFirstEntry) to.cluster = 1;
  to.grid.x = to.cluster;
  launch(swap_in_kernel<Shape, Row, kSwapInFlight>, to, params, "swap_in");
}

template <class Shape>
void launch_swap_in(const SwapInParams& params, const Launch& to) {
  if constexpr (Shape::kExact) {
    if (params.row_chunks == 1152 / 16) return launch_swap_in<Shape, Bf16Row>(params, to);
    if (params.row_chunks == 656 / 16) return launch_swap_in<Shape, Fp8DsMlaRow>(params, to);
  }
  launch_swap_in<Shape, AnyRow>(params, to);
}

// Launches with the first shape that fits.
template <class First, class... Others>
void launch_first_fitting(const SwapInParams& params, const Launch& to) {
  if (First::fits(params)) return launch_swap_in<First>(params, to);
  if constexpr (sizeof...(Others) > 0) launch_first_fitting<Others...>(params, to);
}

// Exact sizes of the buffers in use (top-k 2,048), for contexts of up to 128 K and 256 K; then anything that fits the
// fast table, then anything.
template <int kThreads, int kBuffer, int kContext>
using Exact = SwapInShape<kThreads, 2048 / kThreads, kBuffer / kThreads,
                          RankTable<kThreads, kContext / 32 / kThreads, 2048>, true>;
template <int kThreads>
using Compact = SwapInShape<kThreads, 2048 / kThreads, 8192 / kThreads, KeyTable<13>, false>;
using Wide = SwapInShape<1024, 2, 32, KeyTable<13>, false>;
using Any = SwapInShape<1024, 32, 32, EntryTable, false>;

template <int kThreads>
void launch_with_threads(const SwapInParams& params, const Launch& to) {
  constexpr int k128 = 1 << 17, k256 = 1 << 18;
  launch_first_fitting<Exact<kThreads, 4096, k128>, Exact<kThreads, 6144, k128>, Exact<kThreads, 4096, k256>,
                       Exact<kThreads, 6144, k256>, Compact<kThreads>, Wide, Any>(params, to);
}

inline void swap_in(TensorView selected, TensorView seq_lens, TensorView req_pool_indices, TensorView num_real_reqs,
             TensorView req_to_token, TensorView host_rows, TensorView hot_rows, TensorView owners,
             TensorView lru_order, TensorView tail_start, int64_t page_size, TensorView out, TensorView counters,
             int64_t threads, int64_t cluster, int64_t gate_width,
             int64_t stream) {
  SwapInParams params;
  params.selected = static_cast<const int32_t*>(selected.data_ptr());
  params.selected_stride = static_cast<int>(selected.stride(0));
  params.seq_lens = indices_of(seq_lens);
  params.req_pool_indices = indices_of(req_pool_indices);
  params.num_real_reqs = static_cast<const int32_t*>(num_real_reqs.data_ptr());
  params.req_to_token = static_cast<const int32_t*>(req_to_token.data_ptr());
  params.req_to_token_stride = static_cast<int>(req_to_token.stride(0));
  params.host = rows_of(host_rows);
  params.hot = rows_of(hot_rows);
  params.owners = static_cast<int32_t*>(owners.data_ptr());
  params.lru_order = static_cast<int16_t*>(lru_order.data_ptr());
  params.tail_start = static_cast<const int32_t*>(tail_start.data_ptr());
  params.out = static_cast<int32_t*>(out.data_ptr());
  params.out_stride = static_cast<int>(out.stride(0));
  params.counters = static_cast<unsigned long long*>(counters.data_ptr());
  params.gate_width = static_cast<int>(gate_width);
  params.num_regions = static_cast<int>(owners.size(0));
  params.max_context = static_cast<int>(req_to_token.size(1));
  params.top_k = static_cast<int>(selected.size(1));
  params.num_lru_rows = static_cast<int>(owners.size(1));
  params.page_size = static_cast<int>(page_size);
  params.row_chunks = static_cast<int>(hot_rows.size(1) / 16);

  Launch to{};
  to.grid = dim3(1, static_cast<unsigned>(selected.size(0)));
  to.device = selected.device().device_id;
  to.stream = stream;
  to.cluster = static_cast<int>(cluster);
  to.early = true;  // on the SMs before kernels beside it that wait for the same selection
  if (threads == 512) {
    launch_with_threads<512>(params, to);
  } else {
    launch_with_threads<1024>(params, to);
  }
}

}  // namespace hisparse

