// The kernels by name: what a LaunchPlan says, and where nvcc put it.
#pragma once
#include <cstring>

#include "../format/error.h"

// Their host stubs, which stand for them at the CUDA runtime. Nothing here calls one, so their argument doesn't matter.
#define UNWEIGHT_KERNELS(X)

extern "C" {
#define UNWEIGHT_DECLARE(name) void name();
UNWEIGHT_KERNELS(UNWEIGHT_DECLARE)
#undef UNWEIGHT_DECLARE
}

namespace unweight {

inline const void* find_kernel(const char* name) {
#define UNWEIGHT_FIND(kernel) \
  if (std::strcmp(name, #kernel) == 0) return reinterpret_cast<const void*>(&kernel);
  UNWEIGHT_KERNELS(UNWEIGHT_FIND)
#undef UNWEIGHT_FIND
  fail("kernel: ", name, " isn't in this build (csrc/torch/cuda_kernels.h)");
}

}  // namespace unweight
