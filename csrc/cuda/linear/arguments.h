// The arguments of the fused product's kernels: plain data, filled in by linear.cpp. Host code and nvcc compile this.
#pragma once
#include "../arguments.h"
#include "config.h"

namespace unweight::cuda {

constexpr int kMostWeights = 4;  // that one launch multiplies the same x with: q, k, v, or gate and up

// One weight, or a stack of experts (packed.matrices of them).
struct WeightArgument {
  PackedArgument packed;
  DeviceAddress bias;  // BF16 [matrices, out_features], or 0
  DeviceAddress y;     // [tokens, out_features], rows y_stride elements apart
  uint64_t y_stride;
};

struct LinearArgument {
  WeightArgument weights[kMostWeights];
  uint32_t weight_count;
  uint32_t tokens;         // M: rows of x, those of all experts together
  DeviceAddress x;         // BF16 [tokens, in_features], a multiple of 16
  uint64_t x_stride;       // elements from row to row, a multiple of 8
  DeviceAddress offsets;   // i32 [matrices]: where the rows of each expert end (they start where the last one's end);
                           // 0: one matrix, and all rows are its own
  uint32_t chunks;         // that each sheet is cut into: schedule.h
  uint32_t tile_sheets;    // each tile is a sheet, else all are one
  DeviceAddress partials;  // FP32 [chunks][warpgroups][sheet_rows(T)][64]: sums of a part of a block, gather.cuh
  DeviceAddress flags;     // u64 [chunks][warpgroups][sheet_rows(1)][4 warps]: the nonce when such sums are there
  uint64_t nonce;          // of the launch, not 0
  uint32_t float_output;   // y is FP32, else BF16
  // The packed matrix that the next product reads, so that the memory isn't idle in between; 0: it isn't known.
  DeviceAddress next;
  uint64_t next_bytes;
  uint32_t multiprocessors;
};

// Of a chunk's pieces and flags: where sheets are tiles, each has the rows of its tokens, else all share `otherwise`.
UNWEIGHT_HD uint64_t sheet_rows(bool tile_sheets, uint64_t tokens, uint64_t otherwise) {
  return tile_sheets ? tokens : otherwise;
}

}  // namespace unweight::cuda
