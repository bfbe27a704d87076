// Where tensors are, and what address that is on a GPU: what depends on a GPU's memory.
#include "../format/error.h"
#include "cuda_arguments.h"

namespace unweight {

void check_cuda(const char* name, const Tensor& tensor) {
  if (!tensor.is_cuda()) fail(name, ": is not on a CUDA device, expected it there as the other arguments are");
}

void check_same_device(const char* name, const Tensor& tensor, const Tensor& packed_w) {
  check_cuda(name, tensor);
  if (tensor.get_device_index() != packed_w.get_device_index())
    fail(name, ": on cuda:", tensor.get_device_index(), ", expected cuda:", packed_w.get_device_index(),
         ", the device of packed_w");
}

DeviceAddress address_of(const Tensor& tensor) { return reinterpret_cast<DeviceAddress>(tensor.const_data_ptr()); }

}  // namespace unweight
