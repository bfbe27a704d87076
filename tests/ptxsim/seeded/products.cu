// Products whose operand threads write to shared memory, and two warpgroups that take turns.
#include "seeded.cuh"

constexpr uint32_t kTileA = 64 * 128, kTileB = 16 * 128, kStages = 5;

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ void fill(uint8_t* tile, uint32_t bytes, uint32_t thread, uint32_t word) {
  for (uint32_t i = thread; i < bytes / 4; i += 128) reinterpret_cast<uint32_t*>(tile)[i] = word;
}

__device__ __forceinline__ void give(const Arguments& a, uint32_t thread, const float (&d)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) at<float>(a.output)[8 * thread + i] = d[i];
}

__device__ __forceinline__ void multiply_tile(float (&d)[8], const uint8_t* a, const uint8_t* b) {
  wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step)
    multiply(d, tile_descriptor(ptx::shared_address(a)) + 2 * step, tile_descriptor(ptx::shared_address(b)) + 2 * step,
             true);
  wgmma_commit();
}

// Weights decoded to shared memory, one tile while the other is multiplied. Who waited for a product knows that all of
// its tile was read, by all four warps.
template <bool kBug>
__device__ void decoded_to_shared(const Arguments& a) {
  uint8_t *tiles = shared, *tokens = shared + 2 * kTileA;
  fill(tokens, kTileB, threadIdx.x, 0x3f803f80);
  float d[8] = {};
  pin(d);
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    wgmma_wait<kBug ? 2 : 1>();
    uint8_t* tile = tiles + stage % 2 * kTileA;
    fill(tile, kTileA, threadIdx.x, 0x3f803f80);  // reported: decoded_to_shared
    fence_proxy_async();
    __syncthreads();
    multiply_tile(d, tile, tokens);
  }
  wgmma_wait<0>();
  if (d[0] != 64 * kStages) __trap();
  give(a, threadIdx.x, d);
}
SEEDED(decoded_to_shared)

template <int kId>
__device__ __forceinline__ void arrive_at(uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

// Two warpgroups take turns at one tile: who has multiplied lets the other write it.
template <bool kBug>
__device__ void warpgroups_in_turns(const Arguments& a) {
  uint8_t *tile = shared, *tokens = shared + kTileA;
  const uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (group == 0) fill(tokens, kTileB, thread, 0x3f803f80);
  fence_proxy_async();
  __syncthreads();
  float d[8] = {};
  pin(d);
  for (uint32_t stage = 0; stage < 2; ++stage) {
    if (group)
      named_barrier<2>(256);
    else if (stage)
      named_barrier<1>(256);
    fill(tile, kTileA, thread, group ? 0x40004000 : 0x3f803f80);  // reported: warpgroups_in_turns
    fence_proxy_async();
    if (group)
      named_barrier<4>(128);
    else
      named_barrier<3>(128);
    multiply_tile(d, tile, tokens);
    if (!kBug) wgmma_wait<0>();
    if (group == 0)
      arrive_at<2>(256);
    else if (stage == 0)
      arrive_at<1>(256);
    wgmma_wait<0>();
  }
  if (!kBug && d[0] != 64 * 2 * (group + 1)) __trap();
  give(a, threadIdx.x, d);
}
SEEDED(warpgroups_in_turns)
