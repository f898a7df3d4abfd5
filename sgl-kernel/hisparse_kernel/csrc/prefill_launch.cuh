// Launchers of gather, seed and reset; hisparse_kernel.cuda_ops has checked every tensor.
#pragma once

#include "prefill.cuh"

namespace hisparse {

constexpr int kPrefillInFlight = 4;

// `ctas`: enough to fill the link, few enough to leave the device to the layer that computes beside the gather.
inline void gather(TensorView host_rows, TensorView slots, TensorView workspace, TensorView row_ids, int64_t ctas,
                   int64_t stream) {
  GatherParams params{};
  params.slots = indices_of(slots);
  params.row_ids = indices_of(row_ids);
  params.host = rows_of(host_rows);
  params.workspace = rows_of(workspace);
  params.num_rows = slots.size(0);
  params.row_chunks = static_cast<int>(workspace.size(1) / 16);
  if (params.num_rows == 0) return;
  Launch to{};
  to.grid = dim3(static_cast<unsigned>(ctas));
  to.threads = kGatherThreads;
  to.device = workspace.device().device_id;
  to.stream = stream;
  switch (params.row_chunks) {
    case 1152 / 16: return launch(gather_kernel<Bf16Row, kPrefillInFlight>, to, params, "gather");
    case 656 / 16: return launch(gather_kernel<Fp8DsMlaRow, kPrefillInFlight>, to, params, "gather");
    default: return launch(gather_kernel<AnyRow, kPrefillInFlight>, to, params, "gather");
  }
}

inline void seed(TensorView candidates, TensorView regions, TensorView workspace_starts, TensorView workspace,
          TensorView hot_rows, TensorView owners, TensorView lru_order, int64_t page_size, int64_t ctas,
          int64_t stream) {
  SeedParams params{};
  params.candidates = static_cast<const int32_t*>(candidates.data_ptr());
  params.candidates_stride = candidates.stride(0);
  params.regions = indices_of(regions);
  params.workspace_starts = indices_of(workspace_starts);
  params.workspace = rows_of(workspace);
  params.hot = rows_of(hot_rows);
  params.owners = static_cast<int32_t*>(owners.data_ptr());
  params.lru_order = static_cast<int16_t*>(lru_order.data_ptr());
  params.num_regions = static_cast<int>(owners.size(0));
  params.num_candidates = static_cast<int>(candidates.size(1));
  params.num_lru_rows = static_cast<int>(owners.size(1));
  params.page_size = static_cast<int>(page_size);
  params.row_chunks = static_cast<int>(hot_rows.size(1) / 16);
  if (candidates.size(0) == 0) return;
  Launch to{};
  to.grid = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(candidates.size(0)));
  to.threads = kSeedThreads;
  to.device = hot_rows.device().device_id;
  to.stream = stream;
  to.shared_bytes = sizeof(SeedShared);
  launch(seed_kernel<AnyRow, kPrefillInFlight>, to, params, "seed");
}

inline void reset(TensorView owners, TensorView lru_order, TensorView tail_start, TensorView regions,
                  TensorView seq_lens, int64_t stream) {
  ResetParams params{};
  params.owners = static_cast<int32_t*>(owners.data_ptr());
  params.lru_order = static_cast<int16_t*>(lru_order.data_ptr());
  params.tail_start = static_cast<int32_t*>(tail_start.data_ptr());
  params.regions = indices_of(regions);
  params.seq_lens = indices_of(seq_lens);
  params.num_regions = static_cast<int>(owners.size(1));
  params.num_lru_rows = static_cast<int>(owners.size(2));
  if (regions.size(0) == 0 || owners.size(0) == 0) return;
  Launch to{};
  to.grid = dim3(static_cast<unsigned>(regions.size(0)), static_cast<unsigned>(owners.size(0)));
  to.threads = kResetThreads;
  to.device = owners.device().device_id;
  to.stream = stream;
  launch(reset_kernel, to, params, "reset");
}

}  // namespace hisparse

