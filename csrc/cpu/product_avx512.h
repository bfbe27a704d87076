// The arithmetic of the AVX-512 products. One order for all sizes, layouts and ways to a sum: a row's columns ascend in
// units of 8, one vdpbf16ps (BF16 x) or two FMAs (FP32 x) each, in four partial sums. See tile_avx512.h.
#pragma once
#include "tile_avx512.h"

namespace unweight {
namespace {

// Sums of a token and a warp: a vector of 4 rows x 4 partial sums for each group.
constexpr int kSums = kGroups * 16;

// What a multiplication asks for on the side, so that the next stages are there when it is done.
struct Ahead {
  uintptr_t at, end;
};

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

}  // namespace
}  // namespace unweight
