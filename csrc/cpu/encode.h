// Encoders of one 64-row block or archive chunk. Scratch and results are plain memory, so blocks encode in parallel.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "../format/code.h"
#include "../format/header.h"
#include "../format/packing.h"
#include "../format/tile.h"
#include "encode_avx512.h"

namespace unweight {

// What the encoders know of the matrix.
struct EncodePlan {
  int64_t in_features;
  int segment_stages;
  Packing packing;
  std::vector<uint32_t> encode_table;  // by pair, see Code
  uint16_t padding_pair = 0;           // exponents of padding registers in huffman
  bool avx512 = false;
  PairWindow window{};  // what `encode_table` says, for the AVX-512 loops
};

// The window of exponents that holds most of the code.
PairWindow make_pair_window(const Code& code, const std::vector<uint32_t>& encode_table);

// A block as it grows.
struct EncodedBlock {
  uint8_t* bytes = nullptr;  // room for block_limit()
  size_t size = 0;
  std::vector<uint32_t> unit_steps;  // size of each stage or chunk in 16-byte steps
  uint64_t patches = 0;

  uint8_t* end() { return bytes + size; }
  // Closes a unit that began at `begin`, zero-padded to 16 bytes.
  void close_unit(size_t begin) {
    while (size % 16) bytes[size++] = 0;
    unit_steps.push_back(static_cast<uint32_t>((size - begin) / 16));
  }
};

enum class Padding { kZero, kPairs };
// `rows`: the block's rows below N; `edge` takes 64 * 128 weights when the stage isn't whole. kPairs fills whole pairs
// with `padding_pair` and completes a half pair with its neighbour's exponent (docs/FORMAT.md section 7).
StageRows stage_rows(const uint16_t* rows, int64_t row_count, int64_t in_features, int64_t stage, Padding padding,
                     uint16_t padding_pair, uint16_t* edge);

void encode_raw_stage(const StageRows& rows, uint8_t* out);

// More than any block of so many rows can take.
size_t block_limit(const EncodePlan& plan, Layout layout, int64_t row_count);

void encode_raw_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block);
void encode_huffman_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block);
// False when the block can't be nibble (docs/FORMAT.md section 6).
bool encode_nibble_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block);
void encode_archive_chunk(const EncodePlan& plan, const uint16_t* weights, int64_t count, EncodedBlock& block);

static inline __attribute__((always_inline)) uint32_t load_pair(const uint16_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
static inline __attribute__((always_inline)) uint32_t exponent_pair(uint32_t weights) {
  return (weights >> 15 & 0xFF00) | (weights >> 7 & 0xFF);
}

}  // namespace unweight
