// The codec's operators, for each other.
#pragma once
#include <functional>

#include "arguments.h"

namespace unweight {

Tensor to_cpu(const Tensor& tensor);

Tensor unpack_cpu(const Tensor& packed_w, int64_t in_features, ScalarType dtype);
// `layout`: what the caller takes it for, which is checked, or -1.
Tensor unpack_cuda(const Tensor& packed_w, int64_t in_features, ScalarType dtype, int layout);

Tensor pack_cpu(const Tensor& weight, int64_t layout, const std::vector<int64_t>& shape, int64_t threads);
Tensor transcode_cpu(const Tensor& packed_w, int64_t layout, int64_t threads);

// What `_describe` returns, on the CPU; reads header and code table.
Tensor description_of(const Packed& packed, int64_t row_bytes);

void check_in_features(int64_t in_features);
void check_unpacked_dtype(ScalarType dtype);

// The sizes of `packed_w` with other row_bytes. `header` gives each matrix's.
std::vector<int64_t> resized_shape(const Tensor& packed_w, const PackedArgument& packed, int64_t row_bytes,
                                   const std::function<Header(int64_t matrix)>& header);

}  // namespace unweight
