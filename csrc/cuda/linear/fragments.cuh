// One warp's part of a stage in shared memory -> its lanes' A registers, four k-steps at a time (docs/FORMAT.md
// sections 5 to 7). Nothing is read outside the stage, whatever its bytes are.
#pragma once
#include "../tiles.cuh"

namespace unweight::cuda {

constexpr int kBatchKSteps = 4;  // k-steps that are decoded and then multiplied together
constexpr int kBatches = kKSteps / kBatchKSteps;

// A lane's A registers of a batch.
using Batch = uint32_t[kBatchKSteps][kRegisters];

static __device__ __forceinline__ void clear(Batch& a) {
#pragma unroll
  for (auto& registers : a)
#pragma unroll
    for (uint32_t& r : registers) r = 0;
}

// The batches of one stage, in order; the same for all lanes: whether the stage can be read. A warp whose part can't be
// gets zeros.
template <Layout kLayout>
struct Fragments;

template <>
struct Fragments<Layout::kRaw> {
  uint32_t from;
  bool good;

  __device__ __forceinline__ Fragments(const WarpStage& stage, uint32_t, bool&, LaneStreams&)
      : from(stage.address + kStageHeaderBytes + kWarpRawBytes * stage.warp + 16 * stage.lane),
        good(stage.bytes >= kRawStageBytes && stage.raw()) {}

  template <int kBatch>
  __device__ __forceinline__ void decode(Batch& a) {
    if (!good) return clear(a);
#pragma unroll
    for (int k = 0; k < kBatchKSteps; k++) {
      const uint4 r = ptx::load_shared_quad(from + 512 * (kBatchKSteps * kBatch + k));
      a[k][0] = r.x, a[k][1] = r.y, a[k][2] = r.z, a[k][3] = r.w;
    }
  }
  __device__ __forceinline__ bool fit() const { return good; }
};

template <>
struct Fragments<Layout::kNibble> {
  uint32_t signs, codes, lane;
  bool good;
  uint32_t patched;              // a bit a k-step
  uint32_t keep_even, keep_odd;  // 0 where the lane's row is zero: of registers 0 and 2, of 1 and 3
  Patches patches{0, 0};

  __device__ __forceinline__ Fragments(const WarpStage& stage, uint32_t, bool&, LaneStreams&)
      : signs(stage.signs()),
        codes(stage.address + kHuffmanSections + kWarpNibbleBytes * stage.warp + 8 * stage.lane),
        lane(stage.lane),
        good(stage.bytes >= kNibbleSections) {
    good = good && !stage.raw() && stage.sections_fit(kNibbleSections, stage.header.has_zero_rows());
    uint32_t section = stage.address + stage.header.section(), zeros = 0;
    if (good && stage.header.has_zero_rows()) {
      zeros = ptx::load_shared(section) >> stage.lane / 4;
      section += 4;
    }
    keep_even = zeros & 1 ? 0 : ~0u, keep_odd = zeros >> 8 & 1 ? 0 : ~0u;
    patches = Patches(section, stage.header.patches());
    patched = stage.header.patched_ksteps();
  }

  template <int kBatch>
  __device__ __forceinline__ void decode(Batch& a) {
    if (!good) return clear(a);
#pragma unroll
    for (int pair = 0; pair < kBatchKSteps / 2; pair++) {
      constexpr int kPairs = kBatchKSteps / 2;
      const uint4 s = ptx::load_shared_quad(signs + kSignsStep * (kPairs * kBatch + pair));
      const uint2 n = ptx::load_shared_pair(codes + kNibblesStep * (kPairs * kBatch + pair));
      decode_nibbles(n.x, s.x, s.y, a[2 * pair]);
      decode_nibbles(n.y, s.z, s.w, a[2 * pair + 1]);
    }
#pragma unroll
    for (int k = 0; k < kBatchKSteps; k++) {
#pragma unroll
      for (int i = 0; i < kRegisters; i++) a[k][i] &= i & 1 ? keep_odd : keep_even;
      if (patched & 1 << (kBatchKSteps * kBatch + k)) patches.apply(lane, a[k], [](uint32_t patch) { return patch; });
    }
  }
  __device__ __forceinline__ bool fit() const { return good && patches.fit(); }
};

template <>
struct Fragments<Layout::kHuffman> {
  uint32_t signs, raw_from, column, lane, patched;
  bool raw, good;
  LaneStreams& streams;
  Patches patches{0, 0};
  Words words{0, 0};

  __device__ __forceinline__ Fragments(const WarpStage& stage, uint32_t table, bool& start, LaneStreams& streams)
      : signs(stage.signs()),
        raw_from(stage.address + kStageHeaderBytes + kWarpRawBytes * stage.warp + 16 * stage.lane),
        column(table + 4 * stage.lane),
        lane(stage.lane),
        patched(stage.header.patched_ksteps()),
        raw(stage.raw()),
        streams(streams) {
    good = raw ? stage.bytes >= kRawStageBytes
               : stage.bytes >= kHuffmanSections && stage.sections_fit(kHuffmanSections, false);
    patches = Patches(stage.address + stage.header.section(), stage.header.patches());
    words = Words{patches.end, stage.address + stage.bytes - 4};
    if (good && !raw && start) {
      words.start(streams, lane);
      start = false;
    }
  }

  template <int kBatch>
  __device__ __forceinline__ void decode(Batch& a) {
    if (!good) return clear(a);
    if (raw) {
#pragma unroll
      for (int k = 0; k < kBatchKSteps; k++) {
        const uint4 r = ptx::load_shared_quad(raw_from + 512 * (kBatchKSteps * kBatch + k));
        a[k][0] = r.x, a[k][1] = r.y, a[k][2] = r.z, a[k][3] = r.w;
      }
      return;
    }
    const uint32_t from = column;
    const auto lookup = [from](uint32_t x) { return ptx::load_shared(dot4(x, 0x80000000u, from)); };
#pragma unroll
    for (int pair = 0; pair < kBatchKSteps / 2; pair++) {
      const uint4 s = ptx::load_shared_quad(signs + kSignsStep * (kBatchKSteps / 2 * kBatch + pair));
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int k = 2 * pair + odd;
        uint32_t entries[kRegisters];
        words.decode(streams.of[odd], lookup, entries);
        merge_entries(entries, odd ? s.z : s.x, odd ? s.w : s.y, a[k]);
        if (patched & 1 << (kBatchKSteps * kBatch + k)) patches.apply(lane, a[k], [](uint32_t patch) { return patch; });
      }
    }
  }
  __device__ __forceinline__ bool fit() const { return good && (raw || patches.fit()); }
};

}  // namespace unweight::cuda
