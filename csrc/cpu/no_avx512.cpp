// Where the AVX-512 files are not built, capability() is never kAvx512, and nobody gets here.
#ifdef UNWEIGHT_PORTABLE_ONLY
#include <cstdlib>

#include "archive_decoder.h"
#include "capability.h"
#include "unpack_avx512.h"

namespace unweight {

uint64_t checksum_avx512(const uint8_t*, size_t) { std::abort(); }
int64_t decode_archive_rounds_avx512(ArchiveStreamState&, const uint32_t*, const uint8_t*, uint16_t*, int64_t, bool) {
  std::abort();
}
Damage unpack_block_avx512(const MatrixView&, uint64_t, uint16_t*) { std::abort(); }
Damage unpack_warp_avx512(const MatrixView&, uint64_t, int, uint16_t*) { std::abort(); }

}  // namespace unweight
#endif
