// The GPU of a tensor, as the drivers of the kernels see it: torch's allocator and its current stream.
#pragma once
#include <memory>
#include <string>

#include "../cuda/device.h"
#include "arguments.h"

namespace unweight {

class TorchDevice : public Device {
 public:
  // What it calls itself: tuned tables go by that.
  virtual std::string name() const = 0;
  // Is the stream being captured into a graph? Then nothing can be read back.
  virtual bool captures() const = 0;
  // What was allocated so far may be used again by what is launched from now on.
  virtual void release() = 0;
  virtual void copy(DeviceAddress to, DeviceAddress from, size_t bytes) = 0;
};

// The device of `like`, current as long as the result lives. Throws Error where the kernels can't run there: built
// without CUDA, no driver, or one or a GPU that is too old (support.h).
std::unique_ptr<TorchDevice> cuda_device(const Tensor& like);

// The same check, without a tensor.
void check_cuda_device(int64_t index);
// And the fused product's, which needs more of a GPU than the other kernels.
void check_fused_device(int64_t index);

}  // namespace unweight
