// Write-through store: rows of new tokens to their device rows and their host slots, packed on the way. One warp a
// token, one launch, so that stream order alone makes the host row complete before any later miss reads it.
#pragma once

#include "hisparse.cuh"

namespace hisparse {

constexpr int kStoreWarps = 4;

// One of the two parts of a token, bf16 [tokens, dim], rows `stride` values apart.
struct Part {
  const uint16_t* values;
  int64_t stride;
  int dim;
};

inline Part part_of(const TensorView& tensor) {
  return {static_cast<const uint16_t*>(tensor.data_ptr()), tensor.stride(0),
          static_cast<int>(tensor.size(tensor.ndim() - 1))};
}

struct Token {
  const uint16_t* nope;
  const uint16_t* rope;
};

// ---- formats: chunk(token, i) makes 16 bytes of the row; lanes call it together ---------------------------------

// nope_dim values, then rope_dim values, as they are. kAligned: both parts are whole, aligned chunks.
template <bool kAligned>
struct PackBf16 {
  static __device__ __forceinline__ uint4 chunk(const Token& token, int i, int nope_dim) {
    const int start = i * 8;
    if constexpr (kAligned) {
      const uint16_t* source = start < nope_dim ? token.nope + start : token.rope + (start - nope_dim);
      return __ldg(reinterpret_cast<const uint4*>(source));
    } else {
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int i = start + 2 * w;
        word[w] = value(token, i, nope_dim) | value(token, i + 1, nope_dim) << 16;
      }
      return make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  static __device__ __forceinline__ uint32_t value(const Token& token, int i, int nope_dim) {
    return __ldg(i < nope_dim ? token.nope + i : token.rope + (i - nope_dim));
  }

  template <class Write>
  static __device__ __forceinline__ void pack(const Token& token, int nope_dim, int row_chunks, int lane, Write write) {
    for (int i = lane; i < row_chunks; i += kWarp) write(i, chunk(token, i, nope_dim));
  }
};

// The two divisions of the quantisation, as Triton compiles `/` on float32: SGLang's own fp8 path stores through a
// Triton kernel, and the bits have to agree. `div.full` may differ from the correctly rounded quotient.
__device__ __forceinline__ float divide(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// Two values as float8_e4m3fn, the first in the low byte; rounds to nearest, saturates.
__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float bf16_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

// 512 fp8 values (32 chunks), a float32 scale for each 128 of them (1 chunk), 64 bf16 values (8 chunks).
// Lane l quantises values 16 l .. 16 l + 15; eight lanes share a scale.
template <bool kAligned>
struct PackFp8DsMla {
  static constexpr float kMax = 448.0f;
  static constexpr int kLanesPerGroup = 8;

  template <class Write>
  static __device__ __forceinline__ void pack(const Token& token, int, int, int lane, Write write) {
    float value[16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 bits = PackBf16<kAligned>::chunk(token, 2 * lane + half, 512);
      const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        value[8 * half + 2 * w] = bf16_to_float(word[w] & 0xffff);
        value[8 * half + 2 * w + 1] = bf16_to_float(word[w] >> 16);
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(value[i]));
#pragma unroll
    for (int step = 1; step < kLanesPerGroup; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    const float scale = divide(largest, kMax);
    const float inverse = scale > 0.0f ? divide(1.0f, scale) : 0.0f;
    uint32_t packed[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = fmaxf(fminf(value[4 * w + i] * inverse, kMax), -kMax);
      packed[w] = to_e4m3x2(scaled[0], scaled[1]) | to_e4m3x2(scaled[2], scaled[3]) << 16;
    }
    write(lane, make_uint4(packed[0], packed[1], packed[2], packed[3]));

    uint32_t scales[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) scales[g] = __float_as_uint(__shfl_sync(kAllLanes, scale, g * kLanesPerGroup));
    if (lane == 0) write(32, make_uint4(scales[0], scales[1], scales[2], scales[3]));
    if (lane < 8) write(33 + lane, PackBf16<kAligned>::chunk(token, 64 + lane, 512));
  }
};

// ---- where a token's device row is ------------------------------------------------------------------------------

// Decode: the tail ring of the request's region.
struct TailRows {
  Indices seq_lens;              // [batch]
  Indices req_pool_indices;      // [batch]
  const int32_t* num_real_reqs;  // [1]
  int device_buffer_size, page_size;

  __device__ __forceinline__ bool is_padding(int64_t token) const { return token >= __ldg(num_real_reqs); }
  __device__ __forceinline__ int64_t row(int64_t token) const {
    const int64_t position = seq_lens[token] - 1;
    if (position < 0) return -1;
    return req_pool_indices[token] * (device_buffer_size + page_size) + device_buffer_size + position % page_size;
  }
};

// Extend: given rows of the workspace.
struct GivenRows {
  Indices row_ids;  // [tokens]

  __device__ __forceinline__ bool is_padding(int64_t) const { return false; }
  __device__ __forceinline__ int64_t row(int64_t token) const { return row_ids[token]; }
};

template <class DeviceRows>
struct StoreParams {
  Part nope, rope;
  Indices slots;  // [tokens]
  DeviceRows where;
  Rows host, device;
  int64_t num_tokens;
  int row_chunks;
};

template <class Format, class DeviceRows>
__global__ void __launch_bounds__(kStoreWarps * kWarp) store_kernel(const __grid_constant__ StoreParams<DeviceRows> p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kStoreWarps + threadIdx.x / kWarp;
  if (token >= p.num_tokens || p.where.is_padding(token)) return;
  const int64_t slot = p.slots[token], row = p.where.row(token);
  uint4* const host_row = p.host.contains(slot) ? p.host.at(slot) : nullptr;
  uint4* const device_row = p.device.contains(row) ? p.device.at(row) : nullptr;
  const Token source{p.nope.values + token * p.nope.stride, p.rope.values + token * p.rope.stride};
  Format::pack(source, p.nope.dim, p.row_chunks, threadIdx.x % kWarp, [&](int i, const uint4& chunk) {
    if (device_row != nullptr) device_row[i] = chunk;
    if (host_row != nullptr) host_row[i] = chunk;
  });
}

}  // namespace hisparse
