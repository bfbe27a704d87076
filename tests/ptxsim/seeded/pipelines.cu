// What larger kernels are made of: pipelines of copies, reductions, counters between CTAs, epilogues.
#include "seeded.cuh"

__device__ __forceinline__ void copy_async(uint32_t to, uint64_t from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

constexpr uint32_t kThreads = 64, kSlots = 3, kStages = 4, kSlotWords = 4 * kThreads;

// Three slots, two stages ahead: a thread's own copies are there, and behind the barrier everybody's.
template <bool kBug>
__device__ void stages_of_thread_copies(const Arguments& a) {
  __shared__ alignas(16) uint32_t slots[kSlots][kSlotWords];
  auto start = [&](uint32_t stage) {
    if (stage < kStages)
      copy_async(ptx::shared_address(slots[stage % kSlots] + 4 * threadIdx.x),
                 a.input + 4 * (stage * kSlotWords + 4 * threadIdx.x));
    commit_copies();
  };
  start(0);
  start(1);
  uint32_t sum = 0;
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    wait_for_copies<kBug ? 2 : 1>();
    __syncthreads();
    start(stage + 2);
    for (uint32_t i = 0; i < 4; ++i)
      sum += slots[stage % kSlots][(4 * threadIdx.x + 37 * i + 5) % kSlotWords];  // reported: stages_of_thread_copies
  }
  at<uint32_t>(a.output)[threadIdx.x] = sum;
  wait_for_copies<0>();
}
SEEDED(stages_of_thread_copies)

__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies of threads, handed over by an mbarrier: a producer warp never waits for them itself.
template <bool kBug>
__device__ void thread_copies_through_a_barrier(const Arguments& a) {
  __shared__ alignas(16) uint32_t words[4 * 32];
  __shared__ uint64_t full;
  uint32_t barrier = ptx::shared_address(&full);
  if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    copy_async(ptx::shared_address(words + 4 * threadIdx.x), a.input + 16 * threadIdx.x);
    if (kBug)
      ptx::mbarrier_arrive(barrier);
    else
      arrive_when_copied(barrier);
  } else {
    wait(barrier, 0);
    for (uint32_t i = threadIdx.x - 32; i < 128; i += 32)
      at<uint32_t>(a.output)[i] = words[i];  // reported: thread_copies_through_a_barrier
  }
  wait_for_copies<0>();
}
SEEDED(thread_copies_through_a_barrier)

// cp.async writes as threads do: what bulk copies and wgmma read of it needs a fence.
template <bool kBug>
__device__ void thread_copies_stored_without_proxy_fence(const Arguments& a) {
  __shared__ alignas(128) uint32_t words[4 * 32];
  copy_async(ptx::shared_address(words + 4 * threadIdx.x), a.input + 16 * threadIdx.x);
  commit_copies();
  wait_for_copies<0>();
  if (!kBug) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    store(a.output, ptx::shared_address(words), 512);  // reported: thread_copies_stored_without_proxy_fence
    commit_stores();
    wait_for_stores();
  }
}
SEEDED(thread_copies_stored_without_proxy_fence)

// Sums of 8 lanes, then of a warp, then of the CTA. The lanes of a half-warp meet among themselves.
template <bool kBug>
__device__ void sums_of_halves(const Arguments& a) {
  __shared__ uint32_t sums[2 * 2];
  uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, value = at<const uint32_t>(a.input)[threadIdx.x];
  for (uint32_t step = 4; step; step /= 2) value += __shfl_xor_sync(~0u, value, step, 8);
  if (lane < 16) {
    value += __shfl_sync(0x0000FFFFu, value, kBug ? 24 : 8);  // reported: sums_of_halves
    if (lane == 0) sums[2 * warp] = value;
  } else {
    value += __shfl_down_sync(0xFFFF0000u, value, 8);
    if (lane == 16) sums[2 * warp + 1] = value;
  }
  __syncthreads();
  if (warp == 0) {
    uint32_t total = lane < 4 ? sums[lane] : 0;
    total = __reduce_add_sync(~0u, total);
    if (lane == 0) at<uint32_t>(a.output)[0] = total;
  }
}
SEEDED(sums_of_halves)

__device__ __forceinline__ uint64_t arrive(uint32_t barrier) {
  uint64_t token;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(barrier) : "memory");
  return token;
}
__device__ __forceinline__ bool test(uint32_t barrier, uint64_t token) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "l"(token)
               : "memory");
  return done;
}

