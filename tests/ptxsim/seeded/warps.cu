// Lanes and warps that should meet, and don't.
#include "seeded.cuh"

template <bool kBug>
__device__ void shuffle_of_missing_lanes(const Arguments& a) {
  uint32_t value = threadIdx.x;
  if (threadIdx.x < 16) {
    value = __shfl_xor_sync(kBug ? 0xffffffffu : 0xffffu, value, 1);  // reported: shuffle_of_missing_lanes
  }
  at<uint32_t>(a.output)[threadIdx.x] = value;
}
SEEDED(shuffle_of_missing_lanes)

template <bool kBug>
__device__ void divergent_barrier(const Arguments& a) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  if (!kBug || threadIdx.x % 2) {
    __syncthreads();  // reported: divergent_barrier
  }
  if (threadIdx.x % 2) at<uint32_t>(a.output)[threadIdx.x] = words[63 - threadIdx.x];
}
SEEDED(divergent_barrier)

template <bool kBug>
__device__ void barrier_counts_differ(const Arguments& a) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  named_barrier<1>(kBug && threadIdx.x < 32 ? 96 : 64);  // reported: barrier_counts_differ
  at<uint32_t>(a.output)[threadIdx.x] = words[63 - threadIdx.x];
}
SEEDED(barrier_counts_differ)

template <bool kBug>
__device__ void barrier_count_too_large(const Arguments& a) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  named_barrier<1>(kBug ? 96 : 64);  // reported: barrier_count_too_large
  at<uint32_t>(a.output)[threadIdx.x] = words[63 - threadIdx.x];
}
SEEDED(barrier_count_too_large)

template <bool kBug>
__device__ void barrier_of_an_exited_warp(const Arguments& a) {
  if (kBug && threadIdx.x >= 32) return;
  at<uint32_t>(a.output)[threadIdx.x] = threadIdx.x;
  named_barrier<2>(64);  // reported: barrier_of_an_exited_warp
}
SEEDED(barrier_of_an_exited_warp)

template <bool kBug>
__device__ void diverged_matrix_store(const Arguments& a) {
  __shared__ alignas(16) uint32_t rows[32];
  rows[threadIdx.x] = 0;
  __syncwarp();
  if (!kBug || threadIdx.x < 24) {
    store_matrix(ptx::shared_address(rows) + 16 * (threadIdx.x % 8), threadIdx.x);  // reported: diverged_matrix_store
  }
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = rows[threadIdx.x];
}
SEEDED(diverged_matrix_store)

template <bool kBug>
__device__ void endless_loop(const Arguments& a) {
  volatile uint32_t* word = at<volatile uint32_t>(a.scratch);
  *word = a.count;
  while (kBug ? *word != 0 : *word == 0) {  // reported: endless_loop
  }
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(endless_loop)

template <bool kBug>
__device__ void trap_on_bad_input(const Arguments& a) {
  if (kBug && *at<const uint32_t>(a.input) != 12345) __trap();  // reported: trap_on_bad_input
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(trap_on_bad_input)
