// docs/FORMAT.md section 6.
#include <algorithm>

#include "../cuda/decode/nibble.cuh"
#include "../format/checksum.h"
#include "encode.h"

namespace unweight {
namespace {

constexpr uint32_t kWindow = 16;

// Exponent as a patch stores it, or -1 if the scaled form can't hold it.
int scaled_exponent(uint32_t exponent, int base) {
  if (exponent == 0 || exponent == 255) return static_cast<int>(exponent);
  const int scaled = static_cast<int>(exponent) + kNibbleScaledBase - base;
  return scaled >= 1 && scaled <= 190 ? scaled : -1;
}

bool is_subnormal(uint32_t bf16) { return (bf16 & 0x7F80) == 0 && (bf16 & 0x7F); }

struct Warp {
  uint32_t zero_rows = 0, ksteps = 0, patches = 0;
  uint32_t entries[kMaxWarpPatches];
};

struct StageShape {
  int64_t rows, columns;  // of the stage that are weights, not padding
};

uint32_t find_zero_rows(const StageRows& rows, StageShape shape, int warp) {
  uint32_t mask = 0;
  for (int r = 0; r < kWarpRows && warp * kWarpRows + r < shape.rows; r++) {
    const uint16_t* p = rows.data + (warp * kWarpRows + r) * rows.stride;
    if (std::all_of(p, p + shape.columns, [](uint16_t x) { return x == 0; })) mask |= 1u << r;
  }
  return mask;
}

// Codes and patch of one register. `real` bit h: weight h is a weight, not padding.
bool encode_register(const EncodePlan& plan, uint32_t weights, uint32_t real, uint32_t place, int kstep, Warp& warp,
                     uint32_t& codes) {
  uint32_t exponents[2] = {weights >> 7 & 255, weights >> 23 & 255}, code[2];
  bool outside = false;
  for (int h = 0; h < 2; h++) {
    code[h] = exponents[h] - static_cast<uint32_t>(plan.nibble_base);
    if (!(real >> h & 1)) {
      code[h] = 0;
      exponents[h] = static_cast<uint32_t>(plan.nibble_base);
    } else if (code[h] >= kWindow) {
      code[h] = 0;
      outside = true;
    }
  }
  codes = code[0] << 7 | code[1] << 23;
  if (!outside) return true;
  uint32_t patch = place;
  for (int h = 0; h < 2; h++) {
    const int scaled = scaled_exponent(exponents[h], plan.nibble_base);
    if (scaled < 0 || ((real >> h & 1) && is_subnormal(weights >> 16 * h & 0xFFFF))) return false;
    patch |= static_cast<uint32_t>(scaled) << (h ? 23 : 7);
  }
  if (warp.patches == kMaxWarpPatches) return false;
  if (warp.ksteps >> kstep & 1) warp.entries[warp.patches - 1] |= kPatchContinues;
  warp.ksteps |= 1u << kstep;
  warp.entries[warp.patches++] = patch;
  return true;
}

bool encode_stage(const EncodePlan& plan, const StageRows& rows, StageShape shape, EncodedBlock& block) {
  uint8_t* const begin = block.end();
  uint32_t at = kNibbleSections;
  for (int w = 0; w < kWarps; w++) {
    Warp warp;
    warp.zero_rows = find_zero_rows(rows, shape, w);
    for (int k = 0; k < kKSteps; k++)
      for (int l = 0; l < kLanes; l++) {
        uint32_t f[kRegisters], codes[kRegisters];
        for (int i = 0; i < kRegisters; i++) {
          const int row = fragment_row(w, l, i), column = fragment_column(k, l, i);
          f[i] = load_pair(rows.data + row * rows.stride + column);
          const bool padding_row = row >= shape.rows || (warp.zero_rows >> (row % kWarpRows) & 1);
          const uint32_t real = padding_row ? 0u : (column < shape.columns) | (column + 1 < shape.columns) << 1;
          if (!encode_register(plan, f[i], real, 4 * l + i, k, warp, codes[i])) return false;
        }
        const uint32_t plane[2] = {merge_signs_mantissas(f[0], f[1]), merge_signs_mantissas(f[2], f[3])};
        const uint32_t nibbles = encode_nibbles(codes);
        const size_t pair = w * kKSteps / 2 + k / 2;
        std::memcpy(begin + kStageHeaderBytes + (pair * kLanes + l) * 16 + k % 2 * 8, plane, 8);
        std::memcpy(begin + kHuffmanSections + (pair * kLanes + l) * 8 + k % 2 * 4, &nibbles, 4);
      }
    const uint32_t header = make_warp_header(at, warp.zero_rows != 0, warp.ksteps, warp.patches);
    std::memcpy(begin + 4 * w, &header, 4);
    if (warp.zero_rows) {
      std::memcpy(begin + at, &warp.zero_rows, 4);
      at += 4;
    }
    std::memcpy(begin + at, warp.entries, 4 * warp.patches);
    at += 4 * warp.patches;
    block.patches += warp.patches;
  }
  block.size += at;
  return true;
}

}  // namespace

bool encode_nibble_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block) {
  const int64_t stages = (plan.in_features + kStageColumns - 1) / kStageColumns;
  constexpr int64_t kMostBytes = kNibbleSections + 4 * kWarps * (1 + kMaxWarpPatches) + 16;
  block.reserve(stages * kMostBytes);
  uint16_t edge[kBlockRows * kStageColumns];
  for (int64_t s = 0; s < stages; s++) {
    const size_t begin = block.size;
    const StageShape shape{row_count, std::min<int64_t>(kStageColumns, plan.in_features - s * kStageColumns)};
    if (!encode_stage(plan, stage_rows(rows, row_count, plan.in_features, s, Padding::kZero, 0, edge), shape, block))
      return false;
    block.close_unit(begin);
  }
  block.checksum = checksum(block.bytes.get(), block.size);
  return true;
}

}  // namespace unweight
