// The fused product with huffman matrices.
// A round multiplies a stage, every check and wait included; patches aren't, but asking whether there are some is.
//
// hot loop: unweight_linear_huffman_8 64
// budget: unweight_linear_huffman_8 5.21
// hot loop: unweight_linear_huffman_16 64
// budget: unweight_linear_huffman_16 5.21
// hot loop: unweight_linear_huffman_32 64
// budget: unweight_linear_huffman_32 5.21
// hot loop: unweight_linear_huffman_64 64
// budget: unweight_linear_huffman_64 5.21
// hot loop: unweight_linear_huffman_128 64
// budget: unweight_linear_huffman_128 5.21
// hot loop: unweight_linear_huffman_256 64
// budget: unweight_linear_huffman_256 5.5
//
// expects: UBLKCP HGMMA
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kHuffman);

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_huffman_8(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 8>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_huffman_16(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 16>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_huffman_32(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 32>(a);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unweight_linear_huffman_64(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 64>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    unweight_linear_huffman_128(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 128>(a);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    unweight_linear_huffman_256(const __grid_constant__ LinearArgument a) {
  linear<kLayout, 256>(a);
}

}  // namespace unweight::cuda
