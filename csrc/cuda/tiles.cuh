// One warp's part of a stage in shared memory -> its 16 rows of 128 weights (docs/FORMAT.md sections 5 to 7). Nothing
// is read outside the stage, whatever its bytes are.
#pragma once
#include "decode/huffman.cuh"
#include "decode/nibble.cuh"
#include "staging.cuh"

namespace unweight::cuda {

// A stage in shared memory, as one lane of one warp sees it.
struct WarpStage {
  uint32_t address, bytes;
  uint32_t warp, lane;
  WarpHeader header;

  __device__ __forceinline__ WarpStage(uint32_t address, uint32_t bytes, uint32_t warp, uint32_t lane)
      : address(address), bytes(bytes), warp(warp), lane(lane), header{ptx::load_shared(address + 4 * warp)} {}

  // The stage's first warp says it for all.
  __device__ __forceinline__ bool raw() const { return WarpHeader{ptx::load_shared(address)}.is_raw(); }
  __device__ __forceinline__ bool sections_fit(uint32_t least, bool zero_rows) const {
    return header.section() >= least && header.section() + 4 * (zero_rows + header.patches()) <= bytes;
  }
  // The lane's signs and mantissas of the first two k-steps; kSignsStep further those of the next two.
  __device__ __forceinline__ uint32_t signs() const {
    return address + kStageHeaderBytes + kWarpPlaneBytes * warp + 16 * lane;
  }
};

constexpr uint32_t kKStepBytes = 2 * kKStepColumns, kSignsStep = 16 * kLanes, kNibblesStep = 8 * kLanes;

// Patches of a warp's stage, in the order of k-steps.
struct Patches {
  uint32_t next, end;  // in shared memory
  uint32_t bad = 0;    // they and the header's k-steps don't go together

  __device__ __forceinline__ Patches(uint32_t next, uint32_t count) : next(next), end(next + 4 * count) {}

  // Those of one k-step: `exponents(patch)` gives the register's exponent bits. Ends: each round moves on.
  template <class Exponents>
  __device__ __forceinline__ void apply(uint32_t lane, uint32_t (&registers)[kRegisters], Exponents exponents) {
    uint32_t patch;
    do {
      if (next >= end) {
        bad = 1;
        return;
      }
      patch = ptx::load_shared(next);
      next += 4;
      const uint32_t e = exponents(patch), place = patch_place(patch) - kRegisters * lane;
#pragma unroll
      for (uint32_t i = 0; i < kRegisters; i++)
        if (place == i) registers[i] = select_bits(kExponentBits, e, registers[i]);
    } while (patch & kPatchContinues);
  }
  __device__ __forceinline__ bool fit() const { return !bad && next == end; }
};

static __device__ __forceinline__ void decode_raw(const WarpStage& stage, uint32_t tile) {
  const uint32_t from = stage.address + kStageHeaderBytes + kWarpRawBytes * stage.warp + 16 * stage.lane;
  const uint32_t to = matrix_row(tile, stage.lane);
#pragma unroll
  for (int k = 0; k < kKSteps; k++) {
    const uint4 a = ptx::load_shared_quad(from + 512 * k);
    const uint32_t registers[kRegisters] = {a.x, a.y, a.z, a.w};
    store_kstep(to + kKStepBytes * k, registers);
  }
}

// Takes nibble's scale off the exponents: both fields at once, since none leaves 1…254 (docs/FORMAT.md section 6).
struct NibbleScale {
  uint32_t delta;  // base - 112

  __device__ __forceinline__ explicit NibbleScale(uint32_t base) : delta(base - kNibbleScaledBase) {}
  __device__ __forceinline__ uint32_t unscale(uint32_t weights) const { return weights + delta * 0x00800080u; }
  // Of a patch, where 0 and 255 are as they are.
  __device__ __forceinline__ uint32_t patch_exponents(uint32_t patch) const {
    uint32_t first = patch >> 7 & 255, second = patch >> 23 & 255;
    first = first == 0 || first == 255 ? first : first + delta & 255;
    second = second == 0 || second == 255 ? second : second + delta & 255;
    return first << 7 | second << 23;
  }
};

// False if the patches are bad. sections_fit(kNibbleSections) holds.
static __device__ __forceinline__ bool decode_nibble(const WarpStage& stage, NibbleScale scale, uint32_t tile) {
  uint32_t section = stage.address + stage.header.section(), zeros = 0;
  if (stage.header.has_zero_rows()) {
    zeros = ptx::load_shared(section) >> stage.lane / 4;
    section += 4;
  }
  // Registers 0 and 2 lie in one row, 1 and 3 eight rows below.
  const uint32_t keep_even = zeros & 1 ? 0 : ~0u, keep_odd = zeros >> 8 & 1 ? 0 : ~0u;
  Patches patches(section, stage.header.patches());
  uint32_t codes = ptx::pinned(stage.address + kHuffmanSections + kWarpNibbleBytes * stage.warp + 8 * stage.lane);
  uint32_t signs = ptx::pinned(stage.signs()), to = ptx::pinned(matrix_row(tile, stage.lane));
  const uint32_t end = to + kKSteps * kKStepBytes;
#pragma unroll 1
  for (uint32_t patched = stage.header.patched_ksteps(); to != end; patched >>= 2) {
    const uint4 s = ptx::load_shared_quad(signs);
    const uint2 n = ptx::load_shared_pair(codes);
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      uint32_t registers[kRegisters];
      decode_nibbles(odd ? n.y : n.x, odd ? s.z : s.x, odd ? s.w : s.y, registers);
#pragma unroll
      for (int i = 0; i < kRegisters; i++) registers[i] = scale.unscale(registers[i]) & (i & 1 ? keep_odd : keep_even);
      if (patched & (1 << odd))
        patches.apply(stage.lane, registers, [&](uint32_t patch) { return scale.patch_exponents(patch); });
      store_kstep(to + kKStepBytes * odd, registers);
    }
    signs += kSignsStep;
    codes += kNibblesStep;
    to += 2 * kKStepBytes;
  }
  return patches.fit();
}

