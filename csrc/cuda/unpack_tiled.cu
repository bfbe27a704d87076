// Unpacks the tiled layouts (raw, huffman, nibble).
//
// A CTA decodes one run of stages of one block and ends: 8 to 32 stages are 0.2 to 0.9 MB of traffic, beside which its
// start (a table, the header's checks) is small, and hidden by the multiprocessor's other CTAs. No persistent loop, no
// scheduler. Checksums are added up on the way: the bytes are in shared memory anyhow, a pass of their own would cost
// 40 % more traffic. The output is as good as its checksum: nobody uses it before the status was read.
//
// expects: UBLKCP
// hot loop: unweight_unpack_huffman 16
// hot loop: unweight_unpack_nibble 16
// hot loop: unweight_unpack_raw 64
// hot loop: unweight_unpack_tiles 16 VOTE
// budget: unweight_unpack_huffman 5.75
// budget: unweight_unpack_nibble 4.0
// budget: unweight_unpack_raw 4.5
// budget: unweight_unpack_tiles 5.75
#include "checksum.cuh"
#include "code_table.cuh"
#include "matrix.cuh"
#include "tiles.cuh"
#include "unpack_shared.h"

namespace unweight::cuda {
namespace {

constexpr int kAny = -1;

// What a CTA decodes. Streams start afresh at multiples of the header's segment, so runs do as well: whoever's run a
// segment starts in has it whole. (Mostly, run and segment are the same.)
struct Run {
  uint32_t matrix, block, begin, end;  // stages of the block

  __device__ __forceinline__ Run(const UnpackArgument& a) {
    const uint32_t blocks = static_cast<uint32_t>((a.rows + kBlockRows - 1) / kBlockRows);
    const uint32_t runs = (a.packed.stages_per_block + a.run_stages - 1) / a.run_stages;
    begin = blockIdx.x % runs * a.run_stages;
    const uint32_t unit = blockIdx.x / runs;
    block = unit % blocks + static_cast<uint32_t>(a.first_row / kBlockRows);
    matrix = unit / blocks;
    end = begin + a.run_stages;
  }
  __device__ __forceinline__ void fit_to_segments(uint32_t segment, uint32_t stages) {
    begin = (begin + segment - 1) / segment * segment;
    end = min((end + segment - 1) / segment * segment, stages);
  }
};

struct Ring {
  uint32_t shared;
  uint32_t slot = 0, phase = 0;

