// y = x · Wᵀ + bias with a packed W, decoded as it is multiplied.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec.h"

namespace unweight {

enum class XType { kBFloat16, kFloat32 };

// x [tokens, in_features], rows `x_row_stride` elements apart; bias [out_features] or null; y [tokens, out_features],
// contiguous. All three have the same type.
//
// Products of BF16 x are summed in FP32 and rounded once, after the bias. A token's result depends neither on the other
// tokens, nor on how many there are, nor on the threads, nor on W's layout; only on capability(). Throws Error on
// damaged bytes and reads none outside [w.bytes, w.bytes + size); checksums are not checked.
void linear(const Packed& w, size_t size, const void* x, int64_t x_row_stride, XType type, int64_t tokens,
            const void* bias, void* y, const Parallel& parallel);

}  // namespace unweight
