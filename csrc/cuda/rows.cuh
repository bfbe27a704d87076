// One row of a tiled matrix, straight from global memory: where it is in a stage, and stages of raw and nibble, in
// which nothing but the row is read. The twin of csrc/cpu/embedding.cpp.
#pragma once
#include "matrix.cuh"
#include "tiles.cuh"

namespace unweight::cuda {

// Four lanes of one warp hold a row of a stage, each in two of its registers: `odd` and `odd` + 2.
struct RowPlace {
  uint32_t first_stage, warp, row, first_lane, odd;

  __device__ __forceinline__ RowPlace(uint64_t id, uint32_t stages_per_block)
      : first_stage(static_cast<uint32_t>(id / kBlockRows) * stages_per_block),
        warp(id % kBlockRows / kWarpRows),
        row(id % kWarpRows),
        first_lane(row % 8 * 4),
        odd(row / 8) {}
};

// What is wrong with a row, or nothing.
struct RowFlaw {
  Flaw flaw = Flaw::kNone;
  uint64_t place = 0;
};

static __device__ __forceinline__ uint32_t load_word(const uint8_t* at) {
  return *reinterpret_cast<const uint32_t*>(at);
}

// The headers of a stage for one warp, checked.
struct StageHead {
  const uint8_t* bytes;
  uint64_t size;
  WarpHeader header;
  bool raw;
  Flaw flaw;

  __device__ __forceinline__ StageHead(const Matrix& m, uint32_t stage, uint32_t warp) {
    const Unit unit = unit_of(m, stage);
    bytes = m.bytes + unit.begin;
    size = unit.bytes;
    header = {0};
    raw = false;
    flaw = Flaw::kIndex;
    if (!unit.good || size < kHuffmanSections) return;
    header = {load_word(bytes + 4 * warp)};
    raw = WarpHeader{load_word(bytes)}.is_raw();
    const bool nibble = m.layout == Layout::kNibble;
    const uint32_t least = nibble ? kNibbleSections : kHuffmanSections;
    const uint32_t zero_rows = nibble && header.has_zero_rows();
    flaw = Flaw::kNone;
    if (raw ? size < kRawStageBytes : m.layout == Layout::kRaw)
      flaw = Flaw::kRawStage;
    else if (!raw && (header.section() < least || header.section() + 4 * (zero_rows + header.patches()) > size))
      flaw = Flaw::kSection;
  }
  __device__ __forceinline__ uint64_t place(uint32_t stage, uint32_t warp) const {
    return flaw == Flaw::kSection ? warp_place(stage, warp) : stage;
  }
};

// Columns of the stage that starts at `column` which the matrix has.
static __device__ __forceinline__ uint32_t stage_columns(uint64_t columns, uint64_t column) {
  return static_cast<uint32_t>(min(columns - column, uint64_t{kStageColumns}));
}

// A row of a stage over the lanes of a warp: lane 4k + q has k-step k's columns 2q, 2q + 1 and 8 columns further.
struct StageRow {
  uint32_t near, far;

