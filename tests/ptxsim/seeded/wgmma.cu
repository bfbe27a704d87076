// wgmma's registers, descriptors and shared operands, and setmaxnreg. A CTA is one warpgroup, unless it is said.
#include "seeded.cuh"

constexpr uint32_t kTileA = 64 * 128, kTileB = 16 * 128;  // bytes of 64 or 16 rows of 64 BF16

extern __shared__ __align__(1024) uint8_t shared[];

// Small whole numbers as BF16, wherever the swizzle puts them.
__device__ __forceinline__ void fill_tiles() {
  for (uint32_t i = threadIdx.x; i < (kTileA + kTileB) / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(shared)[i] = i % 3 ? 0x3f804000u : 0x40003f80u;
  }
}

__device__ __forceinline__ void fill_tiles_for_all() {
  fill_tiles();
  fence_proxy_async();
  __syncthreads();
}

__device__ __forceinline__ uint64_t tile_a() { return tile_descriptor(ptx::shared_address(shared)); }
__device__ __forceinline__ uint64_t tile_b() { return tile_descriptor(ptx::shared_address(shared) + kTileA); }

__device__ __forceinline__ void give(const Arguments& a, const float (&d)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) at<float>(a.output)[8 * threadIdx.x + i] = d[i];
}

// Where a lane's row of A lies for ldmatrix, k-step 0.
__device__ __forceinline__ uint32_t row_of_a() {
  uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 16;
  return ptx::shared_address(shared) + row * 128 + ((threadIdx.x % 32 / 16 * 16) ^ ((row & 7) << 4));
}

template <bool kBug>
__device__ void operand_register_touched_in_flight(const Arguments& a) {
  fill_tiles_for_all();
  uint32_t operand[4];
  load_matrices(operand, row_of_a());
  float d[8] = {};
  pin(d);
  wgmma_fence();
  multiply(d, operand, tile_b(), false);
  wgmma_commit();
  if (!kBug) wgmma_wait<0>();
  asm volatile("add.u32 %0, %0, 1;" : "+r"(operand[0]));  // reported: operand_register_touched_in_flight
  wgmma_wait<0>();
  at<uint32_t>(a.scratch)[threadIdx.x] = operand[0];
  give(a, d);
}
SEEDED(operand_register_touched_in_flight)

template <bool kBug>
__device__ void operand_register_not_fenced(const Arguments& a) {
  fill_tiles_for_all();
  uint32_t operand[4];
  float d[8] = {};
  pin(d);
  if (kBug) wgmma_fence();
  load_matrices(operand, row_of_a());
  if (!kBug) wgmma_fence();
  multiply(d, operand, tile_b(), false);  // reported: operand_register_not_fenced
  wgmma_commit();
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(operand_register_not_fenced)

// Reading an accumulator between two products needs a fence as well.
template <bool kBug>
__device__ void accumulator_read_between(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {}, first;
  pin(d);
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);
  wgmma_commit();
  wgmma_wait<0>();
  asm volatile("mul.f32 %0, %1, 0f40000000;" : "=f"(first) : "f"(d[0]));
  if (!kBug) wgmma_fence();
  multiply(d, tile_a(), tile_b(), true);  // reported: accumulator_read_between
  wgmma_commit();
  wgmma_wait<0>();
  at<float>(a.scratch)[threadIdx.x] = first;
  give(a, d);
}
SEEDED(accumulator_read_between)

template <bool kBug>
__device__ void descriptor_differs(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {};
  pin(d);
  wgmma_fence();
  uint64_t step = kBug ? threadIdx.x / 32 % 2 * 2 : 0;
  multiply(d, tile_a(), tile_b() + step, false);  // reported: descriptor_differs
  wgmma_commit();
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(descriptor_differs)

template <bool kBug>
__device__ void warps_missing(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {};
  pin(d);
  if (!kBug || threadIdx.x < 96) {
    wgmma_fence();
    multiply(d, tile_a(), tile_b(), false);  // reported: warps_missing
    wgmma_commit();
    wgmma_wait<0>();
  }
  give(a, d);
}
SEEDED(warps_missing)

// Operands written by threads: each writer's fence, before the barrier that hands them over.
template <bool kBug>
__device__ void operands_without_proxy_fence(const Arguments& a) {
  fill_tiles();
  if (!kBug || threadIdx.x) fence_proxy_async();
  __syncthreads();
  float d[8] = {};
  pin(d);
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);  // reported: operands_without_proxy_fence
  wgmma_commit();
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(operands_without_proxy_fence)

// All four warps have to know that the operands are there.
template <bool kBug>
__device__ void one_warp_did_not_wait(const Arguments& a) {
  uint32_t full = ptx::shared_address(shared) + kTileA + kTileB;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full, kTileA + kTileB);
    load(ptx::shared_address(shared), a.input, kTileA + kTileB, full);
  }
  float d[8] = {};
  pin(d);
  if (!kBug || threadIdx.x < 96) wait(full, 0);
  __syncwarp();
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);  // reported: one_warp_did_not_wait
  wgmma_commit();
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(one_warp_did_not_wait)

template <bool kBug>
__device__ void operands_overwritten_in_flight(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {};
  pin(d);
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);
  wgmma_commit();
  if (!kBug) {
    wgmma_wait<0>();
    __syncthreads();
  }
  reinterpret_cast<volatile uint32_t*>(shared)[threadIdx.x] = 0;  // reported: operands_overwritten_in_flight
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(operands_overwritten_in_flight)

template <bool kBug>
__device__ void descriptor_out_of_bounds(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {};
  pin(d);
  wgmma_fence();
  multiply(d, tile_a(), tile_b() + (kBug ? 1024 >> 4 : 0), false);  // reported: descriptor_out_of_bounds
  wgmma_commit();
  wgmma_wait<0>();
  give(a, d);
}
SEEDED(descriptor_out_of_bounds)

template <bool kBug>
__device__ void not_committed(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {};
  pin(d);
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);
  if (!kBug) wgmma_commit();
  wgmma_wait<0>();
  give(a, d);  // reported: not_committed
}
SEEDED(not_committed)

// Two chained products without a fence between them are fine, and so is a wait for the older one only.
template <bool kBug>
__device__ void wait_covers_the_older_group_only(const Arguments& a) {
  fill_tiles_for_all();
  float d[8] = {}, e[8] = {};
  pin(d);
  pin(e);
  wgmma_fence();
  multiply(d, tile_a(), tile_b(), false);
  multiply(d, tile_a() + 2, tile_b() + 2, true);
  wgmma_commit();
  multiply(e, tile_a() + 4, tile_b() + 4, false);
  wgmma_commit();
  wgmma_wait<1>();
  if (kBug) {
    give(a, e);  // reported: wait_covers_the_older_group_only
  } else {
    give(a, d);
  }
  wgmma_wait<0>();
}
SEEDED(wait_covers_the_older_group_only)

template <bool kBug>
__device__ void setmaxnreg_of_one_warp(const Arguments& a) {
  if (!kBug || threadIdx.x < 32) release_registers<24>();  // reported: setmaxnreg_of_one_warp
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED_BOUNDED(setmaxnreg_of_one_warp, 128)

// Three warpgroups start with 168 registers a thread: what one gives up the others may take.
template <bool kBug>
__device__ void setmaxnreg_beyond_the_pool(const Arguments& a) {
  if (threadIdx.x < 128) {
    release_registers<40>();
  } else {
    acquire_registers<kBug ? 240 : 232>();  // reported: setmaxnreg_beyond_the_pool
  }
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED_BOUNDED(setmaxnreg_beyond_the_pool, 384)
