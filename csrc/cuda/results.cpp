#include "results.h"

namespace unweight::cuda {

void poison(Device& device, DeviceAddress status, DeviceAddress y, uint64_t bytes) {
  if (bytes == 0) return;
  device.launch(make_plan("unweight_poison", kResultCtas, kResultThreads, 0, PoisonArgument{status, y, bytes}));
}

void clear_rest(Device& device, const ClearRestArgument& argument) {
  if (argument.rows == 0) return;
  device.launch(make_plan("unweight_clear_rest", kResultCtas, kResultThreads, 0, argument));
}

}  // namespace unweight::cuda
