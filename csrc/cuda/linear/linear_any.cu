// The fused product with matrices whose layout the caller doesn't know: their headers say it.
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = -1;

UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_8, 8)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_16, 16)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_32, 32)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_64, 64)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_128, 128)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_any_256, 256)

}  // namespace unweight::cuda
