#ifndef UNWEIGHT_PORTABLE_ONLY
#include "checksum_avx512.h"

namespace unweight {

// As in capability.h, whose inline functions stay out of files built for AVX-512.
uint64_t checksum_avx512(const uint8_t* bytes, size_t size);

uint64_t checksum_avx512(const uint8_t* bytes, size_t size) {
  RunningChecksum sum(bytes);
  return sum.finish(bytes + size);
}

}  // namespace unweight
#endif
