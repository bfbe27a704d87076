// What a CTA reads first, asked for while the kernel before is still running: the table and the first stages of its
// first blocks are in the L2 when the copies begin.
//
// The kernel before may be writing that very weight. So what is read here (volatile: from the L2, not kept in an L1)
// only says where to prefetch, clamped to the weight, and all of it is read again behind griddepcontrol.wait. The L2 is
// where all of them meet: what is prefetched there and written later is what was written.
#pragma once
#include "../../format/code.h"
#include "ring.cuh"
#include "walk.cuh"

namespace unweight::cuda {

// One warp; lane `slot * warpgroups + block` asks for a stage. Nothing for experts: the kernel before may have decided
// which of them have rows.
template <class I>
static __device__ __forceinline__ void prefetch_first_stages(const LinearArgument& a) {
  constexpr uint32_t kGroup = I::kWarpgroups, kHead = (kHeaderBytes + kCodeCountBytes + 2 * 256 + 15) / 16 * 16;
  static_assert(I::kShared.slots * kGroup < kLanes, "a lane a stage, and one for the header");
  if (a.offsets) return;
  const uint32_t chunk = chunk_of(blockIdx.x, gridDim.x, 0, a.chunks);
  if (chunk == kNoChunk) return;
  const uint32_t tiles = a.tile_sheets ? 1 : ceil_quotient(a.tokens, I::kN);
  const WorkShare share = share_of(chunk, a.chunks, Costs{a}, a.weight_count, tiles);
  const uint32_t weight = share.first_job / tiles, lane = threadIdx.x % kLanes;
  if (weight >= a.weight_count) return;
  const PackedArgument& packed = a.weights[weight].packed;
  const uint64_t bytes = packed.matrix_bytes;
  const auto* matrix = reinterpret_cast<const uint8_t*>(packed.packed);
  if (bytes < kHead) return;
  if (lane == kLanes - 1) ptx::prefetch(matrix, kHead);

  const auto& header = *reinterpret_cast<const volatile Header*>(matrix);
  const uint64_t index_at = header.index_offset, data_at = header.data_offset;
  const uint32_t length = header.segment_stages;
  if (length - 1 >= kLongestSegment || index_at % 4 || data_at % 16 || data_at > bytes) return;
  const WorkShape shape{packed.blocks, packed.stages_per_block, length, kGroup};
  uint32_t unit = share.units_begin(share.first_job, shape);
  if (unit >= shape.units()) return;
  const GroupWork group = take_group(shape, unit, shape.units());
  const uint32_t block = lane % kGroup, stage = lane / kGroup, segment = group.first_segment();
  if (stage >= min(I::kShared.slots, shape.stages_of(segment))) return;
  if (segment < group.begin_of(block) || segment >= group.end_of(block)) return;
  const uint64_t entry = uint64_t{group.group * kGroup + block} * shape.stages + segment * shape.segment_stages + stage;
  if (index_at > bytes || 4 * (entry + 2) > bytes - index_at) return;
  const auto* index = reinterpret_cast<const volatile uint32_t*>(matrix + index_at) + entry;
  const uint32_t begin = index[0], end = index[1];
  if (begin >= end || end > (bytes - data_at) / 16 || end - begin > I::kShared.stage_bytes / 16) return;
  ptx::prefetch(matrix + data_at + 16 * uint64_t{begin}, 16 * (end - begin));
}

}  // namespace unweight::cuda
