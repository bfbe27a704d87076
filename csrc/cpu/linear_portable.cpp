// The product in plain C++: a stage is decoded to rows, and their dot products have 16 partial sums for the compiler to
// vectorise. See linear_block.h.
#include <algorithm>
#include <cstring>

#include "linear_block.h"
#include "tile_decoder.h"

namespace unweight {
namespace {

constexpr int kSums = 16;

float widen(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
float widen(float value) { return value; }

// Rounds to nearest even.
uint16_t narrow(float value, uint16_t) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float narrow(float value, float) { return value; }

template <class T>
Damage multiply_block(const LinearJob& job, const LinearBlock& task, float* scratch) {
  const MatrixView& matrix = *job.matrix;
  const int64_t columns = matrix.in_features, tokens = task.tokens;
  const int64_t rows = std::min<int64_t>(kBlockRows, matrix.out_features - kBlockRows * task.block);
  float* sums = scratch;                          // [rows, tokens, kSums]
  float* x = sums + kBlockRows * tokens * kSums;  // [tokens, kStageColumns]
  std::fill_n(sums, rows * tokens * kSums, 0.f);
  TileDecoder decoder(matrix, task.block);
  uint16_t tile[kTileWeights];
  float row_weights[kStageColumns];

  for (int64_t first = 0; first < columns; first += kStageColumns) {
    const bool whole = first + kStageColumns <= columns;
    const int64_t stride = whole ? job.x_stride : kStageColumns;
    const T* from = whole ? static_cast<const T*>(job.x) + first : static_cast<const T*>(job.x_tail);
    for (int64_t t = 0; t < tokens; t++)
      for (int c = 0; c < kStageColumns; c++)
        x[t * kStageColumns + c] = widen(from[(task.first_token + t) * stride + c]);
    if (!task.rows) decoder.next(tile);
    for (int64_t r = 0; r < rows; r++) {
      const uint16_t* weights = task.rows ? task.rows + r * columns + first : tile + r * kStageColumns;
      const int64_t valid = task.rows && !whole ? columns - first : kStageColumns;
      for (int64_t c = 0; c < valid; c++) row_weights[c] = widen(weights[c]);
      for (int64_t c = valid; c < kStageColumns; c++) row_weights[c] = 0;
      for (int64_t t = 0; t < tokens; t++) {
        float* sum = sums + (r * tokens + t) * kSums;
        const float* token = x + t * kStageColumns;
        for (int c = 0; c < kStageColumns; c += kSums)
          for (int i = 0; i < kSums; i++) sum[i] += row_weights[c + i] * token[c + i];
      }
    }
  }

  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = kBlockRows * task.block + r;
    for (int64_t t = 0; t < tokens; t++) {
      float* sum = sums + (r * tokens + t) * kSums;
      for (int width = kSums / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
      if (job.bias) sum[0] += widen(static_cast<const T*>(job.bias)[row]);
      static_cast<T*>(job.y)[(task.first_token + t) * matrix.out_features + row] = narrow(sum[0], T{});
    }
  }
  return {Flaw::kNone, 0, 0};
}

}  // namespace

size_t linear_scratch_portable(int64_t tokens) { return sizeof(float) * tokens * (kBlockRows * kSums + kStageColumns); }

Damage linear_block_portable(const LinearJob& job, const LinearBlock& block, uint8_t* scratch) {
  float* sums = reinterpret_cast<float*>(scratch);
  return job.float32 ? multiply_block<float>(job, block, sums) : multiply_block<uint16_t>(job, block, sums);
}

}  // namespace unweight
