// Stages that a product begins with, asked for before it is their turn, so that the memory has something to do while
// one kernel ends and the next one begins. Twice: by the kernel itself, while the one before is still running; and by
// that one, when it has copied all of its own, if it was told which weight comes next.
//
// Somebody may be writing that very weight. So what is read here (volatile: from the L2, not kept in an L1) only says
// where to prefetch, clamped to the weight, and all of it is read again behind griddepcontrol.wait. The L2 is where all
// of them meet: what is prefetched there and written later is what was written.
#pragma once
#include "../../format/code.h"
#include "ring.cuh"
#include "walk.cuh"

namespace unweight::cuda {

constexpr uint32_t kLineBytes = 128;
// So many stages does a hint ask for: what the memory can bring while one product ends and the next one begins, and not
// more than the L2 has room for.
constexpr uint32_t kHintedStages = 18;

// Header and code table of a matrix, in whole lines.
constexpr uint32_t kHeadLines = (kHeaderBytes + kCodeCountBytes + 2 * 256 + kLineBytes - 1) / kLineBytes;
constexpr uint32_t kHead = kHeadLines * kLineBytes;

// A matrix as far as it is needed here. All of its bytes may be anything.
struct FirstStages {
  const uint8_t* matrix;
  uint64_t bytes;
  uint32_t blocks, stages;  // stages of each block

  __device__ __forceinline__ const volatile Header& header() const {
    return *reinterpret_cast<const volatile Header*>(matrix);
  }

  // Asks the L2 for the head of the matrix and for the first stages of a CTA that has a chunk that begins in this
  // matrix, which is job 0 of `share`: kMost of them. One warp; a lane for each block of a group, others for lines of
  // the head. Returns where the lane will have to read first of all: an index entry, or a line of the head; or nullptr.
  template <class I, uint32_t kMost>
  __device__ __forceinline__ const void* prefetch(const WorkShare& share) const {
    constexpr uint32_t kGroup = I::kWarpgroups;
    if (bytes < kHead) return nullptr;
    const uint32_t lane = threadIdx.x % kLanes, line = kLanes - 1 - lane;
    if (line < kHeadLines) {
      ptx::prefetch(matrix + kLineBytes * line, kLineBytes);
      return matrix + kLineBytes * line;
    }
    const uint64_t index_at = header().index_offset, data_at = header().data_offset;
    const uint32_t length = header().segment_stages;
    if (length - 1 >= kLongestSegment || index_at % 4 || data_at % 16 || data_at > bytes) return nullptr;
    const WorkShape shape{blocks, stages, length, kGroup};
    uint32_t unit, units_end;
    share.units(0, shape, false, unit, units_end);
    if (unit >= units_end) share.units(0, shape, true, unit, units_end);
    if (unit >= units_end) return nullptr;
    const GroupWork group = take_group(shape, unit, units_end);
    // The blocks of the first segment. The L2 has no slots: of few blocks, more stages of each.
    const uint32_t segment = group.first_segment(), before = segment * group.width, from = group.begin - before;
    const uint32_t here = min(group.end - before, group.width) - from, block = from + lane;
    if (lane >= here) return nullptr;
    const uint32_t first = segment * length, behind = min(group.end_of(block) * length, stages);
    const uint32_t count = min(kMost / here, behind - first);
    const uint64_t entry = uint64_t{group.first_block + block} * stages + first;
    if (index_at > bytes || 4 * (entry + count + 1) > bytes - index_at) return nullptr;
    const auto* index = reinterpret_cast<const volatile uint32_t*>(matrix + index_at) + entry;
    const uint32_t begin = index[0], end = index[count];
    if (begin < end && end <= (bytes - data_at) / 16 && end - begin <= count * (I::kShared.stage_bytes / 16))
      ptx::prefetch(matrix + data_at + 16 * uint64_t{begin}, 16 * (end - begin));
    return const_cast<const uint32_t*>(index);
  }
};

// Heads of all experts, by all CTAs together: the kernel before may be about to say which of them have rows, and more
// isn't asked for of them. One warp.
static __device__ __forceinline__ void prefetch_heads(const LinearArgument& a) {
  const uint32_t line = threadIdx.x % kLanes;
#pragma unroll 1
  for (uint32_t i = 0; i < a.weight_count; i++) {
    const PackedArgument& packed = a.weights[i].packed;
    if (line >= kHeadLines || packed.matrix_bytes < kHead) continue;
#pragma unroll 1
    for (uint64_t matrix = blockIdx.x; matrix < packed.matrices; matrix += gridDim.x)
      ptx::prefetch(reinterpret_cast<const uint8_t*>(packed.packed + matrix * packed.matrix_bytes + line * kLineBytes),
                    kLineBytes);
  }
}

// The CTA's own, of the chunk that it has entered.
template <class I>
static __device__ __forceinline__ const void* prefetch_own(const LinearArgument& a, SharedWork work) {
  const uint32_t tiles = work.sheet_tiles(a);
  WorkShare share = work.share();
  if (a.offsets || share.first_job >= a.weight_count * tiles) return nullptr;
  const PackedArgument& packed = a.weights[share.first_job / tiles].packed;
  share.end_job -= share.first_job;
  share.first_job = 0;
  return FirstStages{reinterpret_cast<const uint8_t*>(packed.packed), packed.matrix_bytes, packed.blocks,
                     packed.stages_per_block}
      .template prefetch<I, I::kShared.slots * I::kWarpgroups>(share);
}

// Those of the weight that comes next, which a kernel of the same instance will multiply with as few tokens.
template <class I>
static __device__ __forceinline__ void prefetch_next(const LinearArgument& a) {
  if (!a.next || a.next_bytes < kHeaderBytes) return;
  FirstStages next{reinterpret_cast<const uint8_t*>(a.next), a.next_bytes};
  const uint64_t rows = next.header().out_features, columns = next.header().in_features;
  if (rows - 1 >= kMaxFeatures || columns - 1 >= kMaxFeatures) return;
  next.blocks = static_cast<uint32_t>((rows + kBlockRows - 1) / kBlockRows);
  next.stages = static_cast<uint32_t>((columns + kStageColumns - 1) / kStageColumns);
  const uint64_t cost = uint64_t{next.blocks} * next.stages;
  const uint32_t length = next.header().segment_stages;
  if (cost > kMaxStages || length - 1 >= kLongestSegment) return;
  const uint32_t chunks = tile_chunks(cost, length, a.multiprocessors);
#pragma unroll 1
  for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x)
    next.template prefetch<I, kHintedStages>(share_of(chunk, chunks, [=](uint32_t) { return cost; }, 1, 1));
}

}  // namespace unweight::cuda
