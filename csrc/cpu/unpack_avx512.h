// Decoding tiled layouts to row-major BF16 bits with AVX-512. Call only when capability() is kAvx512, and hand the
// result to check_damage(). Comparing checksums is the caller's.
#pragma once
#include <cstdint>

#include "matrix_view.h"

namespace unweight {

// Rows 64·block … of the matrix (64, or what is left) to out[rows, in_features]. `around_caches`: for rows that aren't
// read again soon; has an effect if `out` is 64-byte aligned and in_features a multiple of 32. `checksum`: takes the
// sum of the block's bytes as they are, or null.
Damage unpack_block_avx512(const MatrixView& matrix, uint64_t block, uint16_t* out, bool around_caches,
                           uint64_t* checksum);

// The 16 rows of one warp, 64·block + 16·warp … (or what is left) to out[rows, in_features], which stay in the caches.
Damage unpack_warp_avx512(const MatrixView& matrix, uint64_t block, int warp, uint16_t* out);

}  // namespace unweight
