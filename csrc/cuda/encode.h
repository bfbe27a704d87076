// What the host says to the kernels that count, size and write packed stages, and what they say back. Plain C++.
#pragma once
#include <cstdint>

#include "../format/tile.h"
#include "arguments.h"

namespace unweight::cuda {

// The same rows of each of several matrices, decoded in scratch: [matrices, row_count, in_features]. Whole 64-row
// blocks, unless the matrix ends there.
struct Band {
  DeviceAddress rows;  // BF16 bits, aligned to 256 bytes
  uint64_t row_count, in_features;
  uint64_t first_stage, stages_per_matrix;
  uint32_t stages_per_block, segment_stages, matrices;

  UNWEIGHT_HD_MEMBER uint32_t segments_per_block() const {
    return (stages_per_block + segment_stages - 1) / segment_stages;
  }
  UNWEIGHT_HD_MEMBER uint32_t blocks() const {  // of one matrix
    return static_cast<uint32_t>((row_count + kBlockRows - 1) / kBlockRows);
  }
};

// Pairs of exponents that one CTA counts before it empties its table: a counter has 16 bits.
constexpr uint32_t kCountThreads = 1024;
constexpr uint32_t kCountRound = 60 * kCountThreads;
// Second exponents that have counters of their own in shared memory. The others, of weights from 2^65 on, share one
// row, which only says that there are some: so the table fits all GPUs from compute capability 8.0 on.
constexpr uint32_t kCountSeconds = 192;
constexpr uint32_t kCountSharedBytes = 2 * 256 * (kCountSeconds + 1);
static_assert(kCountRound < 1 << 16, "all pairs of a round may be the same");
static_assert(kCountSharedBytes <= kLeastSharedLimit, "every GPU can run it");

struct CountArgument {
  DeviceAddress rows;  // as in Band, of all matrices
  uint64_t row_count, in_features;
  DeviceAddress counts;  // u64[65536], by pair; added to
  // The last pair of a row of odd length: does the missing weight take its neighbour's exponent, as huffman writes it,
  // or 0, which is in no window of nibble?
  uint32_t complete_halves;
};

// What one warp puts behind the planes of a stage.
struct WarpSize {
  uint32_t bits;
  UNWEIGHT_HD_MEMBER uint32_t words() const { return bits & 0xFFFF; }
  UNWEIGHT_HD_MEMBER uint32_t patches() const { return bits >> 16 & 0xFF; }
  UNWEIGHT_HD_MEMBER bool zero_rows() const { return bits >> 30 & 1; }  // nibble: a mask of them comes first
  UNWEIGHT_HD_MEMBER bool raw() const { return bits >> 31; }            // the same in all four warps
  UNWEIGHT_HD_MEMBER uint32_t section_bytes() const { return 4 * (zero_rows() + patches() + words()); }
};
UNWEIGHT_HD WarpSize make_warp_size(uint32_t words, uint32_t patches, bool zero_rows, bool raw) {
  return {words | patches << 16 | uint32_t{zero_rows} << 30 | uint32_t{raw} << 31};
}

struct StageSize {
  WarpSize warps[kWarps];
};
static_assert(sizeof(StageSize) == 16, "kernels move it as one vector");

// Of all kernels that size or write stages; each says which fields it reads. What belongs to a matrix is that of the
// band's first one.
struct EncodeArgument {
  Band band;
  DeviceAddress sizes;    // StageSize [matrices, stages]: sizing kernels write it, writing kernels read it
  DeviceAddress codes;    // huffman: u32[65536] by pair, as Code::encode_table
  DeviceAddress misfits;  // nibble, sizing: u32, set to 1 if the weights can't be nibble
  // Writing: packed matrices that already have their index.
  DeviceAddress packed;
  uint64_t matrix_bytes, index_offset, data_offset;
  uint32_t padding_pair;  // huffman
  uint32_t nibble_base;   // nibble
};

constexpr uint32_t kEncodeThreads = kWarps * kLanes;

struct SumArgument {
  DeviceAddress packed;  // matrices with index and data; their checksums are added to
  uint64_t matrix_bytes, index_offset, checksums_offset, data_offset;
  uint32_t matrices, blocks, stages_per_block;
  uint32_t pieces;  // CTAs that share a block
};
constexpr uint32_t kSumThreads = 256;

}  // namespace unweight::cuda
