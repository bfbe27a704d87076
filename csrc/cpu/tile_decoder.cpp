#include "tile_decoder.h"

#include <cstring>

#include "../cuda/decode/nibble.cuh"

namespace unweight {
namespace {

void store_register(uint16_t* tile, int warp, int kstep, int lane, int reg, uint32_t weights) {
  std::memcpy(tile + fragment_row(warp, lane, reg) * kStageColumns + fragment_column(kstep, lane, reg), &weights, 4);
}

// Takes the nibble scale off again. Exponents 0 and 255 are never scaled.
uint32_t unscale(uint32_t exponent, int base) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent + base - kNibbleScaledBase) & 255;
}

}  // namespace

struct TileDecoder::Stage {
  const uint8_t* bytes;
  uint64_t offset, size;  // in the tensor
  WarpHeader warps[kWarps];

  uint32_t word(uint32_t at) const {
    uint32_t w;
    std::memcpy(&w, bytes + at, 4);
    return w;
  }
};

TileDecoder::Stage TileDecoder::open_stage() const {
  const auto damage = [&](Flaw flaw, int warp) { check_damage(matrix_, {flaw, static_cast<uint8_t>(warp), stage_}); };
  uint32_t steps[2];
  std::memcpy(steps, matrix_.bytes + matrix_.index_offset + 4 * stage_, sizeof steps);
  const uint64_t begin = matrix_.data_offset + 16 * uint64_t{steps[0]};
  const uint64_t end = matrix_.data_offset + 16 * uint64_t{steps[1]};
  const uint32_t sections = matrix_.layout == Layout::kNibble ? kNibbleSections : kHuffmanSections;
  if (end > matrix_.used_bytes || begin >= end || end - begin < kHuffmanSections) damage(Flaw::kIndex, 0);

  Stage stage{matrix_.bytes + begin, begin, end - begin, {}};
  for (int w = 0; w < kWarps; w++) stage.warps[w].bits = stage.word(4 * w);
  if (stage.warps[0].is_raw()) {
    if (stage.size < kRawStageBytes) damage(Flaw::kRawStage, 0);
    return stage;
  }
  if (matrix_.layout == Layout::kRaw) damage(Flaw::kRawStage, 0);
  for (int w = 0; w < kWarps; w++) {
    const WarpHeader h = stage.warps[w];
    const uint32_t mask = matrix_.layout == Layout::kNibble && h.has_zero_rows();
    if (h.section() < sections || h.section() + 4 * (mask + h.patches()) > stage.size) damage(Flaw::kSection, w);
  }
  return stage;
}

void TileDecoder::decode_raw(const Stage& stage, uint16_t* tile) const {
  uint32_t at = kStageHeaderBytes;
  for (int w = 0; w < kWarps; w++)
    for (int k = 0; k < kKSteps; k++)
      for (int l = 0; l < kLanes; l++)
        for (int i = 0; i < kRegisters; i++, at += 4) store_register(tile, w, k, l, i, stage.word(at));
}

// Returns where the warp's patches are.
uint32_t TileDecoder::decode_nibble(const Stage& stage, int warp, uint16_t* tile) const {
  // Both exponents at once: a 16-bit field never borrows from its neighbour, since codes are 112 or more when scaled.
  const uint32_t scale = static_cast<uint32_t>(kNibbleScaledBase - matrix_.nibble_base) & 255;
  for (int k = 0; k < kKSteps; k++)
    for (int l = 0; l < kLanes; l++) {
      const uint32_t pair = warp * kKSteps / 2 + k / 2;
      const uint32_t plane = kStageHeaderBytes + (pair * kLanes + l) * 16 + k % 2 * 8;
      const uint32_t codes = kHuffmanSections + (pair * kLanes + l) * 8 + k % 2 * 4;
      uint32_t registers[kRegisters];
      decode_nibbles(stage.word(codes), stage.word(plane), stage.word(plane + 4), registers);
      for (int i = 0; i < kRegisters; i++) {
        const uint32_t e = registers[i] & kExponentBits;
        const uint32_t low = ((e >> 7) - scale) & 255, high = ((e >> 23) - scale) & 255;
        store_register(tile, warp, k, l, i, (registers[i] & ~kExponentBits) | low << 7 | high << 23);
      }
    }
  uint32_t at = stage.warps[warp].section();
  if (!stage.warps[warp].has_zero_rows()) return at;
  const uint32_t zero_rows = stage.word(at);
  for (int r = 0; r < kWarpRows; r++)
    if (zero_rows >> r & 1) std::memset(tile + (warp * kWarpRows + r) * kStageColumns, 0, 2 * kStageColumns);
  return at + 4;
}

