// The fused product with nibble matrices.
// A round multiplies a stage, every check and wait included; patches aren't, but asking whether there are some is.
//
// hot loop: unweight_linear_nibble_8 64
// budget: unweight_linear_nibble_8 2.6
// hot loop: unweight_linear_nibble_16 64
// budget: unweight_linear_nibble_16 2.6
// hot loop: unweight_linear_nibble_32 64
// budget: unweight_linear_nibble_32 2.6
// hot loop: unweight_linear_nibble_64 64
// budget: unweight_linear_nibble_64 2.6
// hot loop: unweight_linear_nibble_128 64
// budget: unweight_linear_nibble_128 2.6
// hot loop: unweight_linear_nibble_256 64
// budget: unweight_linear_nibble_256 2.9
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kNibble);

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_nibble_8(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 8>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_nibble_16(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 16>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_nibble_32(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 32>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_nibble_64(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 64>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    unweight_linear_nibble_128(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 128>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    unweight_linear_nibble_256(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 256>(a);
}

}  // namespace unweight::cuda
