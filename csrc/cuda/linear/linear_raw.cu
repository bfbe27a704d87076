// The fused product with raw matrices: the baseline.
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kRaw);

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_raw_8(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 8>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_raw_16(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 16>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_raw_32(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 32>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_raw_64(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 64>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1) unweight_linear_raw_128(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 128>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1) unweight_linear_raw_256(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 256>(a);
}

}  // namespace unweight::cuda
