// vdpbf16ps on tiles that were decoded into the cache just before (see linear_block.h). One order of arithmetic for all
// sizes: a row's columns ascend in units of 8, one vdpbf16ps (BF16 x) or two FMAs (FP32 x) each, in four partial sums.
#include "decode_avx512.h"
#include "linear_block.h"

namespace unweight {
namespace {

// Sums of a token and a warp: a vector of 4 rows x 4 partial sums for each group.
constexpr int kSums = kGroups * 16;

// What a multiplication asks for on the side, so that the next stages are there when it is done.
struct Ahead {
  uintptr_t at, end;
};

UNWEIGHT_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

UNWEIGHT_INLINE Ahead stages_ahead(const MatrixView& matrix, uint64_t stage, uint64_t count) {
  const uint64_t units = (matrix.out_features + kBlockRows - 1) / kBlockRows * matrix.stages_per_block;
  const auto address = [&](uint64_t s) {
    const uint64_t step = load_word(matrix.bytes + matrix.index_offset + 4 * (s < units ? s : units));
    return reinterpret_cast<uintptr_t>(matrix.bytes) + matrix.data_offset + 16 * step;
  };
  return {address(stage), address(stage + count)};
}

template <int kTokens>
UNWEIGHT_INLINE void multiply_bfloat16(const uint8_t* tiles, int64_t units, const uint16_t* x, int64_t x_stride,
                                       float* sums, Ahead& ahead) {
  __m512 sum[kTokens][kGroups];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) sum[t][g] = _mm512_load_ps(sums + t * kSums + g * 16);
  uintptr_t at = ahead.at;
  const uintptr_t step = ahead.at < ahead.end ? 2 * kVectorBytes : 0;
  for (int64_t u = 0; u < units; u++, tiles += kUnitBytes, x += kUnitColumns) {
    __m512i w[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) w[g] = _mm512_load_si512(tiles + g * kVectorBytes);
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(at + kVectorBytes), _MM_HINT_T1);
    at += step;
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
      const __m512i columns =
          _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + t * x_stride)));
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; g++) sum[t][g] = _mm512_dpbf16_ps(sum[t][g], (__m512bh)w[g], (__m512bh)columns);
    }
  }
  ahead.at = at;
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) _mm512_store_ps(sums + t * kSums + g * 16, sum[t][g]);
}

template <int kTokens>
UNWEIGHT_INLINE void multiply_float32(const uint8_t* tiles, int64_t units, const float* x, int64_t x_stride,
                                      float* sums) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6);
  const __m512i odd = _mm512_add_epi32(even, splat(1)), upper = splat(0xFFFF0000);
  __m512 sum[kTokens][kGroups];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) sum[t][g] = _mm512_load_ps(sums + t * kSums + g * 16);
  for (int64_t u = 0; u < units; u++, tiles += kUnitBytes, x += kUnitColumns) {
    __m512 first[kGroups], second[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) {
      const __m512i w = _mm512_load_si512(tiles + g * kVectorBytes);
      first[g] = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
      second[g] = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++) {
      const __m512 columns = _mm512_castps256_ps512(_mm256_loadu_ps(x + t * x_stride));
      const __m512 x_even = _mm512_permutexvar_ps(even, columns), x_odd = _mm512_permutexvar_ps(odd, columns);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; g++)
        sum[t][g] = _mm512_fmadd_ps(second[g], x_odd, _mm512_fmadd_ps(first[g], x_even, sum[t][g]));
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) _mm512_store_ps(sums + t * kSums + g * 16, sum[t][g]);
}

// As many tokens as there are registers for; returns how many.
UNWEIGHT_INLINE int64_t multiply_tokens(int64_t tokens, const uint8_t* tiles, int64_t units, const uint16_t* x,
                                        int64_t x_stride, float* sums, Ahead& ahead) {
  switch (tokens) {
    case 1: multiply_bfloat16<1>(tiles, units, x, x_stride, sums, ahead); return 1;
    case 2: multiply_bfloat16<2>(tiles, units, x, x_stride, sums, ahead); return 2;
    case 3: multiply_bfloat16<3>(tiles, units, x, x_stride, sums, ahead); return 3;
    case 4:
    case 7:
    case 8: multiply_bfloat16<4>(tiles, units, x, x_stride, sums, ahead); return 4;
    case 5: multiply_bfloat16<5>(tiles, units, x, x_stride, sums, ahead); return 5;
    default: multiply_bfloat16<6>(tiles, units, x, x_stride, sums, ahead); return 6;
  }
}

UNWEIGHT_INLINE int64_t multiply_tokens(int64_t tokens, const uint8_t* tiles, int64_t units, const float* x,
                                        int64_t x_stride, float* sums, Ahead&) {
  switch (tokens) {
    case 1: multiply_float32<1>(tiles, units, x, x_stride, sums); return 1;
    case 2: multiply_float32<2>(tiles, units, x, x_stride, sums); return 2;
    case 3: multiply_float32<3>(tiles, units, x, x_stride, sums); return 3;
    default: multiply_float32<4>(tiles, units, x, x_stride, sums); return 4;
  }
}

