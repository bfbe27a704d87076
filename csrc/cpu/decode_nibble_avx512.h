// docs/FORMAT.md section 6 with AVX-512. See tile_avx512.h.
#pragma once
#include "../cuda/decode/nibble.cuh"
#include "stage_avx512.h"
#include "tile_avx512.h"

namespace unweight {
namespace {

// What nibble exponents are above the true ones, modulo 2^32.
UNWEIGHT_INLINE uint32_t nibble_scale(const MatrixView& matrix) { return kNibbleScaledBase - matrix.nibble_base; }

UNWEIGHT_INLINE uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent - scale) & 255;
}
UNWEIGHT_INLINE uint32_t unscaled_exponents(uint32_t patch, uint32_t scale) {
  return unscaled_exponent(patch >> 7 & 255, scale) << 7 | unscaled_exponent(patch >> 23 & 255, scale) << 23;
}

// Registers of 16 lanes in two k-steps. `plane`, `nibbles`: where the lanes' signs and codes of the k-steps are.
UNWEIGHT_INLINE void decode_nibbles(const uint8_t* plane, const uint8_t* nibbles, uint32_t scale,
                                    __m512i (&registers)[2][4]) {
  const __m512i even_bits = splat(kEvenBits), nibble_bits = splat(kNibbleBits), exponents = splat(kNibbleExponents);
  const __m512i unscale = _mm512_set1_epi16(static_cast<short>(scale << 7));  // a code never borrows: it is 112 or more
  const __m512i even_words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd_words = _mm512_add_epi32(even_words, splat(1));
  __m512i s[4];
  transpose_words(plane, s);
  const __m512i low = load_vector(nibbles), high = load_vector(nibbles + kVectorBytes);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const __m512i codes = _mm512_permutex2var_epi32(low, k ? odd_words : even_words, high);
    const __m512i t0 = and_or(codes, nibble_bits, exponents);
    const __m512i t1 = and_or(_mm512_ror_epi32(codes, 4), nibble_bits, exponents);
    registers[k][0] = select_bits(even_bits, s[2 * k], t0);
    registers[k][1] = _mm512_rol_epi32(select_bits(even_bits, t0, s[2 * k]), 8);
    registers[k][2] = select_bits(even_bits, s[2 * k + 1], t1);
    registers[k][3] = _mm512_rol_epi32(select_bits(even_bits, t1, s[2 * k + 1]), 8);
    for (__m512i& r : registers[k]) r = _mm512_sub_epi16(r, unscale);
  }
}

UNWEIGHT_INLINE void decode_nibble_warp(const Stage& stage, int warp, uint32_t scale, uint8_t* tile) {
  const uint8_t *plane = warp_plane(stage, warp), *nibbles = warp_nibbles(stage, warp);
  for (int step = 0; step < kKSteps / 2; step++) {
    prefetch_ahead<16>(stage, 4 * warp + step);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m512i registers[2][4];
      decode_nibbles(plane + step * 512 + half * 256, nibbles + step * 256 + half * 128, scale, registers);
      for (int k = 0; k < 2; k++) store_registers(tile, 2 * step + k, half, registers[k]);
    }
  }
}

UNWEIGHT_INLINE void clear_rows(uint32_t rows, uint8_t* tile) {
  for (; rows; rows &= rows - 1) {
    const uint32_t row = __builtin_ctz(rows);
    for (int unit = 0; unit < kUnits; unit++) std::memset(tile + unit * kUnitBytes + row * 16, 0, 16);
  }
}

}  // namespace
}  // namespace unweight
