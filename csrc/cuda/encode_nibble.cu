// Sizes and writes nibble stages (docs/FORMAT.md section 6). csrc/cpu/encode_nibble.cpp is the same on a CPU.
//
// hot loop: unweight_size_nibble 16 LDS
// budget: unweight_size_nibble 9.0
// hot loop: unweight_write_nibble 16 LDS
// budget: unweight_write_nibble 18.0
#include "decode/nibble.cuh"
#include "encode/patches.cuh"

namespace unweight::cuda {
namespace {

constexpr uint32_t kCodeBits = 0x07800780;     // 4-bit codes of both weights, where their exponents begin
constexpr uint32_t kOutsideBits = 0xF800F800;  // not 0 if exponent minus base is no code
constexpr uint32_t kGuardBits = 0x80008000;
constexpr uint32_t kFirstHalf = 0x0000FFFF;
constexpr int kMostScaled = 190;

// The warp's registers, with the base as exponent of everything that has no code of its own: padding and zero rows get
// code 0 and in patches 112, as the format wants them, and nothing below has to ask what they are.
struct NibbleTile {
  const WarpTile& tile;
  int lane, columns;
  uint32_t base_pair;
  uint32_t zero_rows = 0;           // rows that are +0 in all their columns
  uint32_t fill_upper, fill_lower;  // of the two rows of this lane

  __device__ __forceinline__ NibbleTile(const WarpTile& tile, const WarpRows& from, uint32_t base, int lane)
      : tile(tile), lane(lane), columns(from.columns), base_pair(base << 7 | base << 23) {
    uint32_t upper = 0, lower = 0;
#pragma unroll
    for (int k = 0; k < kKSteps; k++) {
      uint32_t r[kRegisters];
      load_registers(tile, k, lane, r);
      upper |= r[0] | r[2];
      lower |= r[1] | r[3];
    }
    // Four lanes hold a row of the first eight, and the row 8 below.
    const uint32_t upper_lanes = __ballot_sync(kAllLanes, upper != 0);
    const uint32_t lower_lanes = __ballot_sync(kAllLanes, lower != 0);
    const uint32_t lanes = lane < 8 ? upper_lanes : lower_lanes;
    zero_rows = __ballot_sync(kAllLanes, lane < from.rows && !(lanes >> lane % 8 * 4 & 15));
    const auto fill = [&](int row) { return row >= from.rows || (zero_rows >> row & 1) ? base_pair : 0; };
    fill_upper = fill(fragment_row(0, lane, 0));
    fill_lower = fill(fragment_row(0, lane, 1));
  }

  __device__ __forceinline__ void load(int kstep, uint32_t (&registers)[kRegisters]) const {
    load_registers(tile, kstep, lane, registers);
#pragma unroll
    for (int i = 0; i < kRegisters; i++) registers[i] |= i & 1 ? fill_lower : fill_upper;
    if (columns == kStageColumns) return;
#pragma unroll
    for (int i = 0; i < kRegisters; i++) {
      const int left = columns - fragment_column(kstep, lane, i);
      registers[i] |= left >= 2 ? 0 : left == 1 ? base_pair & ~kFirstHalf : base_pair;
    }
  }
};

struct NibbleRegister {
  uint32_t codes;  // at bits 7 and 23
  bool outside;    // an exponent has no code: the register needs a patch

  __device__ __forceinline__ NibbleRegister(uint32_t base_pair, uint32_t weights) {
    // Both exponents at once: the guard bits keep one from borrowing from the other.
    const uint32_t difference = ((weights & kExponentBits) | kGuardBits) - base_pair;
    const uint32_t out = (difference ^ kGuardBits) & kOutsideBits;
    outside = out != 0;
    codes = difference & kCodeBits & (out & kFirstHalf ? ~kFirstHalf : ~0u) & (out & ~kFirstHalf ? kFirstHalf : ~0u);
  }
};

// The exponents of a patch; `fits` is false if one of them has no scaled form.
__device__ __forceinline__ uint32_t scaled_exponents(uint32_t base_pair, uint32_t weights, bool& fits) {
  const int scale = kNibbleScaledBase - static_cast<int>(base_pair >> 23);
  uint32_t patch = 0;
  fits = true;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int exponent = weights >> (16 * h + 7) & 255, mantissa = weights >> 16 * h & 0x7F;
    const bool special = exponent == 0 || exponent == 255;
    const int scaled = special ? exponent : exponent + scale;
    // A subnormal other than zero has no exponent to scale.
    fits = fits && (special ? exponent == 255 || mantissa == 0 : scaled >= 1 && scaled <= kMostScaled);
    patch |= static_cast<uint32_t>(scaled) << (16 * h + 7);
  }
  return patch;
}

}  // namespace

