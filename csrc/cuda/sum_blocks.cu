// Checksums of the blocks that the writing kernels wrote, into their place in front of the data.
// A turn of the loop takes 64 bytes, which are 47 weights of huffman.
//
// hot loop: unweight_sum_blocks 47 LDG.E.NA.128.CONSTANT
// budget: unweight_sum_blocks 2.25
#include "checksum.cuh"
#include "encode.h"

namespace unweight::cuda {

// A CTA a piece of a block.
extern "C" __global__ void __launch_bounds__(kSumThreads) unweight_sum_blocks(const __grid_constant__ SumArgument a) {
  const uint32_t piece = blockIdx.x % a.pieces, unit = blockIdx.x / a.pieces;
  const uint64_t matrix = unit / a.blocks, block = unit % a.blocks;
  auto* packed = reinterpret_cast<uint8_t*>(a.packed) + matrix * a.matrix_bytes;
  const auto* index = reinterpret_cast<const uint32_t*>(packed + a.index_offset) + block * a.stages_per_block;
  const uint8_t* bytes = packed + a.data_offset + 16 * uint64_t{index[0]};
  const uint64_t size = 16 * uint64_t{index[a.stages_per_block] - index[0]};
  const uint64_t part = sum_bytes(bytes, 0, size, piece * kSumThreads + threadIdx.x, a.pieces * kSumThreads);
  add_warp_sum(reinterpret_cast<uint64_t*>(packed + a.checksums_offset) + block, part);
}

}  // namespace unweight::cuda
