// Checksums with the instruction set in force (`capability()`, codec.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "../format/checksum.h"
#include "codec.h"

namespace unweight {

// Same result as `checksum`. Call only when capability() is kAvx512.
uint64_t checksum_avx512(const uint8_t* bytes, size_t size);

// `checksum` the fastest way.
inline uint64_t fast_checksum(const uint8_t* bytes, size_t size) {
  return capability() == Capability::kAvx512 ? checksum_avx512(bytes, size) : checksum(bytes, size);
}

}  // namespace unweight
