// Blocks that several CTAs had segments of: each leaves its sums in memory, and who has the last segments adds them up
// at its very end, in the order of the segments, so that the result doesn't depend on who was faster.
//
// A piece's flag says that its sums are there: it holds the launch's nonce. Its only reader sets it to 0 again. So the
// flags' memory may hold anything at first: it holds this launch's nonce by chance, 1 in 2^64, and a graph that is
// replayed, with the nonce that it was captured with, finds none of its own.
//
// Who publishes never waits, and who gathers waits for CTAs before it, which are dispatched before it: products on two
// streams can't keep each other from ending.
#pragma once
#include "ring.cuh"
#include "store.cuh"

namespace unweight::cuda {

// A chunk's sums of a warpgroup's block, as one lane sees them. All warps work for themselves, on 16 rows each.
template <class I>
struct Piece {
  const LinearArgument& a;
  float* sums;      // of the lane's first row and token, of a piece that isn't its block's last
  uint64_t last;    // from there to those of the last piece, which the chunk may have too
  uint64_t* flag;   // of the former: nobody else reads the last one
  uint32_t tokens;  // behind the lane's first

  __device__ __forceinline__ Piece(const LinearArgument& a, uint32_t chunk, uint32_t block, uint32_t first_token,
                                   uint32_t tile_tokens)
      : a(a) {
    const uint32_t thread = ptx::pinned(threadIdx.x) % kWarpgroupThreads, warp = thread / kLanes,
                   lane = thread % kLanes;
    const uint32_t rows = piece_rows(a, I::kN), first_row = a.tile_sheets ? first_token : 0;
    const uint32_t token = 2 * (lane % 4), row = kWarpRows * warp + lane / 4;
    const uint64_t before = uint64_t{chunk} * 2 * I::kWarpgroups + block;
    sums = reinterpret_cast<float*>(a.partials) + kBlockRows * (before * rows + first_row + token) + row;
    last = uint64_t{I::kWarpgroups} * kBlockRows * rows;
    const uint64_t flags = (uint64_t{chunk} * I::kWarpgroups + block) * flag_rows(a) + first_row;
    flag = reinterpret_cast<uint64_t*>(a.flags) + kWarps * flags + warp;
    tokens = tile_tokens - min(token, tile_tokens);
  }

  // sum(i) for all that there are.
  template <class Sum>
  __device__ __forceinline__ void store(bool is_last, const Sum& sum) const {
    float* to = sums + (is_last ? last : 0);
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token_of(i) < tokens) to[place_of(i)] = sum(i);
  }
  __device__ __forceinline__ void add_to(float (&total)[I::kN / 2], bool is_last) const {
    const float* from = sums + (is_last ? last : 0);
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token_of(i) < tokens) total[i] += from[place_of(i)];
  }
  __device__ __forceinline__ void publish() const {
    __syncwarp();  // all lanes' sums
    if (threadIdx.x % kLanes == 0) ptx::store_release(flag, a.nonce);
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x % kLanes == 0) {
      while (ptx::load_acquire(flag) != a.nonce) {
      }
      ptx::store_relaxed(flag, 0);
    }
    __syncwarp();
  }

 private:
  static constexpr __device__ __forceinline__ uint32_t token_of(uint32_t i) { return 8 * (i / 4) + i % 2; }
  static constexpr __device__ __forceinline__ uint32_t place_of(uint32_t i) {
    return kBlockRows * token_of(i) + 8 * (i / 2 % 2);
  }
};

// One warp of the consumers, when the CTA's own work is done. A chunk has the last segments but not the first of blocks
// of its first group alone.
template <class I>
struct Gatherer {
  const LinearArgument& a;
  SharedWork work;
  uint32_t block;  // of a group

  __device__ __forceinline__ Gatherer(const LinearArgument& a, SharedWork work, uint32_t block)
      : a(a), work(work), block(block) {}

  __device__ __forceinline__ void gather() const {
#pragma unroll 1
    for (bool any = work.enter(a, 0); any; any = work.enter_next(a)) {
      if (work.share().first_stage == 0) continue;
      const Job job = work.job<I::kN, I::kWarpgroups>(a);
      work.enter_job(job.shape);
      if (!work.has_units()) continue;
      const GroupWork own = work.take_group(job.shape);
      const uint32_t begin = own.begin_of(block), stop = own.end_of(block);
      if (0 < begin && begin < stop && stop == job.shape.segments()) add_pieces(job, own.group);
    }
  }

 private:
  __device__ __forceinline__ void add_pieces(const Job& job, uint32_t group) const {
    const uint32_t first = group * job.shape.group_units();
    const uint32_t last = work.get(work.kChunk);
    uint32_t chunk = last;
    do chunk--;
    while (first_unit(chunk, job) > first + block);
    float sums[I::kN / 2] = {};
    uint32_t begin = first;
#pragma unroll 1
    for (; chunk < last; chunk++) {
      const uint32_t end = first_unit(chunk + 1, job);
      const GroupWork part{group, job.shape.width(group), begin - first, end - first};
      begin = end;
      if (part.begin_of(block) == part.end_of(block)) continue;
      const Piece<I> piece(a, chunk, block, job.tile.first_token, job.tile.tokens);
      piece.wait();
      piece.add_to(sums, false);
    }
    Piece<I>(a, chunk, block, job.tile.first_token, job.tile.tokens).add_to(sums, true);
    const BlockOutput out(a, job.weight, job.tile.matrix, group * I::kWarpgroups + block, job.tile.first_token,
                          job.tile.tokens);
#pragma unroll
    for (uint32_t q = 0; q < I::kN / 8; q++)
      out.store(q, sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
  }
  // The first unit of a job that a chunk, or one behind it, has: of chunks that begin in it or before it.
  __device__ __forceinline__ uint32_t first_unit(uint32_t chunk, const Job& job) const {
    uint32_t in_job, stage;
    find_border(chunk, a.chunks, Costs{a}, a.weight_count, work.sheet_tiles(a), in_job, stage);
    return in_job < work.get(work.kJob) ? 0 : job.shape.nearest_unit(stage);
  }
};

}  // namespace unweight::cuda
