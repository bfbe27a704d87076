// The fused product with huffman matrices.
// A round multiplies a stage, every check and wait included; patches aren't, but asking whether there are some is.
//
// expects: UBLKCP HGMMA
// hot loop: unweight_linear_huffman_8 64
// budget: unweight_linear_huffman_8 5.2
// hot loop: unweight_linear_huffman_16 64
// budget: unweight_linear_huffman_16 5.2
// hot loop: unweight_linear_huffman_32 64
// budget: unweight_linear_huffman_32 5.2
// hot loop: unweight_linear_huffman_64 64
// budget: unweight_linear_huffman_64 5.2
// hot loop: unweight_linear_huffman_128 64
// budget: unweight_linear_huffman_128 5.2
// hot loop: unweight_linear_huffman_256 64
// budget: unweight_linear_huffman_256 5.5
#include "linear.cuh"

namespace unweight::cuda {

constexpr int kLayout = static_cast<int>(Layout::kHuffman);

UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_8, 8)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_16, 16)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_32, 32)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_64, 64)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_128, 128)
UNWEIGHT_LINEAR_KERNEL(unweight_linear_huffman_256, 256)

}  // namespace unweight::cuda
