// The copying warpgroup: one warp fetches weights, three fetch activations. They go as far ahead as the ring has slots.
#pragma once
#include "../fill.cuh"
#include "ring.cuh"
#include "walk.cuh"

namespace unweight::cuda {

// The first warp. Lane j < kWarpgroups copies the stages of a group's block j, and hands over as many bytes as it
// copied: none of a stage that doesn't lie in the matrix or doesn't fit a slot. Of the header it believes just that:
// the consumers look at the rest (and there are few registers here).
template <class I>
struct WeightCopier {
  static constexpr uint32_t kGroup = I::kWarpgroups;
  const LinearArgument& a;
  Ring<I> ring;
  uint32_t lane = threadIdx.x % kLanes;
  uint64_t policy = ptx::evict_first_policy();
  const uint32_t* index = nullptr;  // of the matrix; null where it isn't in it
  const uint8_t* data = nullptr;
  uint32_t steps = 0;  // of 16 bytes, from there to the matrix's end

  __device__ __forceinline__ WeightCopier(const LinearArgument& a, const Ring<I>& ring) : a(a), ring(ring) {}

  __device__ __forceinline__ void copy(bool has_work) { walk<I::kN, kGroup>(a, ring.work(), has_work, *this); }
  __device__ __forceinline__ void begin(const Job& job) {
    index = nullptr;
    const uint64_t bytes = a.weights[job.weight].packed.matrix_bytes;
    if (bytes < kHeaderBytes) return;
    const Header& header = *reinterpret_cast<const Header*>(job.matrix);
    const uint64_t index_bytes = 4 * (uint64_t{job.shape.cost()} + 1), at = header.index_offset;
    const uint64_t data_at = header.data_offset;
    if (at % 4 || at > bytes || index_bytes > bytes - at || data_at % 16 || data_at > bytes) return;
    index = reinterpret_cast<const uint32_t*>(job.matrix + at);
    data = job.matrix + data_at;
    steps = static_cast<uint32_t>(min((bytes - data_at) / 16, uint64_t{UINT32_MAX}));
  }
  __device__ __forceinline__ void work(const Job& job, const GroupWork& group) {
#pragma unroll 1
    for (uint32_t segment = group.first_segment(); segment < group.end_segment(); segment++)
      copy_segment(job, group, segment);
  }

