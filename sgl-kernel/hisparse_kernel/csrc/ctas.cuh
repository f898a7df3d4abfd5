// How the CTAs of a launch wait for each other: the cluster barrier, and a gate for copies from the host.
#pragma once

#include "hisparse.cuh"

namespace hisparse {

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Lets CTAs copy in the order they come, `width` at a time: host reads of few requests at a time find their address
// translations, reads of all requests at once do not. Who waits here waits for CTAs that run and wait for nothing, so
// this cannot lock up. The tickets go on from launch to launch, over all streams of the device.
struct CopyGate {
  unsigned entered, left;
};
__device__ CopyGate copy_gate;

__device__ __forceinline__ void enter_copy_gate(unsigned width) {
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(&copy_gate.entered, 1u);
    const volatile unsigned* left = &copy_gate.left;
    while (static_cast<int>(ticket - *left) >= static_cast<int>(width)) __nanosleep(64);
  }
  __syncthreads();
}
__device__ __forceinline__ void leave_copy_gate() {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&copy_gate.left, 1u);
}

}  // namespace hisparse
