// Tiles -> rows. See unpack_avx512.h.
#include "unpack_avx512.h"

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

// Warps [first_warp, last_warp) of a block; `out` is where the first one's rows go.
UNWEIGHT_INLINE Damage unpack_warps(const MatrixView& matrix, uint64_t block, int first_warp, int last_warp,
                                    uint16_t* out, bool around_caches) {
  const uint64_t columns = matrix.in_features;
  const uint64_t first_row = kBlockRows * block + kWarpRows * first_warp;
  const bool stream =
      around_caches && columns % kPieceColumns == 0 && reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0;
  BlockDecoder decoder{matrix, block * matrix.stages_per_block, nibble_scale(matrix), true, {}, {}};
  alignas(kVectorBytes) uint8_t tiles[2 * kTileBytes];
  for (uint64_t s = 0; s < matrix.stages_per_block; s++)
    for (int pair = first_warp & ~1; pair < last_warp; pair += 2) {
      if (kBlockRows * block + kWarpRows * pair >= matrix.out_features) break;
      const Damage damage = decode_pair(decoder, s, pair, tiles, kTileBytes);
      if (damage.flaw != Flaw::kNone) return damage;
      for (int warp = pair < first_warp ? first_warp : pair; warp < last_warp && warp < pair + 2; warp++) {
        const uint64_t row = kWarpRows * (warp - first_warp);
        if (first_row + row >= matrix.out_features) break;
        const uint8_t* tile = tiles + (warp - pair) * kTileBytes;
        const uint64_t row_count = matrix.out_features - first_row - row, column_count = columns - s * kStageColumns;
        uint16_t* at = out + row * columns + s * kStageColumns;
        if (row_count < kWarpRows || column_count < kStageColumns)
          store_part_of_tile(tile, at, columns, row_count < kWarpRows ? row_count : kWarpRows,
                             column_count < kStageColumns ? column_count : kStageColumns);
        else if (stream)
          store_whole_tile<true>(tile, at, columns);
        else
          store_whole_tile<false>(tile, at, columns);
      }
    }
  if (stream) _mm_sfence();
  return {Flaw::kNone, 0, 0};
}

}  // namespace

Damage unpack_block_avx512(const MatrixView& matrix, uint64_t block, uint16_t* out, bool around_caches) {
  return unpack_warps(matrix, block, 0, kWarps, out, around_caches);
}

Damage unpack_block_avx512(const MatrixView& matrix, uint64_t block, uint16_t* out) {
  return unpack_warps(matrix, block, 0, kWarps, out, true);
}

Damage unpack_warp_avx512(const MatrixView& matrix, uint64_t block, int warp, uint16_t* out) {
  return unpack_warps(matrix, block, warp, warp + 1, out, false);
}

}  // namespace unweight
