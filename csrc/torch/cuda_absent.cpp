// In place of cuda_device.cpp where the build found no CUDA compiler.
#include "../format/error.h"
#include "cuda_device.h"

namespace unweight {

void check_cuda_device(int64_t) {
  fail(
      "CUDA: this build of unweight-ext has no CUDA kernels: install nvcc 12.4 or newer (a CUDA toolkit, or pip's "
      "nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt and nvidia-cuda-runtime) and build it again");
}

void check_fused_device(int64_t index) { check_cuda_device(index); }

std::unique_ptr<TorchDevice> cuda_device(const Tensor&) {
  check_cuda_device(0);
  return nullptr;
}

}  // namespace unweight
