// A kernel that may start before the one launched before it is complete: what it may do until then.
#include "seeded.cuh"

__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_later() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void prefetch(uint64_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint32_t load_now(uint64_t from) {
  uint32_t value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The first word says where to prefetch from: a guess, and bounded; then it is read again.
template <bool kBug>
__device__ void prefetch_by_an_index(const Arguments& a) {
  const uint32_t lane = threadIdx.x;
  launch_later();
  if (lane == 0) {
    const uint32_t guess = kBug ? *at<uint32_t>(a.input) : load_now(a.input);  // reported: prefetch_by_an_index
    prefetch(a.input + min(guess, 15u) * 16, 256);
  }
  wait_for_earlier();
  at<uint32_t>(a.output)[lane] = at<uint32_t>(a.input)[lane];
}
SEEDED(prefetch_by_an_index)

// One thread waits, and a barrier hands that on.
template <bool kBug>
__device__ void one_thread_waits(const Arguments& a) {
  if (kBug) __syncthreads();
  if (threadIdx.x == 0) wait_for_earlier();
  if (!kBug) __syncthreads();
  at<uint32_t>(a.output)[threadIdx.x] = threadIdx.x;  // reported: one_thread_waits
}
SEEDED(one_thread_waits)

// A bulk copy knows what its thread knew.
template <bool kBug>
__device__ void copy_before_the_wait(const Arguments& a) {
  __shared__ __align__(16) uint32_t words[128];
  __shared__ uint64_t barrier;
  const uint32_t to = ptx::shared_address(words), full = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    if (!kBug) wait_for_earlier();
    ptx::mbarrier_arrive_expect(full, sizeof words);
    load(to, a.input, sizeof words, full);  // reported: copy_before_the_wait
    if (kBug) wait_for_earlier();
  }
  __syncthreads();
  wait(full, 0);
  at<uint32_t>(a.output)[threadIdx.x] = words[threadIdx.x];
}
SEEDED(copy_before_the_wait)

// Neither does an atomic operation wait by itself.
template <bool kBug>
__device__ void counted_before_the_wait(const Arguments& a) {
  if (!kBug) wait_for_earlier();
  atomicAdd(at<uint32_t>(a.output), 1u);  // reported: counted_before_the_wait
  if (kBug) wait_for_earlier();
}
SEEDED(counted_before_the_wait)
