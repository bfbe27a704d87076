// Results that have to be other than what a product wrote: NaN for damaged weights.
#include "fill.cuh"
#include "results.h"

namespace unweight::cuda {

extern "C" __global__ void __launch_bounds__(kResultThreads) unweight_poison(const __grid_constant__ PoisonArgument a) {
  const uint64_t thread = uint64_t{blockIdx.x} * kResultThreads + threadIdx.x;
  if (*reinterpret_cast<const uint64_t*>(a.status) != 0)
    fill(a.y, a.y + a.bytes, kNaNs, thread, kResultCtas * kResultThreads);
}

}  // namespace unweight::cuda
