// The kernels by name: what a LaunchPlan says, and where nvcc put it.
#pragma once
#include <cstring>

#include "../format/error.h"

// cuda_kernels.inc is written by tools/native_build.py: UNWEIGHT_KERNEL(name) for each kernel in csrc/cuda/*.cu.
// What is declared are host stubs, which stand for the kernels at the CUDA runtime. Nothing here calls one, so their
// arguments don't matter.
extern "C" {
#define UNWEIGHT_KERNEL(name) void name();
#include "cuda_kernels.inc"
#undef UNWEIGHT_KERNEL
}

namespace unweight {

inline const void* find_kernel(const char* name) {
#define UNWEIGHT_KERNEL(kernel) \
  if (std::strcmp(name, #kernel) == 0) return reinterpret_cast<const void*>(&kernel);
#include "cuda_kernels.inc"
#undef UNWEIGHT_KERNEL
  fail("kernel: ", name, " is in no file of csrc/cuda");
}

}  // namespace unweight
