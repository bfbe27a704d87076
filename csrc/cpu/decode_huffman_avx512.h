// docs/FORMAT.md section 7 with AVX-512: the stages of two warps at a time. See tile_avx512.h.
#pragma once
#include "stage_avx512.h"
#include "tile_avx512.h"

namespace unweight {
namespace {

// The bit streams of a warp: index 2·stream + half, for 16 lanes each.
struct Streams {
  __m512i word[4], next[4];
  __m512i position;  // byte i of a 32-bit lane: bits taken of stream i, modulo 256
};

UNWEIGHT_INLINE void start_streams(Streams& streams, const uint8_t*& words) {
  for (int stream = 0; stream < 2; stream++)
    for (int half = 0; half < 2; half++) {
      streams.word[2 * stream + half] = load_vector(words + stream * 256 + half * 64);
      streams.next[2 * stream + half] = load_vector(words + stream * 256 + 128 + half * 64);
    }
  streams.position = _mm512_setzero_si512();
  words += 512;
}

// 256 entries in memory: they are operands of the look-ups, which would otherwise need copies of them in registers.
UNWEIGHT_INLINE __m512i look_up(const uint8_t* table, __m512i index, __mmask64 upper_half) {
  asm("" : "+r"(table));  // or the compiler does keep them in registers
  return _mm512_mask_blend_epi8(upper_half,
                                _mm512_permutex2var_epi8(load_vector(table), index, load_vector(table + 64)),
                                _mm512_permutex2var_epi8(load_vector(table + 128), index, load_vector(table + 192)));
}

struct HuffmanWarp {
  Streams* streams;
  const uint8_t *plane, *words;
  uint8_t* tile;
};

// The 4 x 16 streams of a warp go through the tables together: byte j of a 32-bit lane is stream j's.
struct Lookup {
  __m512i index;
  __mmask64 upper_half;
};

// `code`: where the next code's eight bits are in each window, from the bottom of its 64-bit lane.
UNWEIGHT_INLINE Lookup next_codes(const MatrixView& matrix, const __m512i (&window)[4], __m512i& code) {
  const __m512i even_bytes = splat(0x00FF00FF), lower_half = splat(0x0000FFFF);
  const __m512i low = merge_bits(_mm512_multishift_epi64_epi8(code, window[1]),
                                 _mm512_multishift_epi64_epi8(code, window[0]), even_bytes);
  const __m512i high = merge_bits(_mm512_multishift_epi64_epi8(code, window[3]),
                                  _mm512_multishift_epi64_epi8(code, window[2]), even_bytes);
  Lookup lookup;
  lookup.index = merge_bits(high, low, lower_half);
  lookup.upper_half = _mm512_movepi8_mask(lookup.index);
  code = _mm512_sub_epi8(code, look_up(matrix.code_length, lookup.index, lookup.upper_half));
  return lookup;
}

// Register i of the two k-steps and two halves of 16 lanes that the codes are for.
UNWEIGHT_INLINE void store_weights(const MatrixView& matrix, const Lookup& lookup, const __m512i (&signs)[2][4], int i,
                                   uint8_t* tile) {
  constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;
  const __m512i first = look_up(matrix.first_exponent, lookup.index, lookup.upper_half);
  const __m512i second = look_up(matrix.second_exponent, lookup.index, lookup.upper_half);
  // Only the exponent bits count: what is left of neighbours in the other bits gives way to signs and mantissas.
  const __m512i crossed = _mm512_shrdi_epi32(first, second, 16);  // first of streams 2, 3; second of streams 0, 1
  const __m512i low = _mm512_mask_blend_epi16(kUpperHalves, first, crossed);
  const __m512i high = _mm512_mask_blend_epi16(kUpperHalves, crossed, second);
  const __m512i exponents[4] = {_mm512_slli_epi16(low, 7), _mm512_srli_epi16(low, 1), _mm512_slli_epi16(high, 7),
                                _mm512_srli_epi16(high, 1)};
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const int k = j >> 1, half = j & 1;
    const __m512i s = signs[half][2 * k + (i >> 1)];
    _mm512_store_si512(tile + tile_offset(k, 16 * half, i),
                       merge_bits(exponents[j], i & 1 ? _mm512_rol_epi32(s, 8) : s, splat(kEvenBits)));
  }
}

// A code's length decides where the next one is, which takes twice as long as the instructions for it occupy the
// processor: so two warps take turns, and the next codes are looked up before the last ones are stored.
UNWEIGHT_INLINE void decode_huffman_pair(const MatrixView& matrix, const Stage& stage, int first_warp,
                                         HuffmanWarp (&warps)[2]) {
  const __m512i first_code = _mm512_set1_epi64(0x3838383818181818);
  for (int step = 0; step < kKSteps / 2; step++) {
    __m512i window[2][4], code[2] = {first_code, first_code}, signs[2][2][4];
    Lookup lookup[2];
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
      const Streams& streams = *warps[w].streams;
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
        window[w][j] = _mm512_shldv_epi32(streams.word[j], streams.next[j], _mm512_srli_epi32(streams.position, 8 * j));
      lookup[w] = next_codes(matrix, window[w], code[w]);
      transpose_words(warps[w].plane + 512 * step, signs[w][0]);
      transpose_words(warps[w].plane + 512 * step + 256, signs[w][1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; i++)
#pragma GCC unroll 2
      for (int w = 0; w < 2; w++) {
        const Lookup last = lookup[w];
        if (i < kRegisters - 1) lookup[w] = next_codes(matrix, window[w], code[w]);
        store_weights(matrix, last, signs[w], i, warps[w].tile + 2 * step * 2 * kUnitBytes);
      }
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
      prefetch_ahead<16>(stage, 4 * (first_warp + w) + step);
      Streams& streams = *warps[w].streams;
      const __m512i before = streams.position;
      streams.position = _mm512_add_epi8(before, _mm512_sub_epi8(first_code, code[w]));
      const __m512i passed = _mm512_xor_si512(streams.position, before);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __mmask16 refill = _mm512_test_epi32_mask(passed, splat(32u << (8 * j)));
        streams.word[j] = _mm512_mask_mov_epi32(streams.word[j], refill, streams.next[j]);
        streams.next[j] = _mm512_mask_expand_epi32(streams.next[j], refill, load_vector(warps[w].words));
        warps[w].words += 4 * __builtin_popcount(refill);
      }
    }
  }
}

}  // namespace
}  // namespace unweight
