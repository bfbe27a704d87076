// The fused product with nibble matrices.
// A round multiplies a stage, every check and wait included; patches aren't, but asking whether there are some is.
//
// expects: UBLKCP HGMMA
// hot loop: unweight_linear_nibble_8 64
// budget: unweight_linear_nibble_8 2.4
// hot loop: unweight_linear_nibble_16 64
// budget: unweight_linear_nibble_16 2.4
// hot loop: unweight_linear_nibble_32 64
// budget: unweight_linear_nibble_32 2.4
// hot loop: unweight_linear_nibble_64 64
// budget: unweight_linear_nibble_64 2.4
// hot loop: unweight_linear_nibble_128 64
// budget: unweight_linear_nibble_128 2.4
// hot loop: unweight_linear_nibble_256 64
// budget: unweight_linear_nibble_256 2.6
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kNibble);

UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_8, 8)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_16, 16)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_32, 32)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_64, 64)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_128, 128)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_nibble_256, 256)

}  // namespace unweight::cuda
