// Which GPUs and drivers the kernels run on, and one line each for the others: what was found, what is needed, what
// works instead. Torch-free, CUDA-free: who knows the CUDA runtime asks it and passes the answers on.
#pragma once
#include <cstdint>

namespace unweight::cuda {

// Of CUDA, as the runtime gives them: 12040 is 12.4.
struct Versions {
  int driver;  // the newest CUDA that it is for; 0: there is none
  int build;   // of the toolkit that compiled the kernels
};

struct Gpu {
  int64_t index;
  int major, minor;  // compute capability
};

// These throw Error.
void check_driver(Versions versions);
// For all kernels but the fused product: compute capability 8.0 or newer.
void check_gpu(Gpu gpu, Versions versions);
// For the fused product, which is code of sm_90a: Hopper and nothing else.
void check_fused_gpu(Gpu gpu, Versions versions);

}  // namespace unweight::cuda