 private:
  __device__ __forceinline__ void copy_segment(const Job& job, const GroupWork& group, uint32_t segment) {
    const uint32_t stages = job.shape.stages_of(segment);
    // A lane looks up a stage of each block.
    uint32_t begins[kGroup], lengths[kGroup];
#pragma unroll
    for (uint32_t j = 0; j < kGroup; j++) {
      begins[j] = lengths[j] = 0;
      if (index == nullptr || lane >= stages || segment < group.begin_of(j) || segment >= group.end_of(j)) continue;
      const uint32_t block = group.first_block + j;
      const uint32_t unit = block * job.shape.stages + segment * job.shape.segment_stages + lane;
      const uint32_t begin = index[unit], end = index[unit + 1], length = end - begin;
      if (begin >= end || end > steps || length < kHuffmanSections / 16 || length > I::kShared.stage_bytes / 16)
        continue;
      begins[j] = begin;
      lengths[j] = 16 * length;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < stages; i++, ring.next()) {
      uint32_t begin = 0, bytes = 0;
#pragma unroll
      for (uint32_t j = 0; j < kGroup; j++) {
        const uint32_t b = __shfl_sync(kAllLanes, begins[j], i), l = __shfl_sync(kAllLanes, lengths[j], i);
        if (lane == j) begin = b, bytes = l;
      }
      if (lane < kGroup) hand_over(begin, bytes);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void hand_over(uint32_t begin, uint32_t bytes) const {
    ring.wait_empty();
    ptx::store_shared(ring.length(lane), bytes);
    if (bytes) {
      ptx::mbarrier_arrive_expect(ring.full(), bytes);
      ptx::bulk_load(ring.stage(lane), data + 16 * uint64_t{begin}, bytes, ring.full(), policy);
    } else {
      ptx::mbarrier_arrive(ring.full());
    }
  }
};

// The other kLoaderWarps warps. Tokens behind the tile's last and columns behind the matrix's last become zeros.
template <class I>
struct TokenCopier {
  static constexpr uint32_t kChunks = 2 * kStageColumns / 16;  // of 16 bytes, in a row
  static constexpr uint32_t kRows = kLoaderWarps * kLanes / kChunks, kPanelBytes = I::kN * 128;
  // Copies of so many stages are on their way. A consumer gives a slot back while it works on the next one, so one slot
  // more is out of reach.
  static constexpr uint32_t kAhead = I::kShared.slots - 2 < 3 ? I::kShared.slots - 2 : 3;
  const LinearArgument& a;
  Ring<I> ring, behind;  // to fill, and the oldest slot that isn't handed over
  uint32_t open = 0;     // so many aren't
  uint32_t first_row;
  const uint8_t* rows = nullptr;

  __device__ __forceinline__ TokenCopier(const LinearArgument& a, const Ring<I>& ring, uint32_t loader)
      : a(a), ring(ring), behind(ring), first_row((loader * kLanes + threadIdx.x % kLanes) / kChunks) {}

  __device__ __forceinline__ void copy(bool has_work) {
    walk<I::kN, I::kWarpgroups>(a, ring.work(), has_work, *this);
    ptx::copy_wait<0>();
    while (open) hand_over();
    if (a.offsets) clear_rest();
  }
  __device__ __forceinline__ void begin(const Job& job) {
    rows = reinterpret_cast<const uint8_t*>(a.x) + 2 * (job.tile.first_token * a.x_stride);
  }
  __device__ __forceinline__ void work(const Job& job, const GroupWork& group) {
    const uint32_t begin = group.first_segment() * job.shape.segment_stages;
    const uint32_t end = min(group.end_segment() * job.shape.segment_stages, job.shape.stages);
#pragma unroll 1
    for (uint32_t stage = begin; stage < end; stage++, ring.next()) {
      ring.wait_empty();
      copy_stage(stage, job.tile.tokens);
      ptx::copy_commit();
      if (++open > kAhead) {
        ptx::copy_wait<kAhead>();
        hand_over();
      }
    }
  }

 private:
  __device__ __forceinline__ void copy_stage(uint32_t stage, uint32_t tokens) const {
    const uint32_t chunk = threadIdx.x % kChunks, to = ring.x() + chunk / 8 * kPanelBytes;
    const uint64_t columns = a.weights[0].packed.in_features, column = uint64_t{stage} * kStageColumns + 8 * chunk;
    const uint32_t there = column < columns ? static_cast<uint32_t>(min(columns - column, uint64_t{8})) * 2 : 0;
#pragma unroll 4
    for (uint32_t row = first_row; row < I::kN; row += kRows) {
      const uint32_t bytes = row < tokens ? there : 0;
      const uint8_t* from = bytes ? rows + 2 * (row * a.x_stride + column) : reinterpret_cast<const uint8_t*>(a.x);
      ptx::copy_async(to + 128 * row + 16 * ((chunk ^ row) % 8), from, bytes);
    }
  }
  // Rows of no expert, which are those behind the largest offset, become zeros.
  __device__ __forceinline__ void clear_rest() const {
    uint32_t end = 0;
#pragma unroll 1
    for (uint32_t e = threadIdx.x % kLanes; e < a.weights[0].packed.matrices; e += kLanes)
      end = max(end, static_cast<uint32_t>(max(reinterpret_cast<const int32_t*>(a.offsets)[e], 0)));
    end = min(__reduce_max_sync(kAllLanes, end), a.tokens);
    const uint64_t element = a.float_output ? 4 : 2;
#pragma unroll 1
    for (uint64_t row = end + blockIdx.x; row < a.tokens; row += gridDim.x) {
#pragma unroll 1
      for (uint32_t i = 0; i < a.weight_count; i++) {
        const WeightArgument& w = a.weights[i];
        const DeviceAddress y = w.y + element * row * w.y_stride;
        fill(y, y + element * w.packed.out_features, 0, threadIdx.x - I::kConsumers - kLanes, kLoaderWarps * kLanes);
      }
    }
  }
  __device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % kLanes == 0) ptx::mbarrier_arrive(behind.full());
    behind.next();
    open--;
  }
};

}  // namespace unweight::cuda
