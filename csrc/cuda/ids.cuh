// What the kernels that look up rows share: ids, and rows that can't be had.
#pragma once
#include "arguments.h"

namespace unweight::cuda {

// Negative ids become huge ones.
static __device__ __forceinline__ uint64_t row_id(const EmbeddingArgument& a, uint64_t i) {
  if (a.wide_ids) return reinterpret_cast<const uint64_t*>(a.ids)[i];
  return static_cast<uint64_t>(int64_t{reinterpret_cast<const int32_t*>(a.ids)[i]});
}

static __device__ __forceinline__ void fill_row_with_nan(uint16_t* out, uint64_t columns, uint32_t thread,
                                                         uint32_t threads) {
  constexpr uint16_t kNaN = 0x7FFF;
  for (uint64_t i = thread; i < columns; i += threads) out[i] = kNaN;
}

}  // namespace unweight::cuda
