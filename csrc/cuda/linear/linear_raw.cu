// The fused product with raw matrices: the baseline.
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kRaw);

UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_8, 8)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_16, 16)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_32, 32)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_64, 64)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_128, 128)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_raw_256, 256)

}  // namespace unweight::cuda