// A CTA a stage. Writes sizes and perhaps misfits; reads nibble_base.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_size_nibble(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const StageWarp w(a, tiles);
  const NibbleTile tile(w.tile, w.rows, a.nibble_base, w.lane);
  uint32_t patches = 0;
  bool all_fit = true;
#pragma unroll 2
  for (int k = 0; k < kKSteps; k++) {
    uint32_t registers[kRegisters], outside = 0;
    tile.load(k, registers);
#pragma unroll
    for (int i = 0; i < kRegisters; i++)
      outside |= (NibbleRegister(tile.base_pair, registers[i]).outside ? 1u : 0u) << i;
    patches += __popc(outside);
    for (; outside; outside &= outside - 1) {
      bool fits;
      scaled_exponents(tile.base_pair, pick(registers, __ffs(outside) - 1), fits);
      all_fit = all_fit && fits;
    }
  }
  patches = __reduce_add_sync(kAllLanes, patches);
  all_fit = __all_sync(kAllLanes, all_fit && patches <= kMaxWarpPatches);
  if (w.lane != 0) return;
  if (!all_fit) atomicOr(reinterpret_cast<uint32_t*>(a.misfits), 1);
  w.matrix.sizes[w.at.unit * kWarps + w.warp] = make_warp_size(0, all_fit ? patches : 0, tile.zero_rows != 0, false);
}

// A CTA a stage. Reads sizes, nibble_base and the fields for writing.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_write_nibble(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const StageWarp w(a, tiles);
  const NibbleTile tile(w.tile, w.rows, a.nibble_base, w.lane);

  uint8_t* const out = w.matrix.stage(w.at.unit);
  const Section section = warp_section(w.matrix, w.at.unit, w.warp, kNibbleSections);
  const bool zero_rows = tile.zero_rows != 0;
  PatchWriter patches{reinterpret_cast<uint32_t*>(out + section.begin) + zero_rows};
  auto* const nibbles = reinterpret_cast<uint2*>(out + kHuffmanSections + w.warp * kWarpNibbleBytes);
#pragma unroll 1
  for (int pair = 0; pair < kKSteps / 2; pair++) {
    uint32_t plane[4], words[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      uint32_t registers[kRegisters], codes[kRegisters], outside = 0;
      tile.load(2 * pair + k, registers);
#pragma unroll
      for (int i = 0; i < kRegisters; i++) {
        const NibbleRegister r(tile.base_pair, registers[i]);
        codes[i] = r.codes;
        outside |= (r.outside ? 1u : 0u) << i;
      }
      plane[2 * k] = merge_signs_mantissas(registers[0], registers[1]);
      plane[2 * k + 1] = merge_signs_mantissas(registers[2], registers[3]);
      words[k] = encode_nibbles(codes);
      patches.add(2 * pair + k, w.lane, outside, registers, [&](uint32_t weights) {
        bool fits;
        return scaled_exponents(tile.base_pair, weights, fits);
      });
    }
    store_plane(out, w.warp, pair, w.lane, make_uint4(plane[0], plane[1], plane[2], plane[3]));
    nibbles[pair * kLanes + w.lane] = make_uint2(words[0], words[1]);
  }
  if (w.lane == 0) {
    store_word(out, 4 * w.warp, make_warp_header(section.begin, zero_rows, patches.ksteps, patches.count));
    if (zero_rows) store_word(out, section.begin, tile.zero_rows);
  }
  if (w.warp == kWarps - 1) store_stage_end(out, section.end(), w.lane);
}

}  // namespace unweight::cuda
