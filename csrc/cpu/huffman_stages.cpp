#include "huffman_stages.h"

#include <algorithm>

#include "../cuda/decode/huffman.cuh"
#include "plain_stages.h"
#include "row_vectors.h"

namespace unweight {
namespace {

// A lane's next word is loaded before it is known whether the lane takes it.
constexpr size_t kWordsReach = 4 * (kMaxWarpWords + 1);

}  // namespace

HuffmanStages::HuffmanStages(const MatrixView& matrix, uint64_t block)
    : matrix_(matrix), first_stage_(block * matrix.stages_per_block) {
  for (int prefix = 0; prefix < 256; prefix++)
    entries_[prefix] = make_code_entry(matrix.first_exponent[prefix] | matrix.second_exponent[prefix] << 8,
                                       matrix.code_length[prefix]);
}

void HuffmanStages::decode_warp(const StageView& stage, int warp, const uint8_t* words, uint32_t wanted,
                                uint16_t* rows) {
  Streams& s = streams_[warp];
  if (!started_)
    for (int k = 0; k < 2; k++, words += 8 * kLanes)
      for (int lane = 0; lane < kLanes; lane++) {
        s.window[k][lane] = uint64_t{load_word(words + 4 * lane)} << 32 | load_word(words + 4 * (kLanes + lane));
        s.position[k][lane] = 0;
      }
  const uint8_t* plane = stage.bytes + kStageHeaderBytes + warp * kWarpPlaneBytes;
  for (int pair = 0; pair < kKSteps / 2; pair++) {
    uint32_t exponents[2][kRegisters][kLanes];
    for (int k = 0; k < 2; k++)
      for (int lane = 0; lane < kLanes; lane++) {
        uint64_t window = s.window[k][lane];
        uint32_t position = s.position[k][lane];
        for (int i = 0; i < kRegisters; i++) {
          const uint32_t entry = entries_[window >> 56], length = entry & kCodeLengthBits;
          exponents[k][i][lane] = entry;
          window <<= length;
          position += length;
        }
        // A mask, since a branch would be guessed wrong every other time.
        const uint32_t passed = position >> 5;
        position &= 31;
        window |= uint64_t{load_word(words)} << position & (0 - uint64_t{passed});
        words += 4 * passed;
        s.window[k][lane] = window;
        s.position[k][lane] = position;
      }
    for (int row = 0; row < kWarpRows / 2; row++, plane += 64) {
      if (!(wanted >> row & 0x101)) continue;  // four lanes hold it and the row 8 below
      Words signs[4];
      transpose(plane, signs);
      for (int k = 0; k < 2; k++)
        for (int i = 0; i < kRegisters; i++) {
          const Words sign = i & 1 ? rotate_byte(signs[2 * k + (i >> 1)]) : signs[2 * k + (i >> 1)];
          const auto* exponent = reinterpret_cast<const uint8_t*>(&exponents[k][i][4 * row]);
          store_register(rows + row * kStageColumns + (2 * pair + k) * kKStepColumns, i,
                         select(sign, load_words(exponent)));
        }
    }
  }
}

void HuffmanStages::next(int first_warp, int last_warp, uint32_t wanted, uint16_t* tile) {
  const uint64_t number = first_stage_ + stage_;
  if (stage_ % matrix_.segment_stages == 0) started_ = false;
  stage_++;
  const StageView stage = stage_view(matrix_, number);
  if (decode_raw_stage(matrix_, stage, number, first_warp, last_warp, tile)) return;
  for (int w = first_warp; w < last_warp; w++) {
    const WarpHeader header{load_word(stage.bytes + 4 * w)};
    const auto check = [&](bool good, Flaw flaw) {
      if (!good) check_damage(matrix_, {flaw, static_cast<uint8_t>(w), number});
    };
    check(header.section() >= kHuffmanSections && header.section() + 4 * header.patches() <= stage.size,
          Flaw::kSection);
    const uint8_t* patches = stage.bytes + header.section();
    const uint8_t* words = patches + 4 * header.patches();
    uint8_t copy[kWordsReach];
    const size_t available = matrix_.bytes + matrix_.size - words;
    if (available < kWordsReach) {
      std::fill(std::copy_n(words, available, copy), copy + kWordsReach, 0);
      words = copy;
    }
    uint16_t* rows = tile + (w - first_warp) * kWarpRows * kStageColumns;
    decode_warp(stage, w, words, wanted, rows);
    check(apply_patches(header, patches, false, 0, rows), Flaw::kPatches);
  }
  started_ = true;
}

}  // namespace unweight
