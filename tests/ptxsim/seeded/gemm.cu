// A warp-specialised GEMM: a producer warpgroup fills a ring of two slots by bulk copies, a consumer warpgroup
// multiplies by wgmma, with A from shared memory or (every third tile) from registers, and stores BF16 through shared
// memory. D = A · Bᵀ: A is [64, K], B [16, K], both packed as tiles of 64 columns (K-major, 128-byte swizzle). Five
// bugs, of which the last three give right numbers all the same.
#include <cuda_bf16.h>

#include "seeded.cuh"

enum Bug { kClean, kNoEmptyWait, kWrongBytes, kNoGroupWait, kNoProxyFence, kNoWgmmaFence };

constexpr uint32_t kTileA = 64 * 128, kTileB = 16 * 128, kSlot = kTileA + kTileB;  // bytes
constexpr uint32_t kSlots = 2;
constexpr uint32_t kOut = 64 * 16 * 2;

// The output tile starts where a slot could; barriers lie behind it.
extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ uint32_t slot_of(uint32_t tile) {
  return ptx::shared_address(shared) + tile % kSlots * kSlot;
}
__device__ __forceinline__ uint32_t out_tile() { return ptx::shared_address(shared) + kSlots * kSlot; }
__device__ __forceinline__ uint32_t full(uint32_t tile) { return out_tile() + kOut + tile % kSlots * 16; }
__device__ __forceinline__ uint32_t empty(uint32_t tile) { return full(tile) + 8; }

template <Bug kBug>
__device__ __forceinline__ void produce(const Arguments& a) {
#pragma unroll 1
  for (uint32_t tile = 0; tile < a.count; ++tile) {
    if (kBug != kNoEmptyWait) wait(empty(tile), (tile / kSlots & 1) ^ 1);
    ptx::mbarrier_arrive_expect(full(tile), kSlot + (kBug == kWrongBytes ? 16 : 0));
    load(slot_of(tile), a.input + tile * kTileA, kTileA, full(tile));             // reported: gemm_no_empty_wait
    load(slot_of(tile) + kTileA, a.scratch + tile * kTileB, kTileB, full(tile));  // reported: gemm_no_empty_wait
  }
}

__device__ __forceinline__ uint32_t packed_pair(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <Bug kBug>
__device__ __forceinline__ void consume(const Arguments& a) {
  const uint32_t thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t row = thread / 32 * 16 + lane % 16;
  float d[8] = {};
  pin(d);
#pragma unroll 1
  for (uint32_t tile = 0; tile < a.count; ++tile) {
    uint32_t slot = slot_of(tile);
    wait(full(tile), tile / kSlots & 1);  // reported: gemm_wrong_bytes
    if (tile % 3 != 2) {
      if (kBug != kNoWgmmaFence) wgmma_fence();
#pragma unroll
      for (uint32_t step = 0; step < 4; ++step) {
        multiply(d, tile_descriptor(slot) + 2 * step,  // reported: gemm_no_wgmma_fence
                 tile_descriptor(slot + kTileA) + 2 * step, true);
      }
    } else {
      uint32_t operand[4][4];
#pragma unroll
      for (uint32_t step = 0; step < 4; ++step) {
        load_matrices(operand[step], slot + row * 128 + ((32 * step + lane / 16 * 16) ^ ((row & 7) << 4)));
      }
      wgmma_fence();
#pragma unroll
      for (uint32_t step = 0; step < 4; ++step) {
        multiply(d, operand[step], tile_descriptor(slot + kTileA) + 2 * step, true);
      }
    }
    wgmma_commit();
    if (kBug != kNoGroupWait) wgmma_wait<0>();
    named_barrier<1>(128);
    if (thread == 0) ptx::mbarrier_arrive(empty(tile));
  }
  const uint32_t words[4] = {packed_pair(d[0], d[1]), packed_pair(d[2], d[3]),  // reported: gemm_no_group_wait
                             packed_pair(d[4], d[5]), packed_pair(d[6], d[7])};
  ptx::store_matrices(out_tile() + row * 32 + lane / 16 * 16, words);
  if (kBug != kNoProxyFence) fence_proxy_async();
  named_barrier<1>(128);
  if (thread < 32 && elect()) {
    store(a.output, out_tile(), kOut);  // reported: gemm_no_proxy_fence
    commit_stores();
    wait_for_stores();
  }
}

template <Bug kBug>
__device__ __forceinline__ void gemm(const Arguments& a) {
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    release_registers<40>();
    if (threadIdx.x < 32 && elect()) produce<kBug>(a);
  } else {
    acquire_registers<232>();
    consume<kBug>(a);
  }
}

#define GEMM(name, bug) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ Arguments a) { gemm<bug>(a); }
GEMM(gemm_clean, kClean)
GEMM(gemm_no_empty_wait, kNoEmptyWait)
GEMM(gemm_wrong_bytes, kWrongBytes)
GEMM(gemm_no_group_wait, kNoGroupWait)
GEMM(gemm_no_proxy_fence, kNoProxyFence)
GEMM(gemm_no_wgmma_fence, kNoWgmmaFence)
