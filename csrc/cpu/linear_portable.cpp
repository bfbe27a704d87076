// The product for every CPU: a stage is decoded to rows, and vectors of four numbers, which compilers map to what there
// is, multiply them. One order of arithmetic for all sizes, see linear_block.h: a row's columns ascend in units of 8,
// even columns before odd ones, in four partial sums.
#include <algorithm>
#include <cstring>

#include "huffman_stages.h"
#include "linear_block.h"
#include "plain_stages.h"

namespace unweight {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

constexpr int kUnitColumns = 8;
constexpr int kUnits = kStageColumns / kUnitColumns;
constexpr int kRowRun = 4;  // rows and tokens whose sums fit the registers of SSE2
constexpr int kTokenRun = 2;

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

// A token's columns of a stage: of each unit, the even ones and the odd ones.
struct StageColumns {
  Floats even_odd[kUnits][2];
};

template <class T>
void load_columns(const T* x, StageColumns& columns) {
  float* out = reinterpret_cast<float*>(columns.even_odd);
  for (int unit = 0; unit < kUnits; unit++, x += kUnitColumns, out += kUnitColumns)
    for (int c = 0; c < 4; c++) {
      out[c] = widen(x[2 * c]);
      out[4 + c] = widen(x[2 * c + 1]);
    }
}

// sums: [kRows, tokens]; weights: rows `stride` apart.
template <int kRows, int kTokens>
void multiply(const uint16_t* weights, int64_t stride, const StageColumns* x, Floats* sums, int64_t tokens) {
  Floats sum[kRows][kTokens];
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < kTokens; t++) sum[r][t] = sums[r * tokens + t];
  for (int unit = 0; unit < kUnits; unit++)
    for (int r = 0; r < kRows; r++) {
      Words pairs;
      std::memcpy(&pairs, weights + r * stride + unit * kUnitColumns, sizeof pairs);
      const Words even = pairs << 16, odd = pairs & 0xFFFF0000;
      for (int t = 0; t < kTokens; t++) {
        sum[r][t] += (Floats)even * x[t].even_odd[unit][0];
        sum[r][t] += (Floats)odd * x[t].even_odd[unit][1];
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < kTokens; t++) sums[r * tokens + t] = sum[r][t];
}

template <int kRows>
void multiply_tokens(const uint16_t* weights, int64_t stride, const StageColumns* x, Floats* sums, int64_t tokens) {
  int64_t t = 0;
  for (; t + kTokenRun <= tokens; t += kTokenRun) multiply<kRows, kTokenRun>(weights, stride, x + t, sums + t, tokens);
  if (t < tokens) multiply<kRows, 1>(weights, stride, x + t, sums + t, tokens);
}

template <class T>
Damage multiply_block(const LinearJob& job, const LinearBlock& task, uint8_t* scratch) {
  const MatrixView& matrix = *job.matrix;
  const int64_t columns = matrix.in_features, tokens = task.tokens;
  const int64_t rows = std::min<int64_t>(kBlockRows, matrix.out_features - kBlockRows * task.block);
  Floats* sums = reinterpret_cast<Floats*>(scratch);                              // [rows, tokens]
  StageColumns* x = reinterpret_cast<StageColumns*>(sums + kBlockRows * tokens);  // [tokens]
  std::fill_n(sums, rows * tokens, Floats{});
  HuffmanStages huffman(matrix, task.block);
  uint16_t tile[kBlockRows * kStageColumns];

  for (int64_t first = 0; first < columns; first += kStageColumns) {
    const bool whole = first + kStageColumns <= columns;
    for (int64_t t = 0; t < tokens; t++)
      load_columns(whole ? static_cast<const T*>(job.x) + (task.first_token + t) * job.x_stride + first
                         : static_cast<const T*>(job.x_tail) + (task.first_token + t) * kStageColumns,
                   x[t]);
    const uint16_t* weights = tile;
    int64_t stride = kStageColumns;
    if (!task.rows && matrix.layout == Layout::kHuffman) {
      huffman.next(tile);
    } else if (!task.rows) {
      decode_plain_stage(matrix, task.block * matrix.stages_per_block + first / kStageColumns, tile);
    } else if (whole) {
      weights = task.rows + first;
      stride = columns;
    } else {
      std::memset(tile, 0, sizeof tile);
      for (int64_t r = 0; r < rows; r++)
        std::copy_n(task.rows + r * columns + first, columns - first, tile + r * kStageColumns);
    }
    int64_t r = 0;
    for (; r + kRowRun <= rows; r += kRowRun)
      multiply_tokens<kRowRun>(weights + r * stride, stride, x, sums + r * tokens, tokens);
    for (; r < rows; r++) multiply_tokens<1>(weights + r * stride, stride, x, sums + r * tokens, tokens);
  }

  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = kBlockRows * task.block + r;
    for (int64_t t = 0; t < tokens; t++) {
      const Floats s = sums[r * tokens + t];
      float sum = (s[0] + s[2]) + (s[1] + s[3]);
      if (job.bias) sum += widen(static_cast<const T*>(job.bias)[row]);
      static_cast<T*>(job.y)[(task.first_token + t) * matrix.out_features + row] = narrow(sum, T{});
    }
  }
  return {Flaw::kNone, 0, 0};
}

}  // namespace

size_t linear_scratch_portable(int64_t tokens) { return tokens * (kBlockRows * sizeof(Floats) + sizeof(StageColumns)); }

Damage linear_block_portable(const LinearJob& job, const LinearBlock& block, uint8_t* scratch) {
  return job.float32 ? multiply_block<float>(job, block, scratch) : multiply_block<uint16_t>(job, block, scratch);
}

}  // namespace unweight