// A lane's two streams: the codes of even and of odd k-steps.
struct LaneStreams {
  BitStream of[2] = {{0, 0, 0}, {0, 0, 0}};
};

// The words of a warp's stage in shared memory, as its lanes take them.
struct Words {
  uint32_t next;  // the same in all lanes
  uint32_t last;  // words that no code needs may be missing at the end of a segment: this one stands for them
  uint32_t before = ptx::lanes_before();

  __device__ __forceinline__ uint32_t at(uint32_t address) const { return ptx::load_shared(min(address, last)); }

  __device__ __forceinline__ void start(LaneStreams& streams, uint32_t lane) {
#pragma unroll
    for (BitStream& stream : streams.of) {
      stream = {at(next + 4 * lane), at(next + 4 * (kLanes + lane)), 0};
      next += 8 * kLanes;
    }
  }
  // The four entries of a k-step; all lanes call it.
  template <class Lookup>
  __device__ __forceinline__ void decode(BitStream& stream, Lookup lookup, uint32_t (&entries)[kRegisters]) {
    const uint32_t takes = decode_four_codes(stream, lookup, entries);
    const uint32_t takers = ptx::ballot(takes);
    // Loaded by all lanes: a branch around it costs more than the load.
    const uint32_t fresh = at(next + 4 * __popc(takers & before));
    next += 4 * __popc(takers);
    if (takes) refill(stream, fresh);
  }
};

// False if the patches are bad. sections_fit(kHuffmanSections) holds. `table`: fill_banked_table. `start`: the streams
// start in this stage.
static __device__ __forceinline__ bool decode_huffman(const WarpStage& stage, uint32_t table, bool start,
                                                      LaneStreams& streams, uint32_t tile) {
  Patches patches(stage.address + stage.header.section(), stage.header.patches());
  Words words{patches.end, stage.address + stage.bytes - 4};
  if (start) words.start(streams, stage.lane);
  uint32_t signs = ptx::pinned(stage.signs()), to = ptx::pinned(matrix_row(tile, stage.lane));
  const uint32_t column = ptx::pinned(table + 4 * stage.lane), end = to + kKSteps * kKStepBytes;
  const auto lookup = [column](uint32_t x) { return ptx::load_shared(dot4(x, 0x80000000u, column)); };
#pragma unroll 1
  for (uint32_t patched = stage.header.patched_ksteps(); to != end; patched >>= 2) {
    const uint4 s = ptx::load_shared_quad(signs);
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      uint32_t entries[kRegisters], registers[kRegisters];
      words.decode(streams.of[odd], lookup, entries);
      merge_entries(entries, odd ? s.z : s.x, odd ? s.w : s.y, registers);
      if (patched & (1 << odd)) patches.apply(stage.lane, registers, [](uint32_t patch) { return patch; });
      store_kstep(to + kKStepBytes * odd, registers);
    }
    signs += kSignsStep;
    to += 2 * kKStepBytes;
  }
  return patches.fit();
}

// A decoded tile to `out`, its place in the output: `rows` and `columns` of it are there. `Piece` is the widest type
// that every row of the output is aligned to.
template <class Piece>
static __device__ __forceinline__ void store_tile(uint32_t tile, uint32_t lane, uint16_t* out, uint64_t out_columns,
                                                  uint32_t rows, uint32_t columns) {
  constexpr uint32_t kWeights = sizeof(Piece) / 2, kPieces = kStageColumns / kWeights;
  constexpr int kUnroll = sizeof(Piece) == 16 ? 8 : 2;  // rows that 16 bytes don't fit are rare: short code
#pragma unroll kUnroll
  for (uint32_t i = lane; i < kWarpRows * kPieces; i += kLanes) {
    const uint32_t row = i / kPieces, column = i % kPieces * kWeights, from = tile + row * kTilePitch + 2 * column;
    if (row < rows && column < columns) {
      auto* to = reinterpret_cast<Piece*>(out + row * out_columns + column);
      if constexpr (sizeof(Piece) == 16)
        __stcs(to, ptx::load_shared_quad(from));
      else if constexpr (sizeof(Piece) == 4)
        *to = ptx::load_shared(from);
      else
        *to = static_cast<uint16_t>(ptx::load_shared_half(from));
    }
  }
}

}  // namespace unweight::cuda
