// The tiles and groups that a CTA works on, one after the other: each of its warps walks along them by itself.
#pragma once
#include "../../format/header.h"
#include "../ptx.cuh"
#include "schedule.h"

namespace unweight::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kLongestSegment = 32;

// Rows of x that are multiplied with one matrix at once.
struct Tile {
  uint32_t matrix, first_token, tokens;
};

// Rows of experts, 32 of them at a time, a lane each. Offsets are the caller's: they are taken as rising, within x.
struct ExpertRows {
  const LinearArgument& a;
  uint32_t lane;
  uint32_t end_before = 0, tiles_before = 0;  // of the experts before these
  uint32_t begin = 0, end = 0, tiles_until = 0;

  __device__ __forceinline__ ExpertRows(const LinearArgument& a) : a(a), lane(threadIdx.x % kLanes) {}

  // Experts [first, first + 32).
  __device__ __forceinline__ void load(uint32_t first, uint32_t tile_tokens) {
    const auto* offsets = reinterpret_cast<const int32_t*>(a.offsets);
    end = first + lane < a.weights[0].packed.matrices ? max(offsets[first + lane], 0) : 0;
    end = max(min(end, a.tokens), end_before);
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end = max(end, other);
    }
    begin = __shfl_up_sync(kAllLanes, end, 1);
    if (lane == 0) begin = end_before;
    tiles_until = ceil_quotient(end - begin, tile_tokens);
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, tiles_until, step);
      if (lane >= step) tiles_until += other;
    }
    tiles_until += tiles_before;
  }
  __device__ __forceinline__ void pass() {
    end_before = __shfl_sync(kAllLanes, end, kLanes - 1);
    tiles_before = __shfl_sync(kAllLanes, tiles_until, kLanes - 1);
  }
};

// Tiles of all matrices of a stack. All lanes call it.
template <int kTokens>
static __device__ __forceinline__ uint32_t count_tiles(const LinearArgument& a) {
  if (!a.offsets) return ceil_quotient(a.tokens, kTokens);
  ExpertRows rows(a);
#pragma unroll 1
  for (uint32_t first = 0; first < a.weights[0].packed.matrices; first += kLanes) {
    rows.load(first, kTokens);
    rows.pass();
  }
  return rows.tiles_before;
}

// Tile number `number`, which there is. All lanes call it.
template <int kTokens>
static __device__ __forceinline__ Tile find_tile(const LinearArgument& a, uint32_t number) {
  if (!a.offsets) {
    const uint32_t first = number * kTokens;
    return {0, first, min(a.tokens - first, uint32_t{kTokens})};
  }
  ExpertRows rows(a);
#pragma unroll 1
  for (uint32_t first = 0;; first += kLanes) {
    rows.load(first, kTokens);
    const uint32_t holders = __ballot_sync(kAllLanes, number < rows.tiles_until);
    if (holders) {
      const int owner = __ffs(holders) - 1;
      const uint32_t begin = __shfl_sync(kAllLanes, rows.begin, owner), end = __shfl_sync(kAllLanes, rows.end, owner);
      const uint32_t until = __shfl_sync(kAllLanes, rows.tiles_until, owner);
      const uint32_t tile = ceil_quotient(end - begin, kTokens) - (until - number);
      const uint32_t token = begin + tile * kTokens;
      return {first + owner, token, min(end - token, uint32_t{kTokens})};
    }
    rows.pass();
  }
}

// A CTA's work on one matrix and one tile of tokens.
struct Job {
  uint32_t weight;
  Tile tile;
  const uint8_t* matrix;
  WorkShape shape;
};

// Of any bytes: all who walk agree on it, whatever else is wrong with the matrix.
static __device__ __forceinline__ uint32_t segment_of(const PackedArgument& packed, const uint8_t* matrix) {
  if (packed.matrix_bytes < kHeaderBytes) return kLongestSegment;
  const uint32_t stages = reinterpret_cast<const Header*>(matrix)->segment_stages;
  return ptx::uniform(stages - 1 < kLongestSegment ? stages : kLongestSegment);
}

// Stages of one tile of a weight.
struct Costs {
  const LinearArgument& a;
  __device__ __forceinline__ uint32_t operator()(uint32_t weight) const {
    return a.weights[weight].packed.blocks * a.weights[weight].packed.stages_per_block;
  }
};

// What every warp of the CTA walks along. It lies in shared memory, since registers are scarce where sums are: in order
// first_job, first_stage, end_job, end_stage, tiles.
struct SharedWork {
  uint32_t address;

  // By one warp, before all meet.
  template <int kTokens>
  __device__ __forceinline__ void make(const LinearArgument& a) const {
    const uint32_t tiles = count_tiles<kTokens>(a);
    const WorkShare share = share_of(blockIdx.x, gridDim.x, Costs{a}, a.weight_count, tiles);
    const uint32_t words[kShareWords] = {share.first_job, share.first_stage, share.end_job, share.end_stage, tiles};
    if (threadIdx.x % kLanes == 0)
      for (uint32_t i = 0; i < kShareWords; i++) ptx::store_shared(address + 4 * i, words[i]);
  }
  __device__ __forceinline__ WorkShare share() const {
    return {ptx::load_shared(address), ptx::load_shared(address + 4), ptx::load_shared(address + 8),
            ptx::load_shared(address + 12)};
  }
  __device__ __forceinline__ uint32_t tiles() const { return ptx::load_shared(address + 16); }
};

// Calls role.begin(job) for each matrix and tile of the CTA's part, then role.work(job, group, first) for each group:
// `first` for the first of all. All lanes call it.
template <int kTokens, int kWarpgroups, class Role>
static __device__ __forceinline__ void walk(const LinearArgument& a, SharedWork shared, Role& role) {
  bool first = true;
#pragma unroll 1
  for (uint32_t number = shared.share().first_job; number < shared.share().jobs_end(); number++) {
    const uint32_t tiles = shared.tiles();
    Job job;
    job.weight = number / tiles;
    job.tile = find_tile<kTokens>(a, number % tiles);
    const PackedArgument& packed = a.weights[job.weight].packed;
    job.matrix = reinterpret_cast<const uint8_t*>(packed.packed + job.tile.matrix * packed.matrix_bytes);
    job.shape = {packed.blocks, packed.stages_per_block, segment_of(packed, job.matrix), kWarpgroups};
    role.begin(job);
    const uint32_t end = shared.share().units_end(number, job.shape);
#pragma unroll 1
    for (uint32_t unit = shared.share().units_begin(number, job.shape); unit < end; first = false) {
      const GroupWork group = take_group(job.shape, unit, end);
      role.work(job, group, first);
    }
  }
}

}  // namespace unweight::cuda
