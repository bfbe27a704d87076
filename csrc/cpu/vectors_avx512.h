// What all files compiled with the AVX-512 flags share. Everything here and in the headers that include it is local to
// the file that includes them: no other file may get code that only some machines can run.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own _mm512_undefined_epi32() sets this off wherever it is inlined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstring>

#include "../cuda/decode/bits.cuh"
#include "../format/tile.h"

#define UNWEIGHT_INLINE static inline __attribute__((always_inline))
// For what is big: one copy is enough, and registers are allocated better.
#define UNWEIGHT_NOINLINE static __attribute__((noinline))

namespace unweight {
namespace {

constexpr int kVectorBytes = 64;

UNWEIGHT_INLINE __m512i splat(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
UNWEIGHT_INLINE __m512i select_bits(__m512i mask, __m512i ones, __m512i zeros) {
  return _mm512_ternarylogic_epi32(mask, ones, zeros, 0xCA);
}
// `ones` where the mask is set, else `zeros`, whose register takes the result.
UNWEIGHT_INLINE __m512i merge_bits(__m512i zeros, __m512i ones, __m512i mask) {
  return _mm512_ternarylogic_epi32(zeros, ones, mask, 0xD8);
}
UNWEIGHT_INLINE __m512i and_or(__m512i a, __m512i mask, __m512i c) {
  return _mm512_ternarylogic_epi32(a, mask, c, 0xEA);
}
UNWEIGHT_INLINE __m512i load_vector(const void* p) { return _mm512_loadu_si512(p); }
UNWEIGHT_INLINE uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

}  // namespace
}  // namespace unweight
