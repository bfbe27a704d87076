// Tiles -> rows. See unpack_avx512.h.
#include "unpack_avx512.h"

#include "checksum_avx512.h"
#include "decode_avx512.h"

namespace unweight {
namespace {

constexpr int kPieceColumns = 32;  // 64 bytes of a row: four units

// Stores around the caches: the rows are not read again soon, and a normal store would first fetch the line it fills.
template <bool kStream>
UNWEIGHT_INLINE void store_whole_tile(const uint8_t* tile, uint16_t* out, uint64_t row_stride) {
  for (int group = 0; group < kGroups; group++)
    for (int unit = 0; unit < kUnits; unit += 4) {
      __m512i rows[4];
      for (int i = 0; i < 4; i++) rows[i] = _mm512_load_si512(tile + (unit + i) * kUnitBytes + group * kVectorBytes);
      transpose_pieces(rows);
      uint16_t* at = out + group * kGroupRows * row_stride + unit * kUnitColumns;
      for (int i = 0; i < 4; i++)
        if (kStream)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(at + i * row_stride), rows[i]);
        else
          _mm512_storeu_si512(at + i * row_stride, rows[i]);
    }
}

UNWEIGHT_INLINE void store_part_of_tile(const uint8_t* tile, uint16_t* out, uint64_t row_stride, uint64_t row_count,
                                        uint64_t column_count) {
  for (uint64_t row = 0; row < row_count; row++)
    for (uint64_t column = 0; column < column_count; column += kUnitColumns) {
      const uint64_t left = column_count - column;
      const __m128i unit = _mm_load_si128(
          reinterpret_cast<const __m128i*>(tile + column / kUnitColumns * kUnitBytes + row * 2 * kUnitColumns));
      _mm_mask_storeu_epi16(out + row * row_stride + column, left < 8 ? (1u << left) - 1 : 0xFF, unit);
    }
}

// The rows of a block that are wanted, and where they go.
struct Output {
  const MatrixView& matrix;
  uint64_t first_row, row_count;  // of the block
  uint16_t* out;
  bool stream;
};

UNWEIGHT_INLINE void store_pair(const Output& output, uint64_t stage, int first_warp, const uint8_t* tiles) {
  const uint64_t columns = output.matrix.in_features, column_count = columns - stage * kStageColumns;
  for (int w = 0; w < 2; w++) {
    const uint64_t row = kWarpRows * (first_warp + w);
    if (row < output.first_row || row >= output.first_row + output.row_count) continue;
    const uint64_t row_count = output.first_row + output.row_count - row;
    const uint8_t* tile = tiles + w * kTileBytes;
    uint16_t* at = output.out + (row - output.first_row) * columns + stage * kStageColumns;
    if (row_count < kWarpRows || column_count < kStageColumns)
      store_part_of_tile(tile, at, columns, row_count < kWarpRows ? row_count : kWarpRows,
                         column_count < kStageColumns ? column_count : kStageColumns);
    else if (output.stream)
      store_whole_tile<true>(tile, at, columns);
    else
      store_whole_tile<false>(tile, at, columns);
  }
}

// Rows [first_row, last_row) of a block or what is left of them; first_row is a warp's first one. `checked`: the warps
// whose damage counts, of rows past N too. `checksum`: of the block, or null.
UNWEIGHT_INLINE Damage unpack_rows(const MatrixView& matrix, uint64_t block, uint64_t first_row, uint64_t last_row,
                                   uint32_t checked, uint16_t* out, bool around_caches, uint64_t* checksum) {
  const uint64_t rows = matrix.out_features - kBlockRows * block;
  if (last_row > rows) last_row = rows;
  const bool aligned = matrix.in_features % kPieceColumns == 0 && reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0;
  const Output output = {matrix, first_row, last_row - first_row, out, around_caches && aligned};
  BlockDecoder decoder{
      matrix, block * matrix.stages_per_block, true, checked, checked & warps_past(rows), {}, {}, {}, {}, {}};
  // A pair is complete, and can be stored, when the next one has been decoded.
  alignas(kVectorBytes) uint8_t tiles[2][2 * kTileBytes];
  uint64_t last_stage = 0;
  int last_pair = -1, turn = 0;
  Stage stage;
  if (!find_stage(matrix, decoder.first_stage, true, stage)) return {Flaw::kIndex, 0, decoder.first_stage};
  RunningChecksum sum(stage.bytes);
  for (uint64_t s = 0; s < matrix.stages_per_block; s++) {
    if (checksum && find_stage(matrix, decoder.first_stage + s, true, stage)) sum.advance(stage.bytes + stage.size);
    for (int pair = first_row / (2 * kWarpRows) * 2; pair < kWarps; pair += 2) {
      if (pair * kWarpRows >= static_cast<int64_t>(last_row)) break;
      const Damage damage = decode_pair(decoder, s, pair, tiles[turn], kTileBytes);
      if (damage.flaw != Flaw::kNone) return damage;
      if (last_pair >= 0) store_pair(output, last_stage, last_pair, tiles[!turn]);
      last_stage = s;
      last_pair = pair;
      turn = !turn;
    }
  }
  if (checksum) *checksum = sum.finish(stage.bytes + stage.size);
  const Damage damage = finish_patches(decoder);
  if (damage.flaw != Flaw::kNone) return damage;
  store_pair(output, last_stage, last_pair, tiles[!turn]);
  if (output.stream) _mm_sfence();
  return damage;
}

}  // namespace

Damage unpack_block_avx512(const MatrixView& matrix, uint64_t block, uint16_t* out, bool around_caches,
                           uint64_t* checksum) {
  return unpack_rows(matrix, block, 0, kBlockRows, kAllWarps, out, around_caches, checksum);
}

Damage unpack_warp_avx512(const MatrixView& matrix, uint64_t block, int warp, uint16_t* out) {
  return unpack_rows(matrix, block, kWarpRows * warp, kWarpRows * (warp + 1), 1u << warp, out, false, nullptr);
}

}  // namespace unweight
