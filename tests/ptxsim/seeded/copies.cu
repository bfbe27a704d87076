// mbarriers and bulk copies.
#include "seeded.cuh"

constexpr uint32_t kBytes = 512;

// One thread makes a barrier that all will see, and starts a copy of kBytes into `words`.
struct Slot {
  alignas(128) uint32_t words[kBytes / 4];
  alignas(8) uint64_t full;
};

__device__ __forceinline__ uint32_t full_of(Slot& slot) { return ptx::shared_address(&slot.full); }
__device__ __forceinline__ uint32_t words_of(Slot& slot) { return ptx::shared_address(slot.words); }

__device__ __forceinline__ void make_barrier(Slot& slot, uint32_t arrivals = 1) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full_of(slot), arrivals);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

__device__ __forceinline__ void give(const Arguments& a, const Slot& slot) {
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) at<uint32_t>(a.output)[i] = slot.words[i];
}

template <bool kBug>
__device__ void barrier_used_before_init_is_visible(const Arguments& a) {
  __shared__ Slot slot;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full_of(slot), 1);
    ptx::fence_mbarrier_init();
  }
  if (!kBug) __syncthreads();
  if (threadIdx.x == 0) ptx::mbarrier_arrive(full_of(slot));
  if (threadIdx.x == 32) {
    wait(full_of(slot), 0);  // reported: barrier_used_before_init_is_visible
  }
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(barrier_used_before_init_is_visible)

template <bool kBug>
__device__ void barrier_without_init(const Arguments& a) {
  __shared__ Slot slot;
  if (!kBug) make_barrier(slot);
  if (threadIdx.x == 0) ptx::mbarrier_arrive(full_of(slot));  // reported: barrier_without_init
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(barrier_without_init)

template <bool kBug>
__device__ void init_without_inval(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    if (!kBug) mbarrier_inval(full_of(slot));
    ptx::mbarrier_init(full_of(slot), 1);  // reported: init_without_inval
  }
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(init_without_inval)

template <bool kBug>
__device__ void arrival_underflow(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    if (kBug) ptx::mbarrier_arrive(full_of(slot));  // reported: arrival_underflow
    load(words_of(slot), a.input, kBytes, full_of(slot));
  }
  wait(full_of(slot), 0);
  give(a, slot);
}
SEEDED(arrival_underflow)

template <bool kBug>
__device__ void bytes_never_come(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes + 16 * kBug);
    load(words_of(slot), a.input, kBytes, full_of(slot));
  }
  wait(full_of(slot), 0);  // reported: bytes_never_come
  give(a, slot);
}
SEEDED(bytes_never_come)

template <bool kBug>
__device__ void barrier_overwritten(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    if (kBug) slot.full = 0;
    ptx::mbarrier_arrive(full_of(slot));  // reported: barrier_overwritten
  }
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(barrier_overwritten)

template <bool kBug>
__device__ void copy_of_odd_size(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    uint32_t bytes = kBytes - 8 * kBug;
    ptx::mbarrier_arrive_expect(full_of(slot), bytes);
    load(words_of(slot), a.input, bytes, full_of(slot));  // reported: copy_of_odd_size
  }
  wait(full_of(slot), 0);
  at<uint32_t>(a.output)[threadIdx.x] = slot.words[threadIdx.x];
}
SEEDED(copy_of_odd_size)

template <bool kBug>
__device__ void copy_past_the_tensor(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input + 16 * kBug, kBytes, full_of(slot));  // reported: copy_past_the_tensor
  }
  wait(full_of(slot), 0);
  give(a, slot);
}
SEEDED(copy_past_the_tensor)

template <bool kBug>
__device__ void copy_into_the_barrier(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    uint32_t bytes = kBytes + 128 * kBug;
    ptx::mbarrier_arrive_expect(full_of(slot), bytes);
    load(words_of(slot), a.input, bytes, full_of(slot));  // reported: copy_into_the_barrier
  }
  wait(full_of(slot), 0);
  give(a, slot);
}
SEEDED(copy_into_the_barrier)

