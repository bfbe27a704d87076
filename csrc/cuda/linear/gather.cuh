// Blocks that several CTAs had segments of: each leaves its sums in memory but who has the last segments. That one adds
// the others' to its own, the nearest first, so that the result doesn't depend on who was faster.
//
// A piece's flag says that its sums are there: it holds the launch's nonce. Its only reader sets it to 0 again. So the
// flags' memory may hold anything at first: it holds this launch's nonce by chance, 1 in 2^64, and a graph that is
// replayed, with the nonce that it was captured with, finds none of its own.
//
// Who gathers waits for CTAs before it alone. They wait for CTAs before them, and the first for nobody: so none waits
// for ever, whatever the order of their work, if a CTA isn't dispatched before those with smaller numbers. CUDA doesn't
// promise that, but GPUs do it, and others' scans rely on it: products on two streams can't keep each other from
// ending.
#pragma once
#include "ring.cuh"
#include "store.cuh"

namespace unweight::cuda {

// The sums of a warpgroup's block that a chunk leaves, as one lane sees them. All warps work for themselves, on 16 rows
// each.
template <class I>
struct Piece {
  const LinearArgument& a;
  float* sums;      // of the lane's first row and token
  uint64_t* flag;   // of the warp
  uint32_t tokens;  // behind the lane's first

  __device__ __forceinline__ Piece(const LinearArgument& a, uint32_t chunk, uint32_t block, uint32_t first_token,
                                   uint32_t tile_tokens)
      : a(a) {
    const uint32_t thread = ptx::pinned(threadIdx.x) % kWarpgroupThreads, warp = thread / kLanes,
                   lane = thread % kLanes;
    const uint32_t first_row = a.tile_sheets ? first_token : 0, token = 2 * (lane % 4);
    const uint64_t before = uint64_t{chunk} * I::kWarpgroups + block;
    const uint64_t row = before * sheet_rows(a.tile_sheets, a.tokens, I::kN) + first_row + token;
    sums = reinterpret_cast<float*>(a.partials) + kBlockRows * row + kWarpRows * warp + lane / 4;
    flag = reinterpret_cast<uint64_t*>(a.flags) +
           kWarps * (before * sheet_rows(a.tile_sheets, a.tokens, 1) + first_row) + warp;
    tokens = tile_tokens - min(token, tile_tokens);
  }

  __device__ __forceinline__ void store(const float (&from)[I::kN / 2]) const {
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token_of(i) < tokens) sums[place_of(i)] = from[i];
  }
  __device__ __forceinline__ void load(float (&to)[I::kN / 2]) const {
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token_of(i) < tokens) to[i] = sums[place_of(i)];
  }
  __device__ __forceinline__ void add_to(float (&total)[I::kN / 2]) const {
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token_of(i) < tokens) total[i] += sums[place_of(i)];
  }
  // As they were loaded before, of a tile of so many tokens.
  static __device__ __forceinline__ void add_loaded(float (&total)[I::kN / 2], const float (&loaded)[I::kN / 2],
                                                    uint32_t tile_tokens) {
    const uint32_t token = 2 * (threadIdx.x % 4);
#pragma unroll
    for (uint32_t i = 0; i < I::kN / 2; i++)
      if (token + token_of(i) < tile_tokens) total[i] += loaded[i];
  }
  __device__ __forceinline__ void publish() const {
    __syncwarp();  // all lanes' sums
    if (threadIdx.x % kLanes == 0) ptx::store_release(flag, a.nonce);
  }
  // By one lane.
  __device__ __forceinline__ void wait() const {
    while (ptx::load_acquire(flag) != a.nonce) {
    }
    ptx::store_relaxed(flag, 0);
  }

 private:
  static constexpr __device__ __forceinline__ uint32_t token_of(uint32_t i) { return 8 * (i / 4) + i % 2; }
  static constexpr __device__ __forceinline__ uint32_t place_of(uint32_t i) {
    return kBlockRows * token_of(i) + 8 * (i / 2 % 2);
  }
};

// The pieces of a warpgroup's block, for who has its last segments.
template <class I>
struct Gatherer {
  // Pieces that are on their way together, as registers allow.
  static constexpr uint32_t kAtOnce = I::kLayout == I::kAny ? 1 : I::kN <= 16 ? 4 : I::kN <= 32 ? 3 : 1;
  const LinearArgument& a;
  SharedWork work;        // in the block's group
  uint32_t group, block;  // block of the group

  __device__ __forceinline__ Gatherer(const LinearArgument& a, SharedWork work, uint32_t block_of_matrix)
      : a(a),
        work(work),
        group(shape().group_of(block_of_matrix, 1)),
        block(block_of_matrix - shape().first_block(group)) {}

  // A lane looks after a chunk, the nearest first: none of them is waited for longer than for the last one.
  __device__ __forceinline__ void add_to(float (&sums)[I::kN / 2], uint32_t first_token, uint32_t tokens) const {
    const uint32_t lane = threadIdx.x % kLanes;
    uint32_t behind = work.get(work.kChunk);
    bool at_first = false;
#pragma unroll 1
    for (; !at_first; behind -= kLanes) {
      const uint32_t mine = behind - 1 - lane, begin = lane < behind ? begin_of(mine) : 0;
      const GroupWork part{shape().first_block(group), shape().width(group), begin,
                           lane < behind ? begin_of(mine + 1) : 0};
      const bool has = part.begin_of(block) < part.end_of(block);
      if (has) Piece<I>(a, mine, block, first_token, tokens).wait();
      __syncwarp();  // what one of the lanes has seen, all have
      uint32_t left = __ballot_sync(kAllLanes, has);
      at_first = __any_sync(kAllLanes, begin <= block);
#pragma unroll 1
      while (left) add_some(sums, behind, left, first_token, tokens);
    }
  }

 private:
  // What this takes is looked up where it is needed: registers are scarce where sums are.
  __device__ __forceinline__ WorkShape shape() const {
    return {work.peek(work.kBlocks), work.peek(work.kStages), work.peek(work.kSegment), I::kWarpgroups};
  }
  // The first of the group's units that a chunk, or one behind it, has.
  __device__ __forceinline__ uint32_t begin_of(uint32_t chunk) const {
    uint32_t job, stage;
    find_border(chunk, a.chunks, Costs{a}, a.weight_count, a.tile_sheets ? 1 : work.peek(work.kTiles), job, stage);
    const uint32_t unit = job < work.peek(work.kJob) ? 0 : shape().nearest_unit(stage);
    return unit - min(unit, shape().first_block(group) * shape().segments());
  }
  // The next pieces of `left`, of a bit for each chunk before `behind`.
  __device__ __forceinline__ void add_some(float (&sums)[I::kN / 2], uint32_t behind, uint32_t& left,
                                           uint32_t first_token, uint32_t tokens) const {
    const auto piece = [&](uint32_t of) { return Piece<I>(a, of, block, first_token, tokens); };
    if constexpr (kAtOnce == 1) {
      piece(behind - __ffs(left)).add_to(sums);
      left &= left - 1;
    } else {
      float loaded[kAtOnce][I::kN / 2] = {};
      bool is_there[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++, left &= left - 1) {
        is_there[i] = left != 0;
        if (is_there[i]) piece(behind - __ffs(left)).load(loaded[i]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++)
        if (is_there[i]) Piece<I>::add_loaded(sums, loaded[i], tokens);
    }
  }
};

}  // namespace unweight::cuda
