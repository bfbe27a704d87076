#include "matrix_view.h"

#include <cstring>

#include "../format/code.h"
#include "../format/error.h"

namespace unweight {

MatrixView matrix_view(const Packed& packed, size_t size) {
  const Header& h = packed.header;
  MatrixView view{};
  view.bytes = packed.bytes;
  view.size = size;
  view.used_bytes = h.used_bytes;
  view.index_offset = h.index_offset;
  view.data_offset = h.data_offset;
  view.out_features = h.out_features;
  view.in_features = h.in_features;
  view.stages_per_block = h.stages_per_block();
  view.segment_stages = h.segment_stages;
  view.layout = h.layout;
  view.nibble_base = h.nibble_base;
  if (h.layout == Layout::kHuffman) {
    const Code code = read_code(packed.bytes + kHeaderBytes, h.index_offset - kHeaderBytes, h.longest_code);
    const std::vector<uint32_t> table = code.decode_table();
    for (int prefix = 0; prefix < 256; prefix++) {
      view.code_length[prefix] = table[prefix] & 31;
      view.first_exponent[prefix] = table[prefix] >> 7 & 255;
      view.second_exponent[prefix] = table[prefix] >> 23 & 255;
    }
  }
  return view;
}

void check_damage(const MatrixView& matrix, const Damage& damage) {
  const auto stage = damage.stage;
  const int warp = damage.warp;
  switch (damage.flaw) {
    case Flaw::kNone: return;
    case Flaw::kIndex:
      fail("packed: the index gives stage ", stage,
           " a place outside the data, or one too small for its signs and "
           "mantissas (data at bytes ",
           matrix.data_offset, " to ", matrix.used_bytes, "): the bytes are damaged");
    case Flaw::kRawStage:
      fail("packed: stage ", stage, " says that it is raw, but is shorter than the ", kRawStageBytes,
           " bytes of a raw stage: the bytes are damaged");
    case Flaw::kSection:
      fail("packed: stage ", stage, ", warp ", warp, ": its patches are outside the stage: the bytes are damaged");
    case Flaw::kPatches:
      fail("packed: stage ", stage, ", warp ", warp,
           ": its patches don't belong to the k-steps that its header names: "
           "the bytes are damaged");
  }
}

StageView stage_view(const MatrixView& matrix, uint64_t stage) {
  uint32_t steps[2];
  std::memcpy(steps, matrix.bytes + matrix.index_offset + 4 * stage, sizeof steps);
  const uint64_t begin = matrix.data_offset + 16 * uint64_t{steps[0]};
  const uint64_t end = matrix.data_offset + 16 * uint64_t{steps[1]};
  if (begin > end || end > matrix.used_bytes || end - begin < kHuffmanSections)
    check_damage(matrix, {Flaw::kIndex, 0, stage});
  return {matrix.bytes + begin, end - begin};
}

}  // namespace unweight
