// docs/FORMAT.md section 3: sum of (2^32 + t + 1) * w[t] over 32-bit words, modulo 2^64.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace unweight {

// Weights of neighbouring and distant words are never a power of two apart, so no two flipped bits cancel.
constexpr uint64_t kFirstWordWeight = (uint64_t{1} << 32) + 1;

// Two plain running sums instead of a product per word: `tail` gains `total` once a row, so a word r rows before the
// end is counted r times in it. That vectorises, and no 64-bit multiply is needed in the loop.
static inline uint64_t checksum(const uint8_t* bytes, size_t size) {
  constexpr size_t kLanes = 16;
  uint64_t total[kLanes] = {0}, tail[kLanes] = {0};
  const size_t words = size / 4, rows = words / kLanes;
  for (size_t r = 0; r < rows; r++) {
    uint32_t w[kLanes];
    std::memcpy(w, bytes + r * sizeof w, sizeof w);
    for (size_t j = 0; j < kLanes; j++) {
      total[j] += w[j];
      tail[j] += total[j];
    }
  }
  uint64_t sum = 0;
  for (size_t j = 0; j < kLanes; j++) sum += kLanes * (rows * total[j] - tail[j]) + (kFirstWordWeight + j) * total[j];
  for (size_t t = rows * kLanes; t < words; t++) {
    uint32_t w;
    std::memcpy(&w, bytes + 4 * t, 4);
    sum += (kFirstWordWeight + t) * uint64_t{w};
  }
  return sum;
}

}  // namespace unweight
