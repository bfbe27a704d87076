// The driver of the fused product: y = x · Wᵀ + bias with W packed, never written anywhere as BF16. Torch-free.
#pragma once
#include <vector>

#include "../plan.h"
#include "config.h"

namespace unweight::cuda {

struct LinearWeight {
  PackedMatrices packed;  // several matrices: experts, see LinearCall::offsets
  DeviceAddress bias;     // BF16 [matrices, out_features], or 0
  DeviceAddress y;        // [tokens, out_features]
  uint64_t y_stride;      // elements from row to row
};

struct LinearCall {
  std::vector<LinearWeight> weights;  // 1…kMostWeights, all with the same in_features and number of matrices
  uint64_t tokens;
  DeviceAddress x;            // BF16 [tokens, in_features], a multiple of 16
  uint64_t x_stride;          // elements from row to row, a multiple of 8
  DeviceAddress offsets = 0;  // i32 [matrices], ends of the experts' rows, zeros behind the last; 0: one matrix
  bool float_output = false;  // y is FP32, else BF16
  // The one matrix that the product after this one reads: a hint, which the result doesn't depend on. 0: none.
  DeviceAddress next = 0;
  uint64_t next_bytes = 0;
};

// Nothing waits for the device. Weights that the header contradicts, and rows of 16 whose bytes are damaged, give NaN.
// Allocates its workspace from `device`.
void linear(Device& device, const LinearCall& call, const LinearConfig& config);

// How the work is cut (schedule.h).
struct LinearCut {
  uint32_t ctas;
  uint32_t chunks;   // of a sheet, at most ctas
  bool tile_sheets;  // each tile is a sheet, else all are one
  uint32_t multiprocessors;
};
LinearCut cut_linear(const LinearCall& call, const LinearConfig& config, int multiprocessors);

// Of the workspace: sums of parts of blocks, and flags, whose content may be anything.
uint64_t partial_bytes(const LinearCall& call, const LinearConfig& config, const LinearCut& cut);
uint64_t flag_bytes(const LinearCall& call, const LinearConfig& config, const LinearCut& cut);

// The launch, unless there are no tokens: unweight_linear_<raw|huffman|nibble|any>_<tokens>. It may run again and
// again, each time when the one before has ended.
std::vector<LaunchPlan> plan_linear(const LinearCall& call, const LinearConfig& config, const LinearCut& cut,
                                    DeviceAddress partials, DeviceAddress flags);

}  // namespace unweight::cuda
