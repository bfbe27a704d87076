// The fused product with matrices whose layout the caller doesn't know: their headers say it.
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = -1;

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_any_8(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 8>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_any_16(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 16>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_any_32(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 32>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1) unweight_linear_any_64(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 64>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1) unweight_linear_any_128(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 128>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1) unweight_linear_any_256(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 256>(a);
}

}  // namespace unweight::cuda
