// Accesses that nothing orders: between lanes, warps and CTAs.
#include "seeded.cuh"

template <bool kBug>
__device__ void lanes_without_syncwarp(const Arguments& a) {
  __shared__ uint32_t words[32];
  words[threadIdx.x] = threadIdx.x;
  if (!kBug) __syncwarp();
  uint32_t other = *const_cast<volatile uint32_t*>(&words[threadIdx.x ^ 1]);  // reported: lanes_without_syncwarp
  at<uint32_t>(a.output)[threadIdx.x] = other;
}
SEEDED(lanes_without_syncwarp)

template <bool kBug>
__device__ void warps_without_barrier(const Arguments& a) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  if (kBug) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  at<uint32_t>(a.output)[threadIdx.x] = words[threadIdx.x ^ 32];  // reported: warps_without_barrier
}
SEEDED(warps_without_barrier)

// Rounds through one buffer: the next round must not overwrite what others still read.
template <bool kBug>
__device__ void buffer_reused_too_early(const Arguments& a) {
  __shared__ uint32_t words[64];
  uint32_t sum = 0;
#pragma unroll 1
  for (uint32_t round = 0; round < 2; ++round) {
    words[threadIdx.x] = threadIdx.x + round;  // reported: buffer_reused_too_early
    __syncthreads();
    sum += words[threadIdx.x ^ 32];
    if (!kBug) __syncthreads();
  }
  at<uint32_t>(a.output)[threadIdx.x] = sum;
}
SEEDED(buffer_reused_too_early)

template <bool kBug>
__device__ void ctas_add_without_atomics(const Arguments& a) {
  uint32_t* sum = at<uint32_t>(a.output);
  if (threadIdx.x) return;
  if (kBug) {
    *sum = *sum + 1;  // reported: ctas_add_without_atomics
  } else {
    atomicAdd(sum, 1);
  }
}
SEEDED(ctas_add_without_atomics)

// Every CTA leaves a partial sum; the last one to count itself adds them up.
template <bool kBug>
__device__ void last_block_without_fence(const Arguments& a) {
  __shared__ bool last;
  uint32_t* partial = at<uint32_t>(a.scratch);
  uint32_t* finished = at<uint32_t>(a.output) + 1;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = blockIdx.x + 1;
    if (!kBug) __threadfence();
    last = atomicAdd(finished, 1) == gridDim.x - 1;
    if (!kBug) __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < gridDim.x; ++i) {
      sum += partial[i];  // reported: last_block_without_fence
    }
    *at<uint32_t>(a.output) = sum;
  }
}
SEEDED(last_block_without_fence)

template <bool kBug>
__device__ void lanes_write_different_values(const Arguments& a) {
  __shared__ uint32_t flag;
  flag = kBug ? threadIdx.x : 1;  // reported: lanes_write_different_values
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = flag;
}
SEEDED(lanes_write_different_values)
