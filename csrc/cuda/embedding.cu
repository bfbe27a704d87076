// Rows of tiled matrices. A CTA looks up one id at a time: its warps share the row's stages (raw and nibble, read by
// address) or segments (huffman, where all lanes of the warp that holds the row are decoded, since the place of a word
// depends on all of them). So the CTA knows when any part of the row is damaged, and makes all of it NaN.
//
// expects: UBLKCP
// hot loop: unweight_embedding_tiles 16 VOTE
// budget: unweight_embedding_tiles 6.5
#include "code_table.cuh"
#include "embedding_shared.h"
#include "ids.cuh"
#include "rows.cuh"

namespace unweight::cuda {
namespace {

// Where the copy of a section starts: at least 16 bytes of the stage are left, though a section may be empty.
static __device__ __forceinline__ uint32_t section_begin(WarpHeader header, uint32_t stage_bytes) {
  return min(header.section() / 16 * 16, stage_bytes - 16);
}

// One warp's sections of huffman stages in shared memory: it asks for a section while it decodes the one before.
struct SectionRing {
  uint32_t sections, barriers;
  uint32_t asked = 0, taken = 0;

  // Asks for the section of a stage; all lanes have read what the slot held.
  __device__ __forceinline__ void ask(const uint8_t* stage, uint32_t size, WarpHeader header, uint32_t lane) {
    const uint32_t begin = section_begin(header, size), slot = asked++ % kSectionSlots;
    copy_to_shared(sections + kSectionBytes * slot, stage + begin, min(size - begin, kSectionBytes),
                   barriers + 8 * slot, lane, ptx::evict_first_policy());
  }
  // Where the oldest one that was asked for is.
  __device__ __forceinline__ uint32_t take() {
    const uint32_t slot = taken % kSectionSlots, parity = taken / kSectionSlots & 1;
    taken++;
    wait_phase(barriers + 8 * slot, parity);
    return sections + kSectionBytes * slot;
  }
};

// A k-step of a row from the four lanes that hold it, to `to`: the lane's first weight there. `left` of them from there
// on are in the row.
static __device__ __forceinline__ void store_registers(const uint32_t (&registers)[kRegisters], uint32_t odd,
                                                       uint16_t* to, int left, bool aligned_4) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t weights = odd ? registers[2 * i + 1] : registers[2 * i];
    if (aligned_4) {
      if (8 * i < left) *reinterpret_cast<uint32_t*>(to + 8 * i) = weights;
    } else {
      if (8 * i < left) to[8 * i] = static_cast<uint16_t>(weights);
      if (8 * i + 1 < left) to[8 * i + 1] = static_cast<uint16_t>(weights >> 16);
    }
  }
}

// The row's part of one huffman stage, `columns` of it, to `out`. `section`: where the warp's section is in shared
// memory. Only lanes that hold the row load signs and store weights; all of them decode.
static __device__ __forceinline__ bool decode_stage_row(const uint8_t* stage, uint32_t size, WarpHeader header,
                                                        uint32_t section, const RowPlace& place, uint32_t table,
                                                        bool start, LaneStreams& streams, uint32_t lane, uint16_t* out,
                                                        uint32_t columns, bool aligned_4) {
  const bool holds = lane / 4 == place.first_lane / 4;
  const uint32_t begin = section_begin(header, size);
  Patches patches(section + header.section() - begin, header.patches());
  Words words{patches.end, section + min(size - begin, kSectionBytes) - 4};
  if (start) words.start(streams, lane);
  const auto lookup = [table](uint32_t x) { return ptx::load_shared(table + (x >> 24 << 2)); };
  const uint8_t* plane = stage + kStageHeaderBytes + kWarpPlaneBytes * place.warp + 16 * lane;
  uint16_t* to = out + 2 * (lane % 4);
  int left = static_cast<int>(columns) - 2 * static_cast<int>(lane % 4);
  uint32_t patched = header.patched_ksteps();
#pragma unroll 1
  for (int pair = 0; pair < kKSteps / 2; pair++, plane += kSignsStep, patched >>= 2) {
    const uint4 s = holds ? ptx::load_once(plane) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int odd = 0; odd < 2; odd++, to += kKStepColumns, left -= kKStepColumns) {
      uint32_t entries[kRegisters], registers[kRegisters];
      words.decode(streams.of[odd], lookup, entries);
      merge_entries(entries, odd ? s.z : s.x, odd ? s.w : s.y, registers);
      if (patched & (1 << odd)) patches.apply(lane, registers, [](uint32_t patch) { return patch; });
      if (holds) store_registers(registers, place.odd, to, left, aligned_4);
    }
  }
  return patches.fit();
}

