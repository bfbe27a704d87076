// The inner loops of the encoders with AVX-512: plain data in and out (see matrix_view.h). What they can't do with a
// 16 x 16 window of exponents they report, and the portable code does it.
#pragma once
#include <cstdint>

#include "../format/tile.h"

namespace unweight {

// Codes of the pairs whose exponents both are in first … first + 15, by (e0 - first) | (e1 - first) << 4.
struct PairWindow {
  uint8_t first;
  uint8_t low[256];   // code bits 0…7
  uint8_t high[256];  // code bits 8…11 | length << 4; 0 where there is no code
};

// Eight k-steps of a warp, whose 16 rows start at `corner`. Writes the S-plane (docs/FORMAT.md section 5), the four
// codes of each lane behind one another, their bits, and the lanes that hold a pair without an entry in the window
// (their code and bits are junk).
void look_up_warp_avx512(const PairWindow& window, const uint16_t* corner, int64_t stride, uint32_t* plane,
                         uint32_t (*code)[kLanes], uint32_t (*bits)[kLanes], uint32_t* missing);

// One archive round of 256 weights: sign+mantissa bytes, both codes of each of 64 streams, and the streams that hold a
// pair without an entry.
uint64_t look_up_round_avx512(const PairWindow& window, const uint16_t* weights, uint8_t* plane, uint32_t* code,
                              uint32_t* bits);

// The pairs (e0 | e1 << 8) of `count` weights, a multiple of 32, as `swizzle` in pair_counts.cpp permutes them.
void swizzled_pairs_avx512(const uint16_t* weights, int64_t count, uint16_t* pairs);

// Eight k-steps of a warp: S-plane and N-plane, and per k-step and register the lanes with an exponent outside the
// window (its code is 0).
void encode_nibbles_avx512(int base, const uint16_t* corner, int64_t stride, uint32_t* plane, uint32_t* codes,
                           uint32_t (*outside)[kRegisters]);

}  // namespace unweight
