// What all kernels of the data plane share: index tensors, row geometry, the row copy, and the launch.
//
// A row is handled as 16-byte chunks. Host rows are pinned memory that the device reads and writes through its
// unified address; see docs/kernel-notes.md for what that costs.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

namespace hisparse {

using tvm::ffi::TensorView;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Columns of the counters tensor; tied to hisparse_kernel.reference by a test.
enum Counter { kTail = 0, kHit = 1, kMiss = 2 };

// ---- index tensors ---------------------------------------------------------------------------------------

// A contiguous int32 or int64 tensor; SGLang passes either. The branch is uniform over the whole grid.
struct Indices {
  const void* data;
  bool is_wide;

  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return is_wide ? __ldg(static_cast<const long long*>(data) + i) : __ldg(static_cast<const int*>(data) + i);
  }
};

inline Indices indices_of(const TensorView& tensor) { return {tensor.data_ptr(), tensor.dtype().bits == 64}; }

// ---- rows ------------------------------------------------------------------------------------------------

// Rows of a tensor [num_rows, row_bytes]; rows may lie further apart than their size.
struct Rows {
  uint4* base;
  int64_t num_rows;
  int64_t stride;  // 16-byte chunks from one row to the next

  __device__ __forceinline__ uint4* at(int64_t row) const { return base + row * stride; }
  __device__ __forceinline__ bool contains(int64_t row) const { return row >= 0 && row < num_rows; }
};

inline Rows rows_of(const TensorView& tensor) {
  return {static_cast<uint4*>(tensor.data_ptr()), tensor.size(0), tensor.stride(0) / 16};
}

// How many chunks a row has: a constant for the two formats in use, so that splitting a chunk number into row and
// offset is a multiplication.
template <int kBytes>
struct FixedRow {
  static_assert(kBytes % 16 == 0);
  __device__ static constexpr unsigned chunks(unsigned) { return kBytes / 16; }
};
struct AnyRow {
  __device__ static unsigned chunks(unsigned row_chunks) { return row_chunks; }
};
using Bf16Row = FixedRow<1152>;
using Fp8DsMlaRow = FixedRow<656>;

// Read once and not kept in L1: rows of host memory are not read twice in a launch, and no launch that reads host
// rows also writes them.
__device__ __forceinline__ uint4 load_once(const uint4* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

struct Move {
  const uint4* source;  // null: leave this row out
  uint4* target;
};

// Copies `num_rows` rows, spread chunk by chunk over `num_threads` threads, so that few rows use all of them and
// neighbouring lanes read neighbouring addresses. Each thread has kInFlight loads under way.
// `locate(row)` gives the ends of a row.
template <class Row, int kInFlight, class Locate>
__device__ __forceinline__ void copy_rows(unsigned thread, unsigned num_threads, unsigned num_rows,
                                          unsigned row_chunks, Locate locate) {
  const unsigned chunks = Row::chunks(row_chunks);
  const unsigned total = num_rows * chunks;
  for (unsigned start = thread; start < total; start += num_threads * kInFlight) {
    uint4 value[kInFlight];
    uint4* target[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const unsigned chunk = start + i * num_threads;
      target[i] = nullptr;
      if (chunk < total) {
        const unsigned row = chunk / chunks, offset = chunk - row * chunks;
        const Move move = locate(row);
        if (move.source != nullptr) {
          value[i] = load_once(move.source + offset);
          target[i] = move.target + offset;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (target[i] != nullptr) *target[i] = value[i];
    }
  }
}

// ---- warps ------------------------------------------------------------------------------------------------

// Sum of `value` over lanes 0 .. this one.
__device__ __forceinline__ uint32_t sum_through_lane(uint32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// ---- launch ----------------------------------------------------------------------------------------------

// Nothing that earlier kernels of the stream wrote may be read before this, where Launch::early is set.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
}

// Makes `device` current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

struct Launch {
  dim3 grid;
  int threads;
  int device;
  int64_t stream;
  size_t shared_bytes = 0;
  int cluster = 1;  // CTAs along grid.x that form a cluster
  bool early = false;  // may begin before the kernel before it has ended: the kernel calls wait_for_previous_kernel
};

// Attributes are a property of the kernel on a device: set once, never in a captured launch's way.
template <class Params>
void set_attributes(void (*kernel)(Params), const Launch& to, const char* what) {
  static std::mutex mutex;
  static std::set<std::pair<void*, int>> done;
  const std::lock_guard<std::mutex> guard(mutex);
  void* const address = reinterpret_cast<void*>(kernel);
  if (!done.insert({address, to.device}).second) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(to.shared_bytes)),
        what);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
}

template <class Params>
void launch(void (*kernel)(Params), const Launch& to, const Params& params, const char* what) {
  const OnDevice guard(to.device);
  if (to.shared_bytes > 0 || to.cluster > 1) set_attributes(kernel, to, what);
  cudaLaunchConfig_t config{};
  config.gridDim = to.grid;
  config.blockDim = dim3(to.threads);
  config.dynamicSmemBytes = to.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(to.stream);
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (to.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = to.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (to.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, params), what);
}

}  // namespace hisparse
