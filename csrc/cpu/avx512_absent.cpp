// Where the AVX-512 files are not built, capability() is never kAvx512, and nobody gets here.
#ifdef UNWEIGHT_PORTABLE_ONLY
#include <cstdlib>

#include "archive_decoder.h"
#include "capability.h"
#include "encode_avx512.h"
#include "unpack_avx512.h"
#include "word_streams.h"

namespace unweight {

uint64_t checksum_avx512(const uint8_t*, size_t) { std::abort(); }
int64_t decode_archive_rounds_avx512(ArchiveStreamState&, const uint32_t*, const uint8_t*, uint16_t*, int64_t, bool) {
  std::abort();
}
Damage unpack_block_avx512(const MatrixView&, uint64_t, uint16_t*, bool, uint64_t*) { std::abort(); }
Damage unpack_warp_avx512(const MatrixView&, uint64_t, int, uint16_t*) { std::abort(); }
void look_up_warp_avx512(const PairWindow&, const StageRows&, int, uint32_t*, uint32_t (*)[2 * kLanes],
                         uint32_t (*)[2 * kLanes], MissingCodes&) {
  std::abort();
}
uint64_t look_up_round_avx512(const PairWindow&, const uint16_t*, uint8_t*, uint32_t*, uint32_t*) { std::abort(); }
void encode_nibbles_avx512(int, const StageRows&, int, uint32_t*, uint32_t*, uint32_t (*)[kRegisters]) { std::abort(); }
void swizzled_pairs_avx512(const uint16_t*, int64_t, uint16_t*, uint16_t&) { std::abort(); }
void append_avx512(WordStreams&, const uint32_t (*)[kMostStreams], const uint32_t (*)[kMostStreams], int) {
  std::abort();
}
void copy_around_caches_avx512(uint8_t*, const uint8_t*, size_t) { std::abort(); }

}  // namespace unweight
#endif
