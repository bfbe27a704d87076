// Sizes of launches.
#pragma once
#include <cstdint>

#include "../format/error.h"

namespace unweight::cuda {

inline uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Throws Error where one launch can't have so many CTAs.
inline uint32_t grid_of(uint64_t ctas) {
  if (ctas > INT32_MAX) fail("packed: ", ctas, " units of work, allowed are 2^31 - 1 in one call");
  return static_cast<uint32_t>(ctas);
}

}  // namespace unweight::cuda