// Stages [begin, end) of the row's block, a segment of at most 32. A lane checks a stage: so all of them are known to
// be sound before the first is decoded, and nothing waits for an index or a header any more.
static __device__ __forceinline__ RowFlaw read_segment(const Matrix& m, const RowPlace& place, uint32_t begin,
                                                       uint32_t end, uint32_t table, SectionRing& ring, uint32_t lane,
                                                       uint16_t* out, uint64_t columns) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const uint32_t count = end - begin, mine = place.first_stage + begin + min(lane, count - 1);
  const StageHead head(m, mine, place.warp);
  const uint32_t flawed = __ballot_sync(kAll, head.flaw != Flaw::kNone);
  if (flawed) {
    const int first = __ffs(flawed) - 1;
    return {static_cast<Flaw>(__shfl_sync(kAll, static_cast<uint32_t>(head.flaw), first)),
            __shfl_sync(kAll, head.place(mine, place.warp), first)};
  }
  const uint64_t address = reinterpret_cast<uint64_t>(head.bytes);
  const uint32_t size = static_cast<uint32_t>(min(head.size, uint64_t{1} << 20));  // what a section reaches is less
  const uint32_t coded = __ballot_sync(kAll, lane < count && !head.raw);
  const auto ask = [&](uint32_t i) {
    const auto* stage = reinterpret_cast<const uint8_t*>(__shfl_sync(kAll, address, i));
    const WarpHeader header{__shfl_sync(kAll, head.header.bits, i)};
    const uint32_t bytes = __shfl_sync(kAll, size, i);
    __syncwarp();
    ring.ask(stage, bytes, header, lane);
  };
  if (coded) ask(__ffs(coded) - 1);

  LaneStreams streams;
  bool start = true;
  RowFlaw flaw;
  for (uint32_t i = 0; i < count; i++) {
    const auto* stage = reinterpret_cast<const uint8_t*>(__shfl_sync(kAll, address, i));
    const uint32_t bytes = __shfl_sync(kAll, size, i);
    const WarpHeader header{__shfl_sync(kAll, head.header.bits, i)};
    const uint64_t column = uint64_t{begin + i} * kStageColumns;
    const uint32_t there = stage_columns(columns, column);
    if (!(coded >> i & 1)) {
      read_raw_row(stage, place, lane).store(out + column, there, columns % 4 == 0, lane);
      continue;
    }
    const uint32_t later = coded & ~((2u << i) - 1);
    if (later) ask(__ffs(later) - 1);
    const uint32_t section = ring.take();
    if (!decode_stage_row(stage, bytes, header, section, place, table, start, streams, lane, out + column, there,
                          columns % 2 == 0) &&
        flaw.flaw == Flaw::kNone)
      flaw = {Flaw::kPatches, warp_place(place.first_stage + begin + i, place.warp)};
    start = false;
  }
  return flaw;
}

// This warp's share of a row.
static __device__ __forceinline__ RowFlaw read_row(const Matrix& m, const RowPlace& place, uint32_t stages,
                                                   uint32_t table, SectionRing& ring, uint32_t warp, uint32_t lane,
                                                   uint16_t* out, uint64_t columns) {
  RowFlaw worst;
  if (m.layout == Layout::kHuffman) {
    for (uint32_t begin = warp * m.segment_stages; begin < stages; begin += kEmbeddingWarps * m.segment_stages) {
      const RowFlaw flaw =
          read_segment(m, place, begin, min(begin + m.segment_stages, stages), table, ring, lane, out, columns);
      if (flaw.flaw != Flaw::kNone && worst.flaw == Flaw::kNone) worst = flaw;
    }
    return worst;
  }
  for (uint32_t stage = warp; stage < stages; stage += kEmbeddingWarps) {
    StageRow row;
    const RowFlaw flaw = read_plain_stage(m, place, stage, lane, row);
    const uint64_t column = uint64_t{stage} * kStageColumns;
    if (flaw.flaw == Flaw::kNone)
      row.store(out + column, stage_columns(columns, column), columns % 4 == 0, lane);
    else if (worst.flaw == Flaw::kNone)
      worst = flaw;
  }
  return worst;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kEmbeddingThreads, kEmbeddingCtas)
    unweight_embedding_tiles(const __grid_constant__ EmbeddingArgument a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t shared = ptx::pinned(ptx::shared_address(memory)), warp = threadIdx.x / kLanes,
                 lane = threadIdx.x % kLanes;
  const uint64_t columns = a.packed.in_features;
  Matrix m;
  const Flaw flaw = open_matrix(a.packed, 0, m);
  if (flaw != Flaw::kNone && threadIdx.x == 0) report(a.status, flaw, 0, flaw_place(flaw, m));
  if (flaw == Flaw::kNone && m.layout == Layout::kArchive) return;  // unweight_embedding_archive does it
  const bool huffman = flaw == Flaw::kNone && m.layout == Layout::kHuffman;
  if (huffman) fill_table(m.bytes, 8, shared + kEmbeddingTableOffset, threadIdx.x, kEmbeddingThreads);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kEmbeddingWarps * kSectionSlots; i++) ptx::mbarrier_init(shared + 8 * i, kCopyArrivals);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  SectionRing ring{shared + kSectionOffset + warp * kSectionSlots * kSectionBytes, shared + 8 * kSectionSlots * warp};

  for (uint64_t i = blockIdx.x; i < a.count; i += gridDim.x) {
    const uint64_t id = row_id(a, i);
    auto* out = reinterpret_cast<uint16_t*>(a.out) + i * columns;
    bool good = flaw == Flaw::kNone && id < a.packed.out_features;
    if (good) {
      const RowFlaw found = read_row(m, RowPlace(id, a.packed.stages_per_block), a.packed.stages_per_block,
                                     shared + kEmbeddingTableOffset, ring, warp, lane, out, columns);
      good = found.flaw == Flaw::kNone;
      if (!good && lane == 0) report(a.status, found.flaw, 0, found.place);
    } else if (flaw == Flaw::kNone && threadIdx.x == 0) {
      report(a.status, Flaw::kId, 0, i);
    }
    if (__syncthreads_or(!good)) fill_row_with_nan(out, columns, threadIdx.x, kEmbeddingThreads);
  }
}

}  // namespace unweight::cuda
