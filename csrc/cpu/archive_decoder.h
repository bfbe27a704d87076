// Decoding of archive chunks (docs/FORMAT.md section 8): a state that the AVX-512 and the portable loop share.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../format/archive.h"

namespace unweight {

struct ArchiveStreamState {
  uint32_t w0[kArchiveStreams], w1[kArchiveStreams];
  uint32_t position[kArchiveStreams];  // in w0, below 32
  const uint8_t* next;                 // the next word
  const uint8_t* end;                  // behind the last; words from there on are 0
};

// Decodes whole rounds of 2 · kRoundPairs weights while the words last for certain; the rest is for the caller.
// `table`: Code::decode_table. `around_caches`: with non-temporal stores, if `out` allows. Returns the rounds done.
int64_t decode_archive_rounds_avx512(ArchiveStreamState& state, const uint32_t* table, const uint8_t* plane,
                                     uint16_t* out, int64_t rounds, bool around_caches);

}  // namespace unweight
