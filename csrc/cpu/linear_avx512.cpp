// Products with packed weights: loops over stages, warps and tokens (see linear_block.h, product_avx512.h).
#include "decode_avx512.h"
#include "linear_block.h"
#include "nibble_product_avx512.h"
#include "product_avx512.h"

namespace unweight {
namespace {

UNWEIGHT_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

UNWEIGHT_INLINE Ahead stages_ahead(const MatrixView& matrix, uint64_t stage, uint64_t count) {
  const uint64_t units = (matrix.out_features + kBlockRows - 1) / kBlockRows * matrix.stages_per_block;
  const auto address = [&](uint64_t s) {
    const uint64_t step = load_word(matrix.bytes + matrix.index_offset + 4 * (s < units ? s : units));
    return reinterpret_cast<uintptr_t>(matrix.bytes) + matrix.data_offset + 16 * step;
  };
  return {address(stage), address(stage + count)};
}

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
  BlockDecoder decoder{
      p.matrix, p.task.block * p.matrix.stages_per_block, true, kAllWarps, warps_past(p.rows), {}, {}, {}, {}, {}};
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

constexpr int64_t kRegisterTokens = 4;

template <int kTokens>
UNWEIGHT_INLINE Damage multiply_nibbles(const Product<uint16_t>& p, uint8_t* tiles) {
  const MatrixView& matrix = p.matrix;
  BlockDecoder decoder{
      matrix, p.task.block * matrix.stages_per_block, true, kAllWarps, warps_past(p.rows), {}, {}, {}, {}, {}};
  const int64_t whole_stages = matrix.in_features / kStageColumns;
  for (int64_t s = 0; s < static_cast<int64_t>(matrix.stages_per_block); s++) {
    const auto damage = [&](Flaw flaw, int64_t warp) {
      return Damage{flaw, static_cast<uint8_t>(warp), decoder.first_stage + s};
    };
    Stage stage;
    if (!find_stage(matrix, decoder.first_stage + s, true, stage)) return damage(Flaw::kIndex, 0);
    const bool raw = WarpHeader{load_word(stage.bytes)}.is_raw();
    WarpSection sections[kWarps];
    uint32_t zero_rows = 0;
    for (int64_t warp = 0; warp < p.warps && !raw; warp++) {
      if (!open_section(stage, warp, true, sections[warp])) return damage(Flaw::kSection, warp);
      zero_rows |= sections[warp].zero_rows;
    }
    if (decoder.undecoded && !raw) {
      const Damage found = check_undecoded(decoder, stage, s);
      if (found.flaw != Flaw::kNone) return found;
    }
    if (__builtin_expect(raw || zero_rows, 0)) {
      for (int64_t warp = 0; warp < p.warps; warp += 2) {
        Damage found = decode_pair(decoder, s, warp, tiles, kTileBytes);
        if (found.flaw == Flaw::kNone) found = finish_patches(decoder);
        if (found.flaw != Flaw::kNone) return found;
        multiply_tiles(p, warp, smaller(warp + 2, p.warps), tiles, kTileBytes, s, 1, Ahead{0, 0});
      }
      continue;
    }
    const bool whole = s < whole_stages;
    for (int64_t warp = 0; warp < p.warps; warp++)
      if (!multiply_nibble_warp<kTokens>(stage, warp, sections[warp].patches, nibble_scale(matrix),
                                         whole ? p.x + s * kStageColumns : p.x_tail, whole ? p.x_stride : kStageColumns,
                                         p.sums + warp * kTokens * kSums))
        return damage(Flaw::kPatches, warp);
  }
  return {Flaw::kNone, 0, 0};
}

UNWEIGHT_INLINE Damage multiply_few(const Product<uint16_t>& p, uint8_t* tiles) {
  if (p.matrix.layout == Layout::kNibble) switch (p.task.tokens) {
      case 1: return multiply_nibbles<1>(p, tiles);
      case 2: return multiply_nibbles<2>(p, tiles);
      case 3: return multiply_nibbles<3>(p, tiles);
      case kRegisterTokens: return multiply_nibbles<kRegisterTokens>(p, tiles);
    }
  return multiply_pairs(p, tiles);
}
UNWEIGHT_INLINE Damage multiply_few(const Product<float>& p, uint8_t* tiles) { return multiply_pairs(p, tiles); }

// More tokens, or rows that lie ready: some stages of all warps at a time.
template <class T>
UNWEIGHT_INLINE Damage multiply_stages(const Product<T>& p, uint8_t* tiles, int64_t at_once) {
  const MatrixView& matrix = p.matrix;
  const int64_t stages = matrix.stages_per_block, tile_stride = at_once * kTileBytes;
  BlockDecoder decoder{
      matrix, p.task.block * matrix.stages_per_block, false, kAllWarps, warps_past(p.rows), {}, {}, {}, {}, {}};
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
      at_once == 1 && !task.rows ? multiply_few(product, scratch) : multiply_stages(product, scratch, at_once);
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
