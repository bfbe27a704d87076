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

// A CTA's sums that are not yet all of a block's: who adds them up learns here what they are.
// Each CTA leaves two: of the first group of blocks that it worked on, and of the last one if that is another.
struct PieceRecord {
  uint32_t weight, matrix;       // of weights[], of its stack
  uint32_t first_token, tokens;  // rows of x and y; tokens = 0: there is nothing
  uint32_t group;                // of `warpgroups` blocks
  uint32_t segments;             // of a block
  uint32_t begin[4], end[4];     // segments of each of the group's blocks that are summed here: [begin, end)
};

struct LinearArgument {
  WeightArgument weights[kMostWeights];
  uint32_t weight_count;
  uint32_t tokens;         // M: rows of x, those of all experts together
  DeviceAddress x;         // BF16 [tokens, in_features], a multiple of 16
  uint64_t x_stride;       // elements from row to row, a multiple of 8
  DeviceAddress offsets;   // i32 [matrices]: where the rows of each expert end (they start where the last one's end);
                           // 0: one matrix, and all rows are its own
  DeviceAddress records;   // PieceRecord [ctas][2]
  DeviceAddress partials;  // FP32 [ctas][2][warpgroups][tokens / 2 of the config][128]: registers of a warpgroup
  uint32_t float_output;   // y is FP32, else BF16
};

struct SumPiecesArgument {
  LinearArgument linear;
  uint32_t ctas, warpgroups;  // of the launch that left the pieces
  uint32_t config_tokens;     // and its N
};

}  // namespace unweight::cuda
