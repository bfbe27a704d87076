// The tiles and groups that a CTA works on, one after the other: each of its warps walks along them by itself.
#pragma once
#include "../matrix.cuh"
#include "schedule.h"

namespace unweight::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

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
  Matrix matrix;
  bool good;  // else nothing of the matrix is read, and what is stored for it is NaN
  WorkShape shape;
};

// Calls visit(job, group, first) for each group of the CTA's part: `first` for the first of all. All lanes call it.
template <int kTokens, int kWarpgroups, class Visit>
static __device__ __forceinline__ void walk(const LinearArgument& a, Visit visit) {
  const auto costs = [&a](uint32_t w) { return a.weights[w].packed.blocks * a.weights[w].packed.stages_per_block; };
  WorkCursor cursor(blockIdx.x, gridDim.x, costs, a.weight_count, count_tiles<kTokens>(a));
  bool first = true;
#pragma unroll 1
  for (; !cursor.done(); cursor.next()) {
    Job job;
    job.weight = cursor.at.weight;
    job.tile = find_tile<kTokens>(a, cursor.at.tile);
    const PackedArgument& packed = a.weights[job.weight].packed;
    job.good = open_matrix(packed, job.tile.matrix, job.matrix) == Flaw::kNone && job.matrix.layout != Layout::kArchive;
    job.shape = {packed.blocks, packed.stages_per_block, job.good ? job.matrix.segment_stages : 32, kWarpgroups};
    cursor.for_each_group(job.shape, [&](const GroupWork& group) {
      visit(job, group, first);
      first = false;
    });
  }
}

}  // namespace unweight::cuda
