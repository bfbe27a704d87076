#pragma once
#include "arguments.h"

namespace unweight {

// unweight::unpack on a CPU, for operators that need the whole weight.
Tensor unpack_cpu(const Tensor& packed_w, int64_t in_features, ScalarType dtype);

}  // namespace unweight