template <bool kBug>
__device__ void data_read_without_waiting(const Arguments& a) {
  __shared__ Slot slot;
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) slot.words[i] = 0;
  fence_proxy_async();
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input, kBytes, full_of(slot));  // reported: data_read_without_waiting
  }
  if (!kBug || threadIdx.x < 32) wait(full_of(slot), 0);
  at<uint32_t>(a.output)[threadIdx.x] = slot.words[threadIdx.x];  // reported: data_read_without_waiting
  wait(full_of(slot), 0);
}
SEEDED(data_read_without_waiting)

// Waiting for the parity of the phase before passes at once.
template <bool kBug>
__device__ void wrong_parity(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input, kBytes, full_of(slot));  // reported: wrong_parity
  }
  wait(full_of(slot), kBug);                                      // reported: wrong_parity
  at<uint32_t>(a.output)[threadIdx.x] = slot.words[threadIdx.x];  // reported: wrong_parity
  wait(full_of(slot), 0);
}
SEEDED(wrong_parity)

// Threads wrote zeros where a copy then writes: other threads' writes must be handed over first, through the proxy.
template <bool kBug>
__device__ void overwritten_without_proxy_fence(const Arguments& a) {
  __shared__ Slot slot;
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) slot.words[i] = 0;
  if (!kBug) fence_proxy_async();
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input, kBytes, full_of(slot));  // reported: overwritten_without_proxy_fence
  }
  wait(full_of(slot), 0);
  give(a, slot);
}
SEEDED(overwritten_without_proxy_fence)

template <bool kBug>
__device__ void init_not_fenced(const Arguments& a) {
  __shared__ Slot slot;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full_of(slot), 1);
    if (!kBug) ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input, kBytes, full_of(slot));  // reported: init_not_fenced
  }
  wait(full_of(slot), 0);
  give(a, slot);
}
SEEDED(init_not_fenced)

// Two rounds through one buffer: a store must have read it before it is filled again.
template <bool kBug>
__device__ void slot_still_being_stored(const Arguments& a) {
  __shared__ Slot slot;
#pragma unroll 1
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) {
      slot.words[i] = i + round;  // reported: slot_still_being_stored
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      store(a.output + round * kBytes, words_of(slot), kBytes);  // reported: slot_still_being_stored
      commit_stores();
      if (!kBug) wait_for_store_reads();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) wait_for_stores();
}
SEEDED(slot_still_being_stored)

template <bool kBug>
__device__ void store_without_proxy_fence(const Arguments& a) {
  __shared__ Slot slot;
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) slot.words[i] = i;
  if (!kBug) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store(a.output, words_of(slot), kBytes);  // reported: store_without_proxy_fence
    commit_stores();
    wait_for_stores();
  }
}
SEEDED(store_without_proxy_fence)

template <bool kBug>
__device__ void store_pending_at_exit(const Arguments& a) {
  __shared__ Slot slot;
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) slot.words[i] = i;
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store(a.output, words_of(slot), kBytes);  // reported: store_pending_at_exit
    commit_stores();
    if (!kBug) wait_for_stores();
  }
}
SEEDED(store_pending_at_exit)

template <bool kBug>
__device__ void load_pending_at_exit(const Arguments& a) {
  __shared__ Slot slot;
  make_barrier(slot);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full_of(slot), kBytes);
    load(words_of(slot), a.input, kBytes, full_of(slot));  // reported: load_pending_at_exit
  }
  if (!kBug) wait(full_of(slot), 0);
  at<uint32_t>(a.output)[threadIdx.x] = 1;
}
SEEDED(load_pending_at_exit)

// A store's data is read back by the thread that waited only for its source to be read.
template <bool kBug>
__device__ void store_read_back_too_early(const Arguments& a) {
  __shared__ Slot slot;
  for (uint32_t i = threadIdx.x; i < kBytes / 4; i += blockDim.x) slot.words[i] = i;
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store(a.scratch, words_of(slot), kBytes);  // reported: store_read_back_too_early
    commit_stores();
    if (kBug) {
      wait_for_store_reads();
    } else {
      wait_for_stores();
    }
    *at<uint32_t>(a.output) = *at<volatile uint32_t>(a.scratch + 4);  // reported: store_read_back_too_early
    wait_for_stores();
  }
}
SEEDED(store_read_back_too_early)
