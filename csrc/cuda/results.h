// What happens to results beside the products themselves: the kernels' arguments and their drivers. Torch-free.
#pragma once
#include "device.h"

namespace unweight::cuda {

// 16-bit values, so that they do for FP32 as well: 0, or NaN of either type.
constexpr uint32_t kNaNs = 0x7FFF7FFF;

struct PoisonArgument {
  DeviceAddress status;  // u64
  DeviceAddress y;       // a multiple of 2
  uint64_t bytes;        // an even number
};

struct ClearRestArgument {
  DeviceAddress offsets;  // i32 [experts]: where the rows of each end
  DeviceAddress y;        // [rows, row_bytes], a multiple of 2 as row_bytes is
  uint64_t rows, row_bytes;
  uint32_t experts;
};

constexpr uint32_t kResultThreads = 256, kResultCtas = 128;

// y becomes NaN where what it was made of turned out to be damaged, status != 0.
void poison(Device& device, DeviceAddress status, DeviceAddress y, uint64_t bytes);

// The rows of y that no expert has, which are those behind the largest offset, become zeros.
void clear_rest(Device& device, const ClearRestArgument& argument);

}  // namespace unweight::cuda
