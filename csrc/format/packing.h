// docs/FORMAT.md sections 4, 6 and 9: what a packer decides from counts and sizes, on whatever device those were made.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "code.h"
#include "header.h"

namespace unweight {

// The lowest base whose window of 16 holds most exponents. The missing half of a pair must be counted as exponent 0,
// which is in no window.
int best_nibble_base(const PairCounts& pairs);

// Exponents of padding registers in `huffman`: those of the first code, but never 255.
uint16_t padding_pair(const Code& code);

// What the matrices of one tensor have in common.
struct Packing {
  Layout layout = Layout::kRaw;
  int nibble_base = 0;  // nibble
  Code code;            // huffman, archive
};

// Sizes and sums of one matrix as it is packed.
struct PackedParts {
  std::vector<uint32_t> unit_steps;  // size of each stage or chunk in 16-byte steps
  uint64_t patches = 0;
};

// Throws Error where a matrix is empty, or too large for `raw`, which everything may fall back to.
void check_packable(int64_t matrices, int64_t out_features, int64_t in_features);

// False if there are more patches than `nibble` may have.
bool few_enough_patches(uint64_t patches, uint64_t out_features, uint64_t in_features);

// Everything but the header's checksum. `shape` as the caller knows the matrix, 2 to 8 entries.
Header make_header(const Packing& packing, uint64_t out_features, uint64_t in_features,
                   const std::vector<int64_t>& shape, const PackedParts& parts);

// `headers` of matrices that are packed together, each of out_features rows. True if `raw` would not be larger.
bool raw_is_no_larger(const std::vector<Header>& headers);

// The smallest row_bytes that all have room in; matrices of a stack start at multiples of 128 bytes.
int64_t common_row_bytes(const std::vector<Header>& headers, bool stacked);

// Writes the bytes [0, data_offset): header with its checksum, code table, index, `checksums` of the blocks.
void write_head(const Header& header, const Packing& packing, const PackedParts& parts,
                const std::vector<uint64_t>& checksums, uint8_t* out);

}  // namespace unweight
