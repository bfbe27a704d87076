#ifndef UNWEIGHT_PORTABLE_ONLY
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "../format/checksum.h"

namespace unweight {

// See checksum.h: lane j of a row is word 16·row + j.
uint64_t checksum_avx512(const uint8_t* bytes, size_t size) {
  const size_t rows = size / 64;
  __m512i total[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, tail[2] = {total[0], total[0]};
  for (size_t r = 0; r < rows; r++) {
    const __m256i* row = reinterpret_cast<const __m256i*>(bytes + 64 * r);
    for (int h = 0; h < 2; h++) {
      total[h] = _mm512_add_epi64(total[h], _mm512_cvtepu32_epi64(_mm256_loadu_si256(row + h)));
      tail[h] = _mm512_add_epi64(tail[h], total[h]);
    }
  }
  uint64_t sum = 0;
  for (int h = 0; h < 2; h++) {
    uint64_t t[8], u[8];
    _mm512_storeu_si512(t, total[h]);
    _mm512_storeu_si512(u, tail[h]);
    for (int j = 0; j < 8; j++) sum += 16 * (rows * t[j] - u[j]) + (kFirstWordWeight + 8 * h + j) * t[j];
  }
  for (size_t at = 64 * rows; at + 4 <= size; at += 4) {
    uint32_t w;
    __builtin_memcpy(&w, bytes + at, 4);
    sum += (kFirstWordWeight + at / 4) * uint64_t{w};
  }
  return sum;
}

}  // namespace unweight
#endif
