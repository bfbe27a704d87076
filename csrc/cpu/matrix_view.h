// What the kernels read of a tiled packed matrix (raw, huffman, nibble). Plain data, and plain results: files built for
// AVX-512 must not instantiate inline functions of the C++ library, which the linker could then pick for every machine.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../format/header.h"

namespace unweight {

struct MatrixView {
  const uint8_t* bytes;  // the packed matrix
  uint64_t size;         // bytes that may be read
  uint64_t used_bytes, index_offset, data_offset;
  uint64_t out_features, in_features, stages_per_block;
  uint32_t segment_stages;
  Layout layout;
  uint8_t nibble_base;
  // Of the code that starts an 8-bit prefix (huffman): its length and the two exponents.
  alignas(64) uint8_t code_length[256], first_exponent[256], second_exponent[256];
};

// Throws Error if the code table is damaged. Costs a microsecond: make one per matrix, not one per block.
MatrixView matrix_view(const Packed& packed, size_t size);

// What a kernel found wrong in a stage. A damaged stage leaves some of the output unwritten.
enum class Flaw : uint8_t { kNone, kIndex, kRawStage, kSection, kPatches };
struct Damage {
  Flaw flaw;
  uint8_t warp;
  uint64_t stage;
};

// Throws Error if there is one.
void check_damage(const MatrixView& matrix, const Damage& damage);

// A stage's bytes: inside the data, with room for the headers and the S-plane. Throws Error if they are not.
struct StageView {
  const uint8_t* bytes;
  uint64_t size;
};
StageView stage_view(const MatrixView& matrix, uint64_t stage);

}  // namespace unweight
