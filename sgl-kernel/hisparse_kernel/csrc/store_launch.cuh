// Launchers of store_decode and store_extend; hisparse_kernel.cuda_ops has checked every tensor.
#pragma once

#include "store.cuh"

namespace hisparse {

inline bool is_aligned(const Part& part) {
  return part.dim % 8 == 0 && part.stride % 8 == 0 && reinterpret_cast<uintptr_t>(part.values) % 16 == 0;
}

template <class Format, class DeviceRows>
void launch_store(const StoreParams<DeviceRows>& params, int device, int64_t stream, const char* what) {
  if (params.num_tokens == 0) return;
  Launch to{};
  to.grid = dim3(static_cast<unsigned>((params.num_tokens + kStoreWarps - 1) / kStoreWarps));
  to.threads = kStoreWarps * kWarp;
  to.device = device;
  to.stream = stream;
  launch(store_kernel<Format, DeviceRows>, to, params, what);
}

template <class DeviceRows>
void store(StoreParams<DeviceRows> params, bool fp8, int device, int64_t stream, const char* what) {
  const bool aligned = is_aligned(params.nope) && is_aligned(params.rope);
  if (fp8 && aligned) return launch_store<PackFp8DsMla<true>>(params, device, stream, what);
  if (fp8) return launch_store<PackFp8DsMla<false>>(params, device, stream, what);
  if (aligned) return launch_store<PackBf16<true>>(params, device, stream, what);
  launch_store<PackBf16<false>>(params, device, stream, what);
}

template <class DeviceRows>
StoreParams<DeviceRows> store_params(const TensorView& k_nope, const TensorView& k_rope, const TensorView& slots,
                                     const TensorView& host_rows, const TensorView& device_rows,
                                     const DeviceRows& where) {
  return {part_of(k_nope),       part_of(k_rope), indices_of(slots),
          where,                 rows_of(host_rows), rows_of(device_rows),
          k_nope.size(0), static_cast<int>(device_rows.size(1) / 16)};
}

inline void store_decode(TensorView k_nope, TensorView k_rope, TensorView slots, TensorView seq_lens,
                  TensorView req_pool_indices, TensorView num_real_reqs, TensorView host_rows, TensorView hot_rows,
                  int64_t device_buffer_size, int64_t page_size, bool fp8, int64_t stream) {
  const TailRows where{indices_of(seq_lens), indices_of(req_pool_indices),
                       static_cast<const int32_t*>(num_real_reqs.data_ptr()), static_cast<int>(device_buffer_size),
                       static_cast<int>(page_size)};
  store(store_params(k_nope, k_rope, slots, host_rows, hot_rows, where), fp8, k_nope.device().device_id, stream,
        "store_decode");
}

inline void store_extend(TensorView k_nope, TensorView k_rope, TensorView slots, TensorView row_ids,
                         TensorView host_rows, TensorView workspace, bool fp8, int64_t stream) {
  const GivenRows where{indices_of(row_ids)};
  store(store_params(k_nope, k_rope, slots, host_rows, workspace, where), fp8, k_nope.device().device_id, stream,
        "store_extend");
}

}  // namespace hisparse

