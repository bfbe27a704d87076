// Rows of a packed matrix.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec.h"

namespace unweight {

// Row ids[i] of w to out[i, in_features], as BF16 bits. Only what holds the rows is decoded: the rows alone (raw,
// nibble), their lanes (huffman, where all lanes of the warp have to be measured; AVX-512 decodes two warps) or a chunk
// (archive). Throws Error for an id outside [0, out_features) and on damaged bytes; checksums are not checked.
void embedding(const Packed& w, size_t size, const int64_t* ids, int64_t count, uint16_t* out,
               const Parallel& parallel);

}  // namespace unweight