// Adds the partial sums: 16 rows in order.
UNWEIGHT_INLINE __m512 sum_rows(const float* sums) {
  const __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + 16);
  const __m512 c = _mm512_load_ps(sums + 32), d = _mm512_load_ps(sums + 48);
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 rows = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  // Lane 4·row + group so far.
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), rows);
}

UNWEIGHT_INLINE __m512 load_bias(const uint16_t* bias, __mmask16 rows) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rows, bias)), 16));
}
UNWEIGHT_INLINE __m512 load_bias(const float* bias, __mmask16 rows) { return _mm512_maskz_loadu_ps(rows, bias); }
UNWEIGHT_INLINE void store_rows(uint16_t* y, __mmask16 rows, __m512 sums) {
  _mm256_mask_storeu_epi16(y, rows, (__m256i)_mm512_cvtneps_pbh(sums));
}
UNWEIGHT_INLINE void store_rows(float* y, __mmask16 rows, __m512 sums) { _mm512_mask_storeu_ps(y, rows, sums); }

// 16 rows x 128 columns (or what is left of them) of row-major weights to a tile.
UNWEIGHT_INLINE void tile_rows(const uint16_t* weights, uint64_t stride, int64_t rows, int64_t columns, uint8_t* tile) {
  if (rows >= kWarpRows && columns >= kStageColumns) {
    for (int group = 0; group < kGroups; group++, weights += kGroupRows * stride)
      for (int unit = 0; unit < kUnits; unit += 4) {
        __m512i pieces[4];
        for (int row = 0; row < kGroupRows; row++)
          pieces[row] = load_vector(weights + row * stride + unit * kUnitColumns);
        transpose_pieces(pieces);
        for (int i = 0; i < 4; i++)
          _mm512_store_si512(tile + (unit + i) * kUnitBytes + group * kVectorBytes, pieces[i]);
      }
    return;
  }
  for (int row = 0; row < kWarpRows; row++)
    for (int column = 0; column < kStageColumns; column += kUnitColumns) {
      const int64_t left = row < rows ? columns - column : 0;
      const __mmask8 mask = left >= kUnitColumns ? 0xFF : left > 0 ? (1 << left) - 1 : 0;
      const void* from = mask ? weights + row * stride + column : nullptr;
      _mm_store_si128(reinterpret_cast<__m128i*>(tile + column / kUnitColumns * kUnitBytes + row * 2 * kUnitColumns),
                      _mm_maskz_loadu_epi16(mask, from));
    }
}

// Likewise two warps' rows, from `row` and `column` of a block with `rows` rows on.
UNWEIGHT_INLINE void tile_pair(const uint16_t* block, int64_t columns, int64_t rows, int64_t row, int64_t column,
                               uint8_t* tiles, uint64_t tile_stride) {
  for (int w = 0; w < 2; w++, row += kWarpRows)
    tile_rows(block + row * columns + column, columns, rows - row, columns - column, tiles + w * tile_stride);
}

// Stages that are decoded before they are multiplied. With more of them, tokens' sums move to registers and back less
// often, but the tiles come from the second-level cache (measured: within 3 % of the best for each range).
UNWEIGHT_INLINE int64_t stages_at_once(int64_t tokens) {
  return tokens <= 6 ? 1 : tokens <= 32 ? 2 : tokens <= 128 ? 4 : 8;
}

// A block and the tokens it is multiplied with.
template <class T>
struct Product {
  const MatrixView& matrix;
  const LinearBlock& task;
  const T *x, *x_tail;  // of the first token; x_tail: [tokens, kStageColumns]
  int64_t x_stride, rows, warps;
  float* sums;  // [warps, tokens, kSums]
};

// Adds stages s … s + count - 1 of some warps; a warp's tiles lie one behind the other.
template <class T>
UNWEIGHT_INLINE void multiply_tiles(const Product<T>& p, int64_t first_warp, int64_t last_warp, const uint8_t* tiles,
                                    int64_t tile_stride, int64_t s, int64_t count, Ahead ahead) {
  const int64_t tokens = p.task.tokens, whole = smaller(count, p.matrix.in_features / kStageColumns - s);
  for (int64_t t = 0, n; t < tokens; t += n)
    for (int64_t warp = first_warp; warp < last_warp; warp++) {
      const uint8_t* warp_tiles = tiles + (warp - first_warp) * tile_stride;
      float* sums = p.sums + (warp * tokens + t) * kSums;
      n = multiply_tokens(tokens - t, warp_tiles, whole * kUnits, p.x + t * p.x_stride + s * kStageColumns, p.x_stride,
                          sums, ahead);
      if (whole < count)
        multiply_tokens(tokens - t, warp_tiles + whole * kTileBytes, kUnits, p.x_tail + t * kStageColumns,
                        kStageColumns, sums, ahead);
    }
}

