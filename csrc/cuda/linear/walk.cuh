// The tiles and groups that a CTA works on, one after the other: each of its warps walks along them by itself.
#pragma once
#include "../../format/header.h"
#include "../ptx.cuh"
#include "schedule.h"

namespace unweight::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kLongestSegment = kMostSegment;

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

// What a warp walks along. It lies in shared memory, since registers are scarce where sums are.
struct SharedWork {
  uint32_t address;  // of the warp's own
  enum Word : uint32_t {
    kFirstJob,
    kFirstStage,
    kEndJob,
    kEndStage,
    kTurn,  // first each sheet's groups that aren't late, then each sheet's late ones
    kChunk,
    kJob,
    kUnit,
    kEndUnit,
    kBlocks,
    kStages,
    kSegment,
    kTiles
  };
  static_assert(kTiles + 1 == kShareWords);

  __device__ __forceinline__ uint32_t get(Word word) const {
    return ptx::uniform(ptx::load_shared(address + 4 * word));
  }
  // The same by some lanes, and not known to be the same in all.
  __device__ __forceinline__ uint32_t peek(Word word) const { return ptx::load_shared(address + 4 * word); }
  // All lanes call it.
  __device__ __forceinline__ void set(Word word, uint32_t value) const {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) ptx::store_shared(address + 4 * word, value);
    __syncwarp();
  }

  // By the first warp, for all, before they meet.
  template <int kTokens>
  __device__ __forceinline__ void make(const LinearArgument& a) const {
    const uint32_t tiles = count_tiles<kTokens>(a);
    if (threadIdx.x < blockDim.x / kLanes) ptx::store_shared(address + 4 * (kShareWords * threadIdx.x + kTiles), tiles);
  }
  __device__ __forceinline__ uint32_t sheets(const LinearArgument& a) const { return a.tile_sheets ? get(kTiles) : 1; }
  __device__ __forceinline__ uint32_t sheet_tiles(const LinearArgument& a) const {
    return a.tile_sheets ? 1 : get(kTiles);
  }
  __device__ __forceinline__ bool late(const LinearArgument& a) const { return get(kTurn) >= sheets(a); }
  __device__ __forceinline__ uint32_t sheet(const LinearArgument& a) const {
    const uint32_t turn = get(kTurn), sheets = this->sheets(a);
    return turn < sheets ? turn : turn - sheets;
  }
  // The first turn from number `turn` on with a sheet that the CTA has a chunk of; false: there is none. All lanes call
  // it.
  __device__ __forceinline__ bool enter(const LinearArgument& a, uint32_t turn) const {
    const uint32_t sheets = this->sheets(a);
    uint32_t chunk = kNoChunk;
    for (; turn < 2 * sheets; turn++) {
      chunk = chunk_of(blockIdx.x, gridDim.x, turn < sheets ? turn : turn - sheets, a.chunks);
      if (chunk != kNoChunk) break;
    }
    if (chunk == kNoChunk) return false;
    const WorkShare share = share_of(chunk, a.chunks, Costs{a}, a.weight_count, sheet_tiles(a));
    set(kFirstJob, share.first_job);
    set(kFirstStage, share.first_stage);
    set(kEndJob, share.end_job);
    set(kEndStage, share.end_stage);
    set(kTurn, turn);
    set(kChunk, chunk);
    set(kJob, share.first_job);
    return true;
  }
  __device__ __forceinline__ bool enter_next(const LinearArgument& a) const { return enter(a, get(kTurn) + 1); }
  __device__ __forceinline__ WorkShare share() const {
    return {get(kFirstJob), get(kFirstStage), get(kEndJob), get(kEndStage)};
  }
  __device__ __forceinline__ bool has_jobs(const LinearArgument& a) const {
    return get(kJob) < share().jobs_end(late(a));
  }
  // The warp goes from job to job, and from unit to unit of it.
  __device__ __forceinline__ void enter_job(const LinearArgument& a, const WorkShape& shape) const {
    uint32_t unit, end;
    share().units(get(kJob), shape, late(a), unit, end);
    set(kUnit, unit);
    set(kEndUnit, end);
    set(kBlocks, shape.blocks);
    set(kStages, shape.stages);
    set(kSegment, shape.segment_stages);
  }
  __device__ __forceinline__ WorkShape shape(uint32_t warpgroups) const {
    return {get(kBlocks), get(kStages), get(kSegment), warpgroups};
  }
  __device__ __forceinline__ bool has_units() const { return get(kUnit) < get(kEndUnit); }
  __device__ __forceinline__ GroupWork take_group(const WorkShape& shape) const {
    uint32_t unit = get(kUnit);
    const GroupWork group = cuda::take_group(shape, unit, get(kEndUnit));
    set(kUnit, unit);
    return group;
  }
  template <int kTokens, int kWarpgroups>
  __device__ __forceinline__ Job job(const LinearArgument& a) const {
    const uint32_t number = get(kJob), tiles = sheet_tiles(a);
    Job job;
    job.weight = number / tiles;
    job.tile = find_tile<kTokens>(a, a.tile_sheets ? sheet(a) : number % tiles);
    const PackedArgument& packed = a.weights[job.weight].packed;
    job.matrix = reinterpret_cast<const uint8_t*>(packed.packed + job.tile.matrix * packed.matrix_bytes);
    job.shape = {packed.blocks, packed.stages_per_block, segment_of(packed, job.matrix), kWarpgroups};
    return job;
  }
};

// Calls role.begin(job) for each matrix and tile of the CTA's chunks, then role.work(job, group) for each group; late
// groups at the end of all. `has_work`: what `enter` said of the first turn. All lanes call it.
template <int kTokens, int kWarpgroups, class Role>
static __device__ __forceinline__ void walk(const LinearArgument& a, SharedWork shared, bool has_work, Role& role) {
#pragma unroll 1
  for (; has_work; has_work = shared.enter_next(a)) {
#pragma unroll 1
    for (; shared.has_jobs(a); shared.set(shared.kJob, shared.get(shared.kJob) + 1)) {
      Job job = shared.job<kTokens, kWarpgroups>(a);
      shared.enter_job(a, job.shape);
      if (!shared.has_units()) continue;
      role.begin(job);
#pragma unroll 1
      while (shared.has_units()) {
        job.shape = shared.shape(kWarpgroups);
        role.work(job, shared.take_group(job.shape));
      }
    }
  }
}

}  // namespace unweight::cuda
