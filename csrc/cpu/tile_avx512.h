// Tiles of BF16 weights in the first-level cache.
#pragma once
#include "vectors_avx512.h"

namespace unweight {
namespace {

// A tile is 16 rows x 128 columns in the order that vdpbf16ps wants: a *unit* of 8 columns is four vectors, one for
// each *group* of 4 rows; a vector is 4 rows x 4 column pairs. Lanes 0…15 of a register are one vector, lanes 16…31
// another.
constexpr int kUnitColumns = 8;
constexpr int kUnits = kStageColumns / kUnitColumns;
constexpr int kGroups = 4;
constexpr int kGroupRows = 4;
constexpr int kUnitBytes = kGroups * kVectorBytes;
constexpr int kTileBytes = kUnits * kUnitBytes;

// In other words [k-step][register][lane] of 32-bit words.
UNWEIGHT_INLINE uint32_t tile_offset(uint32_t kstep, uint32_t lane, uint32_t reg) {
  return kstep * 2 * kUnitBytes + reg * 2 * kVectorBytes + lane * 4;
}

// 16 lanes x 4 words, lane after lane -> words[i]: word i of the 16 lanes.
UNWEIGHT_INLINE void transpose_words(const uint8_t* p, __m512i (&words)[4]) {
  const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i high = _mm512_add_epi32(low, splat(2));
  const __m512i a = load_vector(p), b = load_vector(p + 64), c = load_vector(p + 128), d = load_vector(p + 192);
  const __m512i ab01 = _mm512_permutex2var_epi32(a, low, b), ab23 = _mm512_permutex2var_epi32(a, high, b);
  const __m512i cd01 = _mm512_permutex2var_epi32(c, low, d), cd23 = _mm512_permutex2var_epi32(c, high, d);
  words[0] = _mm512_shuffle_i64x2(ab01, cd01, 0x44);
  words[1] = _mm512_shuffle_i64x2(ab01, cd01, 0xEE);
  words[2] = _mm512_shuffle_i64x2(ab23, cd23, 0x44);
  words[3] = _mm512_shuffle_i64x2(ab23, cd23, 0xEE);
}

// Registers 0…3 of lanes 16·half … of a k-step.
UNWEIGHT_INLINE void store_registers(uint8_t* tile, int kstep, int half, const __m512i (&registers)[4]) {
  for (int i = 0; i < kRegisters; i++) _mm512_store_si512(tile + tile_offset(kstep, 16 * half, i), registers[i]);
}

// Four vectors of 4 rows x 8 columns <-> four rows x 32 columns: its own inverse.
UNWEIGHT_INLINE void transpose_pieces(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xEE);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
  v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

}  // namespace
}  // namespace unweight
