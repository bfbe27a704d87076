// Sizes and writes nibble stages (docs/FORMAT.md section 6). csrc/cpu/encode_nibble.cpp is the same on a CPU.
#include "decode/nibble.cuh"
#include "encode/patches.cuh"

namespace unweight::cuda {
namespace {

constexpr uint32_t kWindow = 16;
constexpr int kMostScaled = 190;

// All of a lane's registers of a stage, and what of them is weight.
struct LaneWeights {
  uint32_t registers[kKSteps][kRegisters];
  uint32_t zero_rows;  // of the warp: rows that are +0 in all their columns
  int lane, rows, columns;

  __device__ __forceinline__ LaneWeights(const WarpTile& tile, const WarpRows& from, int lane)
      : lane(lane), rows(from.rows), columns(from.columns) {
    uint32_t upper = 0, lower = 0;
#pragma unroll
    for (int k = 0; k < kKSteps; k++) {
      load_registers(tile, k, lane, registers[k]);
      upper |= registers[k][0] | registers[k][2];
      lower |= registers[k][1] | registers[k][3];
    }
    // Four lanes hold a row of the first eight, and the row 8 below.
    const uint32_t upper_lanes = __ballot_sync(kAllLanes, upper != 0),
                   lower_lanes = __ballot_sync(kAllLanes, lower != 0);
    const uint32_t lanes = lane < 8 ? upper_lanes : lower_lanes;
    zero_rows = __ballot_sync(kAllLanes, lane < rows && !(lanes >> lane % 8 * 4 & 15));
  }

  // Bit h: weight h of register i has a code or patch of its own.
  __device__ __forceinline__ uint32_t real(int kstep, int i) const {
    const int row = fragment_row(0, lane, i), column = fragment_column(kstep, lane, i);
    if (row >= rows || (zero_rows >> row & 1)) return 0;
    return (column < columns ? 1u : 0u) | (column + 1 < columns ? 2u : 0u);
  }
};

struct NibbleRegister {
  uint32_t codes = 0;  // at bits 7 and 23
  bool outside = false;

  __device__ __forceinline__ NibbleRegister(uint32_t base, uint32_t weights, uint32_t real) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t code = (weights >> (16 * h + 7) & 255) - base;
      if (!(real >> h & 1)) continue;
      if (code < kWindow)
        codes |= code << (16 * h + 7);
      else
        outside = true;
    }
  }
};

// The scaled exponents of a patch; false in `fits` if one of them has no scaled form.
__device__ __forceinline__ uint32_t scaled_exponents(uint32_t base, uint32_t weights, uint32_t real, bool& fits) {
  uint32_t patch = 0;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t weight = weights >> (16 * h) & 0xFFFF, exponent = weight >> 7 & 255;
    int scaled = static_cast<int>(exponent + kNibbleScaledBase - base);
    if (exponent == 0 || exponent == 255)
      scaled = exponent;
    else if (scaled < 1 || scaled > kMostScaled)
      fits = fits && !(real >> h & 1);
    if (exponent == 0 && (weight & 0x7F)) fits = fits && !(real >> h & 1);  // a subnormal has no exponent to scale
    if (!(real >> h & 1)) scaled = kNibbleScaledBase;
    patch |= static_cast<uint32_t>(scaled) << (16 * h + 7);
  }
  return patch;
}

}  // namespace

// A CTA a stage. Writes sizes and perhaps misfits; reads nibble_base.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_size_nibble(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const StagePlace at(a.band);
  const BandMatrix matrix(a, at.matrix);
  const WarpRows rows = warp_rows(a.band, matrix, at.block, at.stage, warp);
  fill_tile(tiles[warp], rows, {0, false}, lane);
  const LaneWeights weights(tiles[warp], rows, lane);
  uint32_t patches = 0;
  bool fits = true;
#pragma unroll
  for (int k = 0; k < kKSteps; k++)
#pragma unroll
    for (int i = 0; i < kRegisters; i++) {
      const uint32_t real = weights.real(k, i);
      if (!NibbleRegister(a.nibble_base, weights.registers[k][i], real).outside) continue;
      patches++;
      scaled_exponents(a.nibble_base, weights.registers[k][i], real, fits);
    }
  patches = __reduce_add_sync(kAllLanes, patches);
  fits = __all_sync(kAllLanes, fits && patches <= kMaxWarpPatches);
  if (lane != 0) return;
  if (!fits) atomicOr(reinterpret_cast<uint32_t*>(a.misfits), 1);
  matrix.sizes[at.unit * kWarps + warp] = make_warp_size(0, fits ? patches : 0, weights.zero_rows != 0, false);
}

// A CTA a stage. Reads sizes, nibble_base and the fields for writing.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_write_nibble(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const StagePlace at(a.band);
  const BandMatrix matrix(a, at.matrix);
  const WarpRows rows = warp_rows(a.band, matrix, at.block, at.stage, warp);
  fill_tile(tiles[warp], rows, {0, false}, lane);
  const LaneWeights weights(tiles[warp], rows, lane);

  uint8_t* const out = matrix.stage(at.unit);
  const Section section = warp_section(matrix, at.unit, warp, kNibbleSections);
  const bool zero_rows = weights.zero_rows != 0;
  PatchWriter patches{reinterpret_cast<uint32_t*>(out + section.begin) + zero_rows};
  auto* const nibbles = reinterpret_cast<uint2*>(out + kHuffmanSections + warp * kWarpNibbleBytes);
#pragma unroll
  for (int pair = 0; pair < kKSteps / 2; pair++) {
    uint32_t plane[4], words[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint32_t (&registers)[kRegisters] = weights.registers[2 * pair + k];
      uint32_t codes[kRegisters], outside = 0;
#pragma unroll
      for (int i = 0; i < kRegisters; i++) {
        const NibbleRegister r(a.nibble_base, registers[i], weights.real(2 * pair + k, i));
        codes[i] = r.codes;
        outside |= (r.outside ? 1u : 0u) << i;
      }
      plane[2 * k] = merge_signs_mantissas(registers[0], registers[1]);
      plane[2 * k + 1] = merge_signs_mantissas(registers[2], registers[3]);
      words[k] = encode_nibbles(codes);
      patches.add(2 * pair + k, lane, outside, [&](int i) {
        bool fits;
        return scaled_exponents(a.nibble_base, registers[i], weights.real(2 * pair + k, i), fits);
      });
    }
    store_plane(out, warp, pair, lane, make_uint4(plane[0], plane[1], plane[2], plane[3]));
    nibbles[pair * kLanes + lane] = make_uint2(words[0], words[1]);
  }
  if (lane == 0) {
    store_word(out, 4 * warp, make_warp_header(section.begin, zero_rows, patches.ksteps, patches.count));
    if (zero_rows) store_word(out, section.begin, weights.zero_rows);
  }
  if (warp == kWarps - 1) store_stage_end(out, section.end(), lane);
}

}  // namespace unweight::cuda
