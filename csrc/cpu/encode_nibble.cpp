// docs/FORMAT.md section 6.
#include <algorithm>

#include "../cuda/decode/nibble.cuh"
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
  uint32_t ksteps = 0, patches = 0;
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

// What is weight and what is padding in a row of a warp's stage.
struct Place {
  StageShape shape;
  uint32_t zero_rows;
  int warp;

  // Bit h: weight h of the register has a code or patch of its own.
  uint32_t real(int kstep, int lane, int reg) const {
    const int row = fragment_row(warp, lane, reg), column = fragment_column(kstep, lane, reg);
    if (row >= shape.rows || (zero_rows >> (row % kWarpRows) & 1)) return 0;
    return (column < shape.columns) | (column + 1 < shape.columns) << 1;
  }
};

// Codes of one register, at bits 7 and 23. `outside`: it needs a patch.
uint32_t register_codes(int base, uint32_t weights, uint32_t real, bool& outside) {
  uint32_t codes = 0;
  outside = false;
  for (int h = 0; h < 2; h++) {
    const uint32_t code = (weights >> (16 * h + 7) & 255) - static_cast<uint32_t>(base);
    if (!(real >> h & 1)) continue;
    if (code < kWindow)
      codes |= code << (h ? 23 : 7);
    else
      outside = true;
  }
  return codes;
}

// False if the matrix can't be nibble.
bool add_patch(int base, uint32_t weights, uint32_t real, uint32_t place, int kstep, Warp& warp) {
  uint32_t patch = place;
  for (int h = 0; h < 2; h++) {
    const uint32_t weight = weights >> (16 * h) & 0xFFFF;
    const int scaled = real >> h & 1 ? scaled_exponent(weight >> 7 & 255, base) : kNibbleScaledBase;
    if (scaled < 0 || ((real >> h & 1) && is_subnormal(weight))) return false;
    patch |= static_cast<uint32_t>(scaled) << (h ? 23 : 7);
  }
  if (warp.patches == kMaxWarpPatches) return false;
  if (warp.ksteps >> kstep & 1) warp.entries[warp.patches - 1] |= kPatchContinues;
  warp.ksteps |= 1u << kstep;
  warp.entries[warp.patches++] = patch;
  return true;
}

uint32_t load_register(const StageRows& rows, int w, int k, int l, int i) {
  return load_pair(rows.data + fragment_row(w, l, i) * rows.stride + fragment_column(k, l, i));
}

// S-plane and N-plane of a warp, and the lanes that need a patch, by k-step and register.
void encode_planes(int base, const StageRows& rows, const Place& place, uint32_t* plane, uint32_t* nibbles,
                   uint32_t (&outside)[kKSteps][kRegisters]) {
  for (int k = 0; k < kKSteps; k++) {
    for (uint32_t& lanes : outside[k]) lanes = 0;
    for (int l = 0; l < kLanes; l++) {
      uint32_t f[kRegisters], codes[kRegisters];
      for (int i = 0; i < kRegisters; i++) {
        bool out;
        f[i] = load_register(rows, place.warp, k, l, i);
        codes[i] = register_codes(base, f[i], place.real(k, l, i), out);
        outside[k][i] |= uint32_t{out} << l;
      }
      plane[(k / 2 * kLanes + l) * 4 + k % 2 * 2] = merge_signs_mantissas(f[0], f[1]);
      plane[(k / 2 * kLanes + l) * 4 + k % 2 * 2 + 1] = merge_signs_mantissas(f[2], f[3]);
      nibbles[(k / 2 * kLanes + l) * 2 + k % 2] = encode_nibbles(codes);
    }
  }
}

bool add_patches(int base, const StageRows& rows, const Place& place, const uint32_t (&outside)[kKSteps][kRegisters],
                 Warp& warp) {
  for (int k = 0; k < kKSteps; k++) {
    uint32_t lanes = outside[k][0] | outside[k][1] | outside[k][2] | outside[k][3];
    for (; lanes; lanes &= lanes - 1) {
      const int l = __builtin_ctz(lanes);
      for (int i = 0; i < kRegisters; i++)
        if ((outside[k][i] >> l & 1) &&
            !add_patch(base, load_register(rows, place.warp, k, l, i), place.real(k, l, i), 4 * l + i, k, warp))
          return false;
    }
  }
  return true;
}

bool encode_stage(const EncodePlan& plan, const StageRows& rows, StageShape shape, EncodedBlock& block) {
  uint8_t* const begin = block.end();
  uint32_t at = kNibbleSections;
  const bool whole = shape.rows == kBlockRows && shape.columns == kStageColumns;
  for (int w = 0; w < kWarps; w++) {
    // Stages are 16-byte aligned in the tensor and here.
    auto* plane = reinterpret_cast<uint32_t*>(begin + kStageHeaderBytes + w * kWarpPlaneBytes);
    auto* nibbles = reinterpret_cast<uint32_t*>(begin + kHuffmanSections + w * kWarpNibbleBytes);
    uint32_t outside[kKSteps][kRegisters];
    const Place place{shape, find_zero_rows(rows, shape, w), w};
    Warp warp;
    // A zero row is outside the window everywhere: the fast loop can't tell it from weights that need patches.
    if (plan.avx512 && whole && place.zero_rows == 0)
      encode_nibbles_avx512(plan.packing.nibble_base, rows, w, plane, nibbles, outside);
    else
      encode_planes(plan.packing.nibble_base, rows, place, plane, nibbles, outside);
    if (!add_patches(plan.packing.nibble_base, rows, place, outside, warp)) return false;

    const uint32_t header = make_warp_header(at, place.zero_rows != 0, warp.ksteps, warp.patches);
    std::memcpy(begin + 4 * w, &header, 4);
    if (place.zero_rows) {
      std::memcpy(begin + at, &place.zero_rows, 4);
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
  uint16_t edge[kBlockRows * kStageColumns];
  for (int64_t s = 0; s < stages; s++) {
    const size_t begin = block.size;
    const StageShape shape{row_count, std::min<int64_t>(kStageColumns, plan.in_features - s * kStageColumns)};
    if (!encode_stage(plan, stage_rows(rows, row_count, plan.in_features, s, Padding::kZero, 0, edge), shape, block))
      return false;
    block.close_unit(begin);
  }
  return true;
}

}  // namespace unweight
