// How often each pair of exponents occurs: what code tables and the nibble window are made from.
#pragma once
#include <cstdint>

#include "../format/code.h"
#include "../format/header.h"

namespace unweight {

// Adds the pairs of `count` weights. `run`: pairs don't cross multiples of it (a row for tiles, everything for archive
// chunks); an odd run's last weight is paired as docs/FORMAT.md says for the layout. Threads may share `total`.
void count_pairs(const uint16_t* weights, int64_t count, int64_t run, Layout layout, PairCounts& total);

}  // namespace unweight
