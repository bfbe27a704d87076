// The same source as everywhere, built with wider registers.
#ifndef UNWEIGHT_PORTABLE_ONLY
#include "../format/checksum.h"

namespace unweight {

uint64_t checksum_avx512(const uint8_t* bytes, size_t size) { return checksum(bytes, size); }

}  // namespace unweight
#endif
