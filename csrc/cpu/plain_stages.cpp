#include "plain_stages.h"

#include "../cuda/decode/nibble.cuh"
#include "row_vectors.h"

namespace unweight {
namespace {

void decode_raw_warp(const uint8_t* stage, int warp, uint16_t* rows) {
  const uint8_t* from = stage + kStageHeaderBytes + warp * kWarpRawBytes;
  for (int k = 0; k < kKSteps; k++)
    for (int row = 0; row < kWarpRows / 2; row++, from += 64) {
      Words registers[kRegisters];
      transpose(from, registers);
      for (int i = 0; i < kRegisters; i++)
        store_register(rows + row * kStageColumns + k * kKStepColumns, i, registers[i]);
    }
}

Words exponents_of(Words codes) { return (codes & kNibbleBits) | kNibbleExponents; }

void store_kstep(Words codes, Words s0, Words s1, uint32_t scale, uint16_t* row) {
  const Words t0 = exponents_of(codes), t1 = exponents_of(codes >> 4 | codes << 28);
  const Words registers[kRegisters] = {select(s0, t0), rotate_byte(select(t0, s0)), select(s1, t1),
                                       rotate_byte(select(t1, s1))};
  // An exponent never borrows from its neighbours: it is 112 or more, and at least 1 without the scale.
  for (int i = 0; i < kRegisters; i++) store_register(row, i, (Halves)registers[i] - static_cast<uint16_t>(scale << 7));
}

void decode_nibble_warp(const uint8_t* stage, int warp, uint32_t scale, uint16_t* rows) {
  const uint8_t* plane = stage + kStageHeaderBytes + warp * kWarpPlaneBytes;
  const uint8_t* codes = stage + kHuffmanSections + warp * kWarpNibbleBytes;
  for (int pair = 0; pair < kKSteps / 2; pair++)
    for (int row = 0; row < kWarpRows / 2; row++, plane += 64, codes += 32) {
      Words signs[4];
      transpose(plane, signs);
      const Words a = load_words(codes), b = load_words(codes + 16);
      uint16_t* out = rows + row * kStageColumns + pair * 2 * kKStepColumns;
      store_kstep(UNWEIGHT_SHUFFLE(a, b, 0, 2, 4, 6), signs[0], signs[1], scale, out);
      store_kstep(UNWEIGHT_SHUFFLE(a, b, 1, 3, 5, 7), signs[2], signs[3], scale, out + kKStepColumns);
    }
}

}  // namespace

uint32_t nibble_scale(const MatrixView& matrix) { return kNibbleScaledBase - matrix.nibble_base; }

uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent - scale) & 255;
}

bool apply_patches(WarpHeader header, const uint8_t* patches, bool scaled, uint32_t scale, uint16_t* rows) {
  uint32_t ksteps = header.patched_ksteps();
  for (uint32_t n = 0; n < header.patches(); n++) {
    if (ksteps == 0) return false;
    const uint32_t patch = load_word(patches + 4 * n);
    const int lane = patch_place(patch) / kRegisters, reg = patch_place(patch) % kRegisters;
    uint16_t* at =
        rows + fragment_row(0, lane, reg) * kStageColumns + fragment_column(__builtin_ctz(ksteps), lane, reg);
    uint32_t weights, exponents = patch & kExponentBits;
    if (scaled)
      exponents = unscaled_exponent(patch >> 7 & 255, scale) << 7 | unscaled_exponent(patch >> 23 & 255, scale) << 23;
    std::memcpy(&weights, at, 4);
    weights = (weights & ~kExponentBits) | exponents;
    std::memcpy(at, &weights, 4);
    if (!(patch & kPatchContinues)) ksteps &= ksteps - 1;
  }
  return ksteps == 0;
}

NibbleWarp nibble_warp(const MatrixView& matrix, const StageView& stage, uint64_t stage_number, int warp) {
  NibbleWarp found{{load_word(stage.bytes + 4 * warp)}, 0, nullptr};
  const WarpHeader h = found.header;
  const uint64_t patches = h.section() + 4 * uint64_t{h.has_zero_rows()};
  if (h.section() < kNibbleSections || patches + 4 * h.patches() > stage.size)
    check_damage(matrix, {Flaw::kSection, static_cast<uint8_t>(warp), stage_number});
  if (h.has_zero_rows()) found.zero_rows = load_word(stage.bytes + h.section()) & 0xFFFF;
  found.patches = stage.bytes + patches;
  return found;
}

bool decode_raw_stage(const MatrixView& matrix, const StageView& stage, uint64_t stage_number, int first_warp,
                      int last_warp, uint16_t* tile) {
  const bool raw = WarpHeader{load_word(stage.bytes)}.is_raw();
  if (raw ? stage.size < kRawStageBytes : matrix.layout == Layout::kRaw)
    check_damage(matrix, {Flaw::kRawStage, 0, stage_number});
  if (!raw) return false;
  for (int w = first_warp; w < last_warp; w++)
    decode_raw_warp(stage.bytes, w, tile + (w - first_warp) * kWarpRows * kStageColumns);
  return true;
}

void decode_plain_stage(const MatrixView& matrix, uint64_t stage_number, uint16_t* tile) {
  const StageView stage = stage_view(matrix, stage_number);
  if (decode_raw_stage(matrix, stage, stage_number, 0, kWarps, tile)) return;
  const uint32_t scale = nibble_scale(matrix);
  for (int w = 0; w < kWarps; w++) {
    uint16_t* rows = tile + w * kWarpRows * kStageColumns;
    const NibbleWarp warp = nibble_warp(matrix, stage, stage_number, w);
    decode_nibble_warp(stage.bytes, w, scale, rows);
    for (int r = 0; r < kWarpRows; r++)
      if (warp.zero_rows >> r & 1) std::memset(rows + r * kStageColumns, 0, 2 * kStageColumns);
    if (!apply_patches(warp.header, warp.patches, true, scale, rows))
      check_damage(matrix, {Flaw::kPatches, static_cast<uint8_t>(w), stage_number});
  }
}

}  // namespace unweight
