// What linear() hands to the kernel of an instruction set: one 64-row block times a run of tokens. Plain data, see
// matrix_view.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "matrix_view.h"

namespace unweight {

struct LinearJob {
  const MatrixView* matrix;
  const void* x;
  int64_t x_stride;    // elements
  const void* x_tail;  // [tokens, kStageColumns]: the columns of a last stage that isn't whole, and zeros
  bool float32;        // of x, bias and y; else BF16
  const void* bias;
  void* y;
};

struct LinearBlock {
  uint64_t block;
  const uint16_t* rows;  // the block's weights, row-major (archive), or null: they are in the tiles of the matrix
  int64_t first_token, tokens;
};

// Tokens that one call may take, and the memory that it needs, 64-byte aligned.
constexpr int64_t kMaxBlockTokens = 256;
size_t linear_scratch_avx512(int64_t tokens);
size_t linear_scratch_portable(int64_t tokens);

Damage linear_block_avx512(const LinearJob& job, const LinearBlock& block, uint8_t* scratch);
Damage linear_block_portable(const LinearJob& job, const LinearBlock& block, uint8_t* scratch);

}  // namespace unweight