  // To `out`, of which `columns` weights are there. Quads exchange, so that lanes store 8 bytes where rows allow it.
  __device__ __forceinline__ void store(uint16_t* out, uint32_t columns, bool aligned_8, uint32_t lane) const {
    const uint32_t quarter = lane % 4, at = lane / 4 * kKStepColumns;
    if (aligned_8) {
      const uint32_t from = (lane & ~3u) + 2 * quarter % 4;
      const uint32_t a = __shfl_sync(0xFFFFFFFFu, near, from), b = __shfl_sync(0xFFFFFFFFu, far, from);
      const uint32_t c = __shfl_sync(0xFFFFFFFFu, near, from + 1);
      const uint32_t d = __shfl_sync(0xFFFFFFFFu, far, from + 1);
      const uint32_t column = at + 4 * quarter;
      if (column < columns) *reinterpret_cast<uint2*>(out + column) = quarter < 2 ? make_uint2(a, c) : make_uint2(b, d);
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t column = at + 2 * quarter + 8 * i, weights = i ? far : near;
      if (column < columns) out[column] = static_cast<uint16_t>(weights);
      if (column + 1 < columns) out[column + 1] = static_cast<uint16_t>(weights >> 16);
    }
  }
};

static __device__ __forceinline__ StageRow read_raw_row(const uint8_t* stage, const RowPlace& place, uint32_t lane) {
  const uint32_t at = kStageHeaderBytes + kWarpRawBytes * place.warp + 512 * (lane / 4);
  const uint4 a = *reinterpret_cast<const uint4*>(stage + at + 16 * (place.first_lane + lane % 4));
  return {place.odd ? a.y : a.x, place.odd ? a.w : a.z};
}

// Number `rank` of the bits that are set in 8 bits; no bit's number where there are not so many.
static __device__ __forceinline__ uint32_t set_bit(uint32_t bits, uint32_t rank) {
  for (uint32_t i = 0; i < rank; i++) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// A lane a patch: each finds its k-step by the ends of k-steps before it. False if they and the header don't go
// together.
static __device__ __forceinline__ bool apply_row_patches(const uint8_t* patches, WarpHeader header,
                                                         const RowPlace& place, NibbleScale scale, uint32_t lane,
                                                         StageRow& row) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const uint32_t ksteps = header.patched_ksteps(), count = header.patches(), patched = __popc(ksteps);
  uint32_t done = 0;  // k-steps
  for (uint32_t first = 0; first < count; first += kLanes) {
    const bool mine = first + lane < count;
    const uint32_t patch = mine ? load_word(patches + 4 * (first + lane)) : 0;
    const uint32_t ends = __ballot_sync(kAll, mine && !(patch & kPatchContinues));
    const uint32_t rank = done + __popc(ends & ptx::lanes_before());
    done += __popc(ends);
    const uint32_t holder = patch_place(patch) / kRegisters, reg = patch_place(patch) % kRegisters;
    const bool here = mine && holder / 4 == place.first_lane / 4 && reg % 2 == place.odd;
    const uint32_t target = here ? 4 * set_bit(ksteps, rank) + holder % 4 : 0;
    for (uint32_t left = __ballot_sync(kAll, here); left; left &= left - 1) {
      const uint32_t from = __ffs(left) - 1, to = __shfl_sync(kAll, target, from);
      const uint32_t found = __shfl_sync(kAll, patch, from), exponents = scale.patch_exponents(found);
      const bool far = patch_place(found) / 2 % 2;
      if (lane == to && !far) row.near = select_bits(kExponentBits, exponents, row.near);
      if (lane == to && far) row.far = select_bits(kExponentBits, exponents, row.far);
    }
  }
  return done == patched;
}

// False if the patches are bad.
static __device__ __forceinline__ bool read_nibble_row(const StageHead& stage, const RowPlace& place, NibbleScale scale,
                                                       uint32_t lane, StageRow& row) {
  const uint8_t* section = stage.bytes + stage.header.section();
  if (stage.header.has_zero_rows()) {
    if (load_word(section) >> place.row & 1) {
      row = {0, 0};
      return true;
    }
    section += 4;
  }
  const uint32_t k = lane / 4, holder = place.first_lane + lane % 4;
  const uint2 s = *reinterpret_cast<const uint2*>(stage.bytes + kStageHeaderBytes + kWarpPlaneBytes * place.warp +
                                                  512 * (k / 2) + 16 * holder + 8 * (k % 2));
  const uint32_t n = load_word(stage.bytes + kHuffmanSections + kWarpNibbleBytes * place.warp + 256 * (k / 2) +
                               8 * holder + 4 * (k % 2));
  uint32_t registers[kRegisters];
  decode_nibbles(n, s.x, s.y, registers);
  row.near = scale.unscale(place.odd ? registers[1] : registers[0]);
  row.far = scale.unscale(place.odd ? registers[3] : registers[2]);
  return stage.header.patches() + stage.header.patched_ksteps() == 0 ||
         apply_row_patches(section, stage.header, place, scale, lane, row);
}

// Stage `stage` of the row's block, of a raw or nibble matrix.
static __device__ __forceinline__ RowFlaw read_plain_stage(const Matrix& m, const RowPlace& place, uint32_t stage,
                                                           uint32_t lane, StageRow& row) {
  const uint32_t number = place.first_stage + stage;
  const StageHead head(m, number, place.warp);
  if (head.flaw != Flaw::kNone) return {head.flaw, head.place(number, place.warp)};
  if (head.raw)
    row = read_raw_row(head.bytes, place, lane);
  else if (!read_nibble_row(head, place, NibbleScale(m.nibble_base), lane, row))
    return {Flaw::kPatches, warp_place(number, place.warp)};
  return {};
}

}  // namespace unweight::cuda
