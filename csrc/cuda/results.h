// What happens to results beside the products themselves: the kernel's argument and its driver. Torch-free.
#pragma once
#include "device.h"

namespace unweight::cuda {

// 16-bit values, NaN of FP32 as well.
constexpr uint32_t kNaNs = 0x7FFF7FFF;

struct PoisonArgument {
  DeviceAddress status;  // u64
  DeviceAddress y;       // a multiple of 2
  uint64_t bytes;        // an even number
};

constexpr uint32_t kResultThreads = 256, kResultCtas = 128;

// y becomes NaN where what it was made of turned out to be damaged, status != 0.
void poison(Device& device, DeviceAddress status, DeviceAddress y, uint64_t bytes);

}  // namespace unweight::cuda
