// swap-in: resolve selected positions to hot rows, load missing rows from the host, update the residency state.
//
// One launch. A cluster of `gridDim.x` CTAs serves one request of the batch (`blockIdx.y`): every CTA resolves the
// whole selection for itself, from the same inputs, and then copies its share of the missing rows. The first CTA
// writes the LRU order and the last one everything else. The cluster barrier keeps them from writing state that
// another CTA has still to read; nothing else passes between CTAs, so no scratch memory is needed.
//
// A thread owns consecutive entries of the selection and consecutive rows (places in the LRU order), so that order
// within a CTA is thread order and one scan over the threads ranks everything. What limits the part before the copy
// is chains of dependent shared-memory accesses and the number of instructions, hence ranks instead of search and
// shapes with exact sizes: see docs/kernel-notes.md.
#pragma once

#include "swap_in.cuh"

namespace hisparse {

// kInFlight: chunks a thread has under way while copying.
template <class Shape, class Row, int kInFlight>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    swap_in_kernel(const __grid_constant__ SwapInParams params) {
  static_assert(sizeof(SwapInShared<Shape>) <= kMaxSharedBytes);
  extern __shared__ uint4 shared[];
  SwapIn<Shape> step(params, *reinterpret_cast<SwapInShared<Shape>*>(shared));
  wait_for_previous_kernel();
  step.load_selection();
  step.load_request();
  step.clear_table();  // while the loads are under way
  if (!step.is_real()) return step.refuse();
  step.load_state();
  __syncthreads();
  step.resolve();
  step.find_misses();
  step.count();
  if (gridDim.x > 1) cluster_arrive();
  if (step.has_misses()) step.assign_victims();
  if (gridDim.x > 1) cluster_wait();
  if (blockIdx.x == 0) step.write_order();
  if (blockIdx.x == gridDim.x - 1) {
    if (step.has_misses()) step.write_owners();
    step.write_out();
  }
  if (!step.has_misses()) return;
  if (params.gate_width > 0) enter_copy_gate(params.gate_width);
  step.template copy_missing_rows<Row, kInFlight>();
  if (params.gate_width > 0) leave_copy_gate();
}

}  // namespace hisparse
