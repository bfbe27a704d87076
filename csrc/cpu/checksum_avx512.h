// format/checksum.h with AVX-512, in steps: a block is summed stage by stage, while each is in the cache for decoding.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "../format/checksum.h"

namespace unweight {
namespace {

// Lane j of a row is word 16 * row + j.
class RunningChecksum {
 public:
  __attribute__((always_inline)) explicit RunningChecksum(const uint8_t* begin) : begin_(begin), at_(begin) {
    for (int h = 0; h < 2; h++) total_[h] = tail_[h] = _mm512_setzero_si512();
  }

  // Whole rows up to `until`.
  __attribute__((always_inline)) void advance(const uint8_t* until) {
    for (; until - at_ >= kRowBytes; at_ += kRowBytes)
      for (int h = 0; h < 2; h++) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at_) + h);
        total_[h] = _mm512_add_epi64(total_[h], _mm512_cvtepu32_epi64(words));
        tail_[h] = _mm512_add_epi64(tail_[h], total_[h]);
      }
  }

  __attribute__((always_inline)) uint64_t finish(const uint8_t* end) {
    advance(end);
    const uint64_t rows = (at_ - begin_) / kRowBytes;
    uint64_t sum = 0;
    for (int h = 0; h < 2; h++) {
      uint64_t total[8], tail[8];
      _mm512_storeu_si512(total, total_[h]);
      _mm512_storeu_si512(tail, tail_[h]);
      for (int j = 0; j < 8; j++) sum += 16 * (rows * total[j] - tail[j]) + (kFirstWordWeight + 8 * h + j) * total[j];
    }
    for (uint64_t t = 16 * rows; end - at_ >= 4; at_ += 4, t++) {
      uint32_t word;
      __builtin_memcpy(&word, at_, 4);
      sum += (kFirstWordWeight + t) * word;
    }
    return sum;
  }

 private:
  static constexpr ptrdiff_t kRowBytes = 64;
  const uint8_t *begin_, *at_;
  __m512i total_[2], tail_[2];
};

}  // namespace
}  // namespace unweight
