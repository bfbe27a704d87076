#ifndef UNWEIGHT_PORTABLE_ONLY
#include "checksum_avx512.h"

namespace unweight {

uint64_t checksum_avx512(const uint8_t* bytes, size_t size) {
  RunningChecksum sum(bytes);
  return sum.finish(bytes + size);
}

}  // namespace unweight
#endif
