// Tensors of a GPU as the drivers of the kernels take them.
#pragma once
#include "../cuda/plan.h"
#include "arguments.h"

namespace unweight {

// Of a tensor's first element, as kernels get it; while there is a Device.
DeviceAddress address_of(const Tensor& tensor);

// A packed tensor on a GPU, checked, where kernels can read it: itself, or a copy where it is misaligned.
struct CudaPacked {
  Tensor tensor;
  PackedArgument argument;

  CudaPacked(const Tensor& packed_w, bool stacked_allowed);
  // Refuses more columns than the rows' bytes can hold, before anything of their size is allocated.
  void check_columns(const char* name, int64_t columns) const;
  cuda::PackedMatrices matrices(int64_t in_features) const;
};

}  // namespace unweight
