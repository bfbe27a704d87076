// The kernels by name: what a LaunchPlan says, and where nvcc put it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

#include "../format/error.h"

// cuda_kernels.inc is written by tools/native_build.py: UNWEIGHT_KERNEL(name) for each kernel in csrc/cuda.
// What is declared are host stubs, which stand for the kernels at the CUDA runtime. Nothing here calls one, so their
// arguments don't matter.
extern "C" {
#define UNWEIGHT_KERNEL(name) void name();
#include "cuda_kernels.inc"
#undef UNWEIGHT_KERNEL
}

namespace unweight {

constexpr int kRememberedDevices = 16;

struct Kernel {
  const char* name;
  const void* function;
  std::atomic<uint32_t> allowed_shared[kRememberedDevices];  // bytes, by device
};

inline Kernel& find_kernel(const char* name) {
  static Kernel kernels[] = {
#define UNWEIGHT_KERNEL(kernel) {#kernel, reinterpret_cast<const void*>(&kernel), {}},
#include "cuda_kernels.inc"
#undef UNWEIGHT_KERNEL
  };
  for (Kernel& kernel : kernels)
    if (std::strcmp(name, kernel.name) == 0) return kernel;
  fail("kernel: ", name, " is in no file of csrc/cuda");
}

}  // namespace unweight
