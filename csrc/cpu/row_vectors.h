// Vectors of four words for the portable decoders; compilers map them to what the processor has.
#pragma once
#include <cstdint>
#include <cstring>

#include "../cuda/decode/bits.cuh"

namespace unweight {

typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define UNWEIGHT_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define UNWEIGHT_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Words{i, j, k, l})
#endif

inline Words load_words(const uint8_t* p) {
  Words words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

inline uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Four lanes x 4 words, lane after lane -> words[i]: word i of the four lanes, which share a row.
inline void transpose(const uint8_t* p, Words (&words)[4]) {
  const Words a = load_words(p), b = load_words(p + 16), c = load_words(p + 32), d = load_words(p + 48);
  const Words ab_low = UNWEIGHT_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = UNWEIGHT_SHUFFLE(a, b, 2, 6, 3, 7);
  const Words cd_low = UNWEIGHT_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = UNWEIGHT_SHUFFLE(c, d, 2, 6, 3, 7);
  words[0] = UNWEIGHT_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
  words[1] = UNWEIGHT_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
  words[2] = UNWEIGHT_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
  words[3] = UNWEIGHT_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
}

// Registers of four lanes; `row` is where the lanes' row of the k-step is, registers 1 and 3 are 8 rows below.
template <class Vector>
void store_register(uint16_t* row, int i, const Vector& weights) {
  std::memcpy(row + (i & 1) * 8 * kStageColumns + (i >> 1) * 8, &weights, sizeof weights);
}

inline Words select(Words ones, Words zeros) { return (ones & kEvenBits) | (zeros & ~kEvenBits); }
inline Words rotate_byte(Words words) { return words << 8 | words >> 24; }

}  // namespace unweight