// A damaged stage may ask for words behind its end, even behind the tensor's.
uint32_t TileDecoder::word(uint64_t at) const {
  uint32_t w = 0;
  if (at + 4 <= matrix_.size) std::memcpy(&w, matrix_.bytes + at, 4);
  return w;
}

uint32_t TileDecoder::decode_huffman(const Stage& stage, int warp, uint16_t* tile) {
  const WarpHeader header = stage.warps[warp];
  uint64_t next = stage.offset + header.section() + 4 * header.patches();
  if (!started_)
    for (auto& stream : streams_[warp]) {
      for (BitStream& s : stream) s = {word(next + 4 * (&s - stream)), word(next + 4 * (kLanes + (&s - stream))), 0};
      next += 8 * kLanes;
    }
  const auto lookup = [&](uint32_t x) {
    const uint32_t prefix = x >> 24;
    return make_code_entry(matrix_.first_exponent[prefix] | matrix_.second_exponent[prefix] << 8,
                           matrix_.code_length[prefix]);
  };
  for (int k = 0; k < kKSteps; k++)
    for (int l = 0; l < kLanes; l++) {
      const uint32_t plane = kStageHeaderBytes + ((warp * kKSteps / 2 + k / 2) * kLanes + l) * 16 + k % 2 * 8;
      uint32_t entries[kRegisters], registers[kRegisters];
      BitStream& stream = streams_[warp][k % 2][l];
      if (decode_four_codes(stream, lookup, entries)) {
        refill(stream, word(next));
        next += 4;
      }
      merge_entries(entries, stage.word(plane), stage.word(plane + 4), registers);
      for (int i = 0; i < kRegisters; i++) store_register(tile, warp, k, l, i, registers[i]);
    }
  return header.section();
}

void TileDecoder::apply_patches(const Stage& stage, int warp, uint32_t at, uint16_t* tile) const {
  const WarpHeader header = stage.warps[warp];
  const uint32_t end = at + 4 * header.patches();
  const auto damaged = [&] { check_damage(matrix_, {Flaw::kPatches, static_cast<uint8_t>(warp), stage_}); };
  for (int k = 0; k < kKSteps; k++) {
    bool more = header.patched_ksteps() >> k & 1;
    for (; more; at += 4) {
      if (at >= end) return damaged();
      const uint32_t patch = stage.word(at);
      uint32_t exponents = patch & kExponentBits;
      if (matrix_.layout == Layout::kNibble)
        exponents = unscale(exponents >> 7 & 255, matrix_.nibble_base) << 7 |
                    unscale(exponents >> 23 & 255, matrix_.nibble_base) << 23;
      const int lane = patch_place(patch) / kRegisters, reg = patch_place(patch) % kRegisters;
      uint16_t* place = tile + fragment_row(warp, lane, reg) * kStageColumns + fragment_column(k, lane, reg);
      uint32_t weights;
      std::memcpy(&weights, place, 4);
      weights = (weights & ~kExponentBits) | exponents;
      std::memcpy(place, &weights, 4);
      more = patch & kPatchContinues;
    }
  }
  if (at != end) damaged();
}

void TileDecoder::next(uint16_t* tile) {
  if ((stage_ - first_stage_) % matrix_.segment_stages == 0) started_ = false;
  const Stage stage = open_stage();
  if (stage.warps[0].is_raw()) {
    decode_raw(stage, tile);
  } else {
    for (int w = 0; w < kWarps; w++) {
      const bool nibble = matrix_.layout == Layout::kNibble;
      const uint32_t patches = nibble ? decode_nibble(stage, w, tile) : decode_huffman(stage, w, tile);
      apply_patches(stage, w, patches, tile);
    }
    started_ = true;
  }
  stage_++;
}

}  // namespace unweight
