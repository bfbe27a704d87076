// The copying warpgroup: one warp fetches weights, three fetch activations. They go as far ahead as the ring has slots.
#pragma once
#include "ring.cuh"
#include "walk.cuh"

namespace unweight::cuda {

// What is left of a group for the second launch, from the only thread that writes records.
template <class I>
struct Records {
  PieceRecord* records;  // of this CTA
  uint32_t there = 0;    // a bit a record

  __device__ __forceinline__ explicit Records(const LinearArgument& a)
      : records(reinterpret_cast<PieceRecord*>(a.records) + 2 * blockIdx.x) {}

  __device__ __forceinline__ void add(const Job& job, const GroupWork& group, bool first) {
    if (group.whole(job.shape)) return;
    PieceRecord& r = records[!first];
    r.weight = job.weight;
    r.matrix = job.tile.matrix;
    r.first_token = job.tile.first_token;
    r.tokens = job.tile.tokens;
    r.group = group.group;
    r.segments = job.shape.segments();
#pragma unroll
    for (uint32_t b = 0; b < 4; b++) r.begin[b] = group.begin_of(b), r.end[b] = group.end_of(b);
    there |= 1u << !first;
  }
  __device__ __forceinline__ void finish() const {
    for (uint32_t i = 0; i < 2; i++)
      if (!(there >> i & 1)) records[i].tokens = 0;
  }
};

// One warp. Lane j < kWarpgroups copies the stages of a group's block j, and hands over as many bytes as it copied:
// none of a stage that doesn't lie in the data or doesn't fit a slot.
template <class I>
static __device__ __forceinline__ void copy_weights(const LinearArgument& a, Ring<I> ring) {
  constexpr uint32_t kGroup = I::kWarpgroups;
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t policy = ptx::evict_first_policy();
  Records<I> records(a);
  walk<I::kN, kGroup>(a, [&](const Job& job, const GroupWork& group, bool first) {
    const Matrix& m = job.matrix;
    if (lane == 0) records.add(job, group, first);
#pragma unroll 1
    for (uint32_t segment = group.first_segment(); segment < group.end_segment(); segment++) {
      const uint32_t stages = job.shape.stages_of(segment);
      // A lane looks up a stage of each block.
      uint32_t steps[kGroup], lengths[kGroup];
#pragma unroll
      for (uint32_t j = 0; j < kGroup; j++) {
        const uint32_t block = group.group * kGroup + j;
        const uint32_t unit = block * job.shape.stages + segment * job.shape.segment_stages + lane;
        steps[j] = lengths[j] = 0;
        if (job.good && lane < stages && group.begin_of(j) <= segment && segment < group.end_of(j)) {
          const Unit found = unit_of(m, unit);
          const bool fits = found.good && found.bytes >= kHuffmanSections && found.bytes <= I::kShared.stage_bytes;
          steps[j] = m.index[unit];
          lengths[j] = fits ? static_cast<uint32_t>(found.bytes) : 0;
        }
      }
#pragma unroll 1
      for (uint32_t i = 0; i < stages; i++, ring.next()) {
        uint32_t step = 0, bytes = 0;
#pragma unroll
        for (uint32_t j = 0; j < kGroup; j++) {
          const uint32_t s = __shfl_sync(kAllLanes, steps[j], i), b = __shfl_sync(kAllLanes, lengths[j], i);
          if (lane == j) step = s, bytes = b;
        }
        if (lane < kGroup) {
          ring.wait_empty();
          ptx::store_shared(ring.length(lane), bytes);
          if (bytes) {
            ptx::mbarrier_arrive_expect(ring.full(), bytes);
            ptx::bulk_load(ring.stage(lane), m.bytes + m.data_offset + 16 * uint64_t{step}, bytes, ring.full(), policy);
          } else {
            ptx::mbarrier_arrive(ring.full());
          }
        }
        __syncwarp();
      }
    }
  });
  if (lane == 0) records.finish();
}

// kLoaderWarps warps. Tokens behind the tile's last and columns behind the matrix's last become zeros.
template <class I>
static __device__ __forceinline__ void copy_tokens(const LinearArgument& a, uint32_t loader, Ring<I> ring) {
  constexpr uint32_t kChunks = 2 * kStageColumns / 16;  // of 16 bytes, in a row
  constexpr uint32_t kRows = kLoaderWarps * kLanes / kChunks, kPanelBytes = I::kN * 128;
  // Copies of so many stages are on their way. A consumer gives a slot back while it works on the next one, so one slot
  // more is out of reach.
  constexpr uint32_t kAhead = I::kShared.slots - 2 < 3 ? I::kShared.slots - 2 : 3;
  const uint32_t chunk = threadIdx.x % kChunks, first_row = (loader * kLanes + threadIdx.x % kLanes) / kChunks;
  const uint32_t panel = chunk / 8 * kPanelBytes;
  const uint64_t columns = a.weights[0].packed.in_features;
  Ring<I> behind = ring;  // the oldest slot that isn't handed over
  uint32_t open = 0;      // so many aren't
  const auto hand_over = [&] {
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % kLanes == 0) ptx::mbarrier_arrive(behind.full());
    behind.next();
    open--;
  };
  walk<I::kN, I::kWarpgroups>(a, [&](const Job& job, const GroupWork& group, bool) {
    const auto* rows = reinterpret_cast<const uint8_t*>(a.x) + 2 * job.tile.first_token * a.x_stride;
    const uint32_t begin = group.first_segment() * job.shape.segment_stages;
    const uint32_t end = min(group.end_segment() * job.shape.segment_stages, job.shape.stages);
#pragma unroll 1
    for (uint32_t stage = begin; stage < end; stage++, ring.next()) {
      const uint64_t column = uint64_t{stage} * kStageColumns + 8 * chunk;
      const uint32_t there = column < columns ? static_cast<uint32_t>(min(columns - column, uint64_t{8})) * 2 : 0;
      ring.wait_empty();
#pragma unroll 4
      for (uint32_t row = first_row; row < I::kN; row += kRows) {
        const uint32_t bytes = row < job.tile.tokens ? there : 0;
        const uint8_t* from = rows + 2 * (row * a.x_stride + column);
        const uint32_t to = ring.x() + panel + 128 * row + 16 * ((chunk ^ row) % 8);
        ptx::copy_async(to, bytes ? from : reinterpret_cast<const uint8_t*>(a.x), bytes);
      }
      ptx::copy_commit();
      if (++open > kAhead) {
        ptx::copy_wait<kAhead>();
        hand_over();
      }
    }
  });
  ptx::copy_wait<0>();
  while (open) hand_over();
}

}  // namespace unweight::cuda
