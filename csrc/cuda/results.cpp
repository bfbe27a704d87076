#include "results.h"

namespace unweight::cuda {

void poison(Device& device, DeviceAddress status, DeviceAddress y, uint64_t bytes) {
  if (bytes == 0) return;
  device.launch(make_plan("unweight_poison", kResultCtas, kResultThreads, 0, PoisonArgument{status, y, bytes}));
}

}  // namespace unweight::cuda