// Tokens and polling, as cuda::barrier does it; two phases in which neighbours exchange values.
template <bool kBug>
__device__ void exchange_by_tokens(const Arguments& a) {
  __shared__ uint32_t values[kThreads];
  __shared__ uint64_t object;
  uint32_t barrier = ptx::shared_address(&object), value = threadIdx.x;
  if (threadIdx.x == 0) ptx::mbarrier_init(barrier, kThreads);
  __syncthreads();
  for (uint32_t round = 0; round < 3; ++round) {
    values[threadIdx.x] = value;
    uint64_t token = arrive(barrier);
    while (!test(barrier, token)) __nanosleep(20);
    value += values[(threadIdx.x + 33) % kThreads];  // reported: exchange_by_tokens
    token = arrive(barrier);
    if (!kBug)
      while (!test(barrier, token)) __nanosleep(20);
  }
  at<uint32_t>(a.output)[threadIdx.x] = value;
}
SEEDED(exchange_by_tokens)

__device__ __forceinline__ uint32_t load_acquire(uint64_t address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed(uint64_t address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(uint64_t address) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(address) : "memory");
}

// CTAs add to one tile, each when the one before has: a semaphore that one thread takes for all.
template <bool kBug>
__device__ void tile_in_turns(const Arguments& a) {
  uint64_t turn = a.scratch;
  if (threadIdx.x == 0)
    while ((kBug ? load_relaxed(turn) : load_acquire(turn)) != 1 + blockIdx.x) {
    }
  __syncthreads();
  at<uint32_t>(a.output)[threadIdx.x] += at<const uint32_t>(a.input)[threadIdx.x];  // reported: tile_in_turns
  __syncthreads();
  if (threadIdx.x == 0) add_release(turn);
}
SEEDED(tile_in_turns)

// A barrier of the whole grid, by a counter.
template <bool kBug>
__device__ void barrier_of_the_grid(const Arguments& a) {
  uint32_t mine = blockIdx.x * blockDim.x + threadIdx.x, other = (mine + blockDim.x) % (gridDim.x * blockDim.x);
  at<uint32_t>(a.output)[mine] = mine;
  if (!kBug) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!kBug) __threadfence();
    atomicAdd(at<uint32_t>(a.scratch), 1u);
    while (*at<volatile uint32_t>(a.scratch) != 1 + gridDim.x) {
    }
    __threadfence();
  }
  __syncthreads();
  uint32_t found = at<uint32_t>(a.output)[other];  // reported: barrier_of_the_grid
  if (found != other) __trap();
}
SEEDED(barrier_of_the_grid)

// An epilogue: tiles go out one after the other through one slot. Who fills it again knows that it was read.
template <bool kBug>
__device__ void epilogue_of_two_tiles(const Arguments& a) {
  __shared__ alignas(128) uint32_t tile[kThreads];
  for (uint32_t i = 0; i < 2; ++i) {
    if (threadIdx.x == 0 && (i == 0 || !kBug)) wait_for_store_reads();
    named_barrier<1>(kThreads);
    tile[threadIdx.x] = threadIdx.x + i;  // reported: epilogue_of_two_tiles
    fence_proxy_async();
    named_barrier<1>(kThreads);
    if (threadIdx.x == 0) {
      store(a.output + 256 * i, ptx::shared_address(tile), 256);
      commit_stores();
    }
  }
  if (threadIdx.x == 0) wait_for_stores();
}
SEEDED(epilogue_of_two_tiles)

// What threads wrote to global memory and a bulk copy then reads.
template <bool kBug>
__device__ void copied_back_without_proxy_fence(const Arguments& a) {
  __shared__ alignas(128) uint32_t words[32];
  __shared__ uint64_t full;
  uint32_t barrier = ptx::shared_address(&full);
  at<uint32_t>(a.scratch)[threadIdx.x] = threadIdx.x;
  if (!kBug) asm volatile("fence.proxy.async;" ::: "memory");
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(barrier, 128);
    load(ptx::shared_address(words), a.scratch, 128, barrier);  // reported: copied_back_without_proxy_fence
  }
  wait(barrier, 0);
  at<uint32_t>(a.output)[threadIdx.x] = words[threadIdx.x];
}
SEEDED(copied_back_without_proxy_fence)

// A flag says that a value is there.
template <bool kBug>
__device__ void message_to_another_warp(const Arguments& a) {
  __shared__ uint32_t value;
  __shared__ volatile uint32_t flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    value = at<const uint32_t>(a.input)[0];
    if (!kBug) __threadfence_block();
    flag = 1;
  }
  if (threadIdx.x == 32) {
    while (flag == 0) {
    }
    __threadfence_block();
    at<uint32_t>(a.output)[0] = value;  // reported: message_to_another_warp
  }
}
SEEDED(message_to_another_warp)