// Few tokens: two warps' tiles at a time, which never leave the first-level cache.
template <class T>
UNWEIGHT_INLINE Damage multiply_pairs(const Product<T>& p, uint8_t* tiles) {
  BlockDecoder decoder{p.matrix, p.task.block * p.matrix.stages_per_block, true, {}, {}, {}, {}, {}};
  const int64_t pairs = (p.warps + 1) / 2, turns = pairs * p.matrix.stages_per_block;
  for (int64_t turn = 0; turn <= turns; turn++) {
    const int64_t s = turn / pairs, pair = turn % pairs;
    const Damage damage = turn < turns
                              ? decode_pair(decoder, s, 2 * pair, tiles + turn % 2 * 2 * kTileBytes, kTileBytes)
                              : finish_patches(decoder);
    if (damage.flaw != Flaw::kNone) return damage;
    if (turn == 0) continue;
    // Only now is the last turn's pair complete.
    const int64_t last_warp = 2 * ((turn - 1) % pairs);
    multiply_tiles(p, last_warp, smaller(last_warp + 2, p.warps), tiles + (turn - 1) % 2 * 2 * kTileBytes, kTileBytes,
                   (turn - 1) / pairs, 1, Ahead{0, 0});
  }
  return {Flaw::kNone, 0, 0};
}

// More tokens, or rows that lie ready: some stages of all warps at a time.
template <class T>
UNWEIGHT_INLINE Damage multiply_stages(const Product<T>& p, uint8_t* tiles, int64_t at_once) {
  const MatrixView& matrix = p.matrix;
  const int64_t stages = matrix.stages_per_block, tile_stride = at_once * kTileBytes;
  BlockDecoder decoder{matrix, p.task.block * matrix.stages_per_block, false, {}, {}, {}, {}, {}};
  for (int64_t s = 0; s < stages; s += at_once) {
    const int64_t count = smaller(at_once, stages - s);
    for (int64_t i = 0; i < count; i++)
      for (int64_t warp = 0; warp < p.warps; warp += 2) {
        uint8_t* pair_tiles = tiles + (warp * at_once + i) * kTileBytes;
        if (p.task.rows) {
          tile_pair(p.task.rows, matrix.in_features, p.rows, kWarpRows * warp, (s + i) * kStageColumns, pair_tiles,
                    tile_stride);
          continue;
        }
        const Damage damage = decode_pair(decoder, s + i, warp, pair_tiles, tile_stride);
        if (damage.flaw != Flaw::kNone) return damage;
      }
    const Damage damage = finish_patches(decoder);
    if (damage.flaw != Flaw::kNone) return damage;
    const Ahead ahead = p.task.rows ? Ahead{0, 0} : stages_ahead(matrix, decoder.first_stage + s + count, count);
    multiply_tiles(p, 0, p.warps, tiles, tile_stride, s, count, ahead);
  }
  return {Flaw::kNone, 0, 0};
}

template <class T>
UNWEIGHT_INLINE Damage multiply_block(const LinearJob& job, const LinearBlock& task, uint8_t* scratch) {
  const MatrixView& matrix = *job.matrix;
  const int64_t tokens = task.tokens, at_once = stages_at_once(tokens);
  const int64_t rows = smaller(kBlockRows, matrix.out_features - kBlockRows * task.block);
  const Product<T> product = {matrix,
                              task,
                              static_cast<const T*>(job.x) + task.first_token * job.x_stride,
                              static_cast<const T*>(job.x_tail) + task.first_token * kStageColumns,
                              job.x_stride,
                              rows,
                              (rows + kWarpRows - 1) / kWarpRows,
                              reinterpret_cast<float*>(scratch + kWarps * at_once * kTileBytes)};
  std::memset(product.sums, 0, sizeof(float) * kSums * tokens * product.warps);
  const Damage damage =
      at_once == 1 && !task.rows ? multiply_pairs(product, scratch) : multiply_stages(product, scratch, at_once);
  if (damage.flaw != Flaw::kNone) return damage;

  for (int64_t warp = 0; warp < product.warps; warp++) {
    const int64_t row = kBlockRows * task.block + kWarpRows * warp, left = matrix.out_features - row;
    const __mmask16 mask = left >= kWarpRows ? 0xFFFF : (1u << left) - 1;
    const __m512 bias = job.bias ? load_bias(static_cast<const T*>(job.bias) + row, mask) : _mm512_setzero_ps();
    T* y = static_cast<T*>(job.y) + task.first_token * matrix.out_features + row;
    for (int64_t t = 0; t < tokens; t++) {
      const __m512 sum = sum_rows(product.sums + (warp * tokens + t) * kSums);
      store_rows(y + t * matrix.out_features, mask, job.bias ? _mm512_add_ps(sum, bias) : sum);
    }
  }
  return damage;
}

}  // namespace

size_t linear_scratch_avx512(int64_t tokens) {
  return kWarps * (stages_at_once(tokens) * kTileBytes + tokens * kSums * sizeof(float));
}

Damage linear_block_avx512(const LinearJob& job, const LinearBlock& block, uint8_t* scratch) {
  return job.float32 ? multiply_block<float>(job, block, scratch) : multiply_block<uint16_t>(job, block, scratch);
}

}  // namespace unweight