  __device__ __forceinline__ uint32_t full() const { return shared + kFullOffset + 8 * slot; }
  __device__ __forceinline__ uint32_t empty() const { return shared + kEmptyOffset + 8 * slot; }
  __device__ __forceinline__ uint32_t length() const { return shared + kLengthOffset + 4 * slot; }
  __device__ __forceinline__ uint32_t bytes() const { return shared + kRingOffset + kSlotBytes * slot; }
  __device__ __forceinline__ void next() {
    slot = slot + 1 == kRingSlots ? 0 : slot + 1;
    phase ^= slot == 0;
  }
};

// The producer warp: one copy a stage. A stage that doesn't fit the data or a slot is handed over with length 0,
// and is the last.
static __device__ void copy_stages(const UnpackArgument& a, const Matrix& m, const Run& run, uint32_t lane, Ring ring) {
  const uint64_t policy = ptx::evict_first_policy();
  const uint32_t first = run.block * a.packed.stages_per_block;
  for (uint32_t batch = run.begin; batch < run.end; batch += kLanes) {
    Unit mine{0, 0, false};
    if (batch + lane < run.end) mine = unit_of(m, first + batch + lane);
    if (mine.bytes < kHuffmanSections || mine.bytes > kSlotBytes) mine.good = false;
    const uint32_t length = mine.good ? static_cast<uint32_t>(mine.bytes) : 0;
    const uint32_t count = min(static_cast<uint32_t>(kLanes), run.end - batch);
    for (uint32_t i = 0; i < count; i++, ring.next()) {
      const uint32_t bytes = __shfl_sync(0xFFFFFFFFu, length, i);
      const uint64_t begin = __shfl_sync(0xFFFFFFFFu, mine.begin, i);
      wait_phase(ring.empty(), ring.phase ^ 1);
      if (lane == 0) {
        ptx::store_shared(ring.length(), bytes);
        if (bytes == 0) report(a.status, Flaw::kIndex, run.matrix, first + batch + i);
      }
      copy_to_shared(ring.bytes(), m.bytes + begin, bytes, ring.full(), lane, policy);
      if (bytes == 0) return;
    }
  }
}

template <int kLayout>
static __device__ void decode_stages(const UnpackArgument& a, const Matrix& m, const Run& run, uint32_t warp,
                                     uint32_t lane, Ring ring) {
  const Layout layout = kLayout == kAny ? m.layout : static_cast<Layout>(kLayout);
  const uint32_t first = run.block * a.packed.stages_per_block, tile = ring.shared + kTileOffset + kTileBytes * warp;
  const uint64_t columns = a.packed.in_features, row = uint64_t{run.block} * kBlockRows + kWarpRows * warp;
  const uint64_t rows_end = a.first_row + a.rows;
  const uint32_t rows = row < rows_end ? static_cast<uint32_t>(min(rows_end - row, uint64_t{kWarpRows})) : 0;
  auto* out = reinterpret_cast<uint16_t*>(a.out) + (run.matrix * a.rows + row - a.first_row) * columns;

  uint64_t sum = 0;
  uint64_t word = 4 * uint64_t{m.index[first + run.begin] - m.index[first]};  // of the block
  LaneStreams streams;
  bool start = true;
  for (uint32_t stage = run.begin; stage < run.end; stage++, ring.next()) {
    wait_phase(ring.full(), ring.phase);
    const uint32_t bytes = ptx::load_shared(ring.length());
    if (bytes == 0) break;
    if (a.sums.sums) {
      PartialSum part;
      for (uint32_t i = kLanes * warp + lane; i < bytes / 16; i += kLanes * kWarps)
        part.add(ptx::load_shared_quad(ring.bytes() + 16 * i), 4 * i);
      sum += part.at(word);
      word += bytes / 4;
    }

    const WarpStage packed(ring.bytes(), bytes, warp, lane);
    Flaw flaw = Flaw::kNone;
    if (stage % m.segment_stages == 0) start = true;
    if (packed.raw()) {
      if (bytes >= kRawStageBytes)
        decode_raw(packed, tile);
      else
        flaw = Flaw::kRawStage;
    } else if (layout == Layout::kRaw) {
      flaw = Flaw::kRawStage;
    } else if (layout == Layout::kNibble) {
      if (!packed.sections_fit(kNibbleSections, packed.header.has_zero_rows()))
        flaw = Flaw::kSection;
      else if (!decode_nibble(packed, NibbleScale(m.nibble_base), tile))
        flaw = Flaw::kPatches;
    } else if (layout == Layout::kHuffman) {
      if (!packed.sections_fit(kHuffmanSections, false))
        flaw = Flaw::kSection;
      else if (!decode_huffman(packed, ring.shared + kTableOffset, start, streams, tile))
        flaw = Flaw::kPatches;
      start = false;
    }
    __syncwarp();  // the stage is read, and the tile is written
    if (lane == 0) {
      ptx::mbarrier_arrive(ring.empty());
      if (flaw == Flaw::kRawStage)
        report(a.status, flaw, run.matrix, first + stage);
      else if (flaw != Flaw::kNone)
        report(a.status, flaw, run.matrix, warp_place(first + stage, warp));
    }

    if (a.out && flaw == Flaw::kNone) {
      const uint64_t column = uint64_t{stage} * kStageColumns;
      const uint32_t there = static_cast<uint32_t>(min(columns - column, uint64_t{kStageColumns}));
      if (columns % 8 == 0)
        store_tile<uint4>(tile, lane, out + column, columns, rows, there);
      else if (columns % 2 == 0)
        store_tile<uint32_t>(tile, lane, out + column, columns, rows, there);
      else
        store_tile<uint16_t>(tile, lane, out + column, columns, rows, there);
    }
    __syncwarp();  // the tile is read
  }
  if (a.sums.sums) add_warp_sum(block_sum(a.packed, a.sums, run.matrix, run.block), sum);
}

template <int kLayout>
static __device__ __forceinline__ void unpack_tiled(const UnpackArgument& a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  Run run(a);
  Matrix m;
  const Flaw flaw = open_matrix(a.packed, run.matrix, m);
  if (flaw != Flaw::kNone) {
    if (threadIdx.x == 0) report(a.status, flaw, run.matrix, flaw_place(flaw, m));
    return;
  }
  if (kLayout == kAny && m.layout == Layout::kArchive) return;  // unweight_unpack_archive does it
  run.fit_to_segments(m.segment_stages, a.packed.stages_per_block);
  if (run.begin >= run.end) return;

  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kRingSlots; i++) {
      ptx::mbarrier_init(shared + kFullOffset + 8 * i, kCopyArrivals);
      ptx::mbarrier_init(shared + kEmptyOffset + 8 * i, kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if (kLayout == static_cast<int>(Layout::kHuffman) || (kLayout == kAny && m.layout == Layout::kHuffman))
    fill_banked_table(m.bytes, shared + kTableOffset, threadIdx.x, kUnpackThreads);
  __syncthreads();

  if (warp == kWarps)
    copy_stages(a, m, run, lane, Ring{shared});
  else
    decode_stages<kLayout>(a, m, run, warp, lane, Ring{shared});
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kUnpackThreads, 3)
    unweight_unpack_raw(const __grid_constant__ UnpackArgument argument) {
  unpack_tiled<static_cast<int>(Layout::kRaw)>(argument);
}

extern "C" __global__ void __launch_bounds__(kUnpackThreads, 3)
    unweight_unpack_nibble(const __grid_constant__ UnpackArgument argument) {
  unpack_tiled<static_cast<int>(Layout::kNibble)>(argument);
}

extern "C" __global__ void __launch_bounds__(kUnpackThreads, 2)
    unweight_unpack_huffman(const __grid_constant__ UnpackArgument argument) {
  unpack_tiled<static_cast<int>(Layout::kHuffman)>(argument);
}

// The caller doesn't know the layout: all of them, with the resources of the largest.
extern "C" __global__ void __launch_bounds__(kUnpackThreads, 2)
    unweight_unpack_tiles(const __grid_constant__ UnpackArgument argument) {
  unpack_tiled<kAny>(argument);
}

}  // namespace unweight::cuda
