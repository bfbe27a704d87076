// Activations that threads copy with cp.async to their swizzled places, zeros where there are no tokens, for a product
// with 256 of them: two warpgroups multiply, of a third one warp copies.
#include "seeded.cuh"

constexpr uint32_t kTokens = 256, kColumns = 64, kRowBytes = 2 * kColumns;
constexpr uint32_t kMultipliers = 256, kTileBytes = kTokens * kRowBytes;

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ void copy_16(uint32_t to, uint64_t from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// One k-step.
__device__ __forceinline__ void multiply(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
      ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
      ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
      ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72),
        EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

enum Bug {
  kClean,
  kNoProxyFence,  // by the lanes that copied
  kNoWait,        // for the copies
  kNoMeeting,     // one lane arrives for others that may not be so far
  kNoTurns,       // both warpgroups use the exchange area at once
};

// Tokens from a.count on don't exist: zeros in their place, and nothing is read.
template <Bug kBug>
__device__ void copy_tokens(const Arguments& a, uint32_t tile, uint32_t full) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = lane; i < kTokens * kRowBytes / 16; i += 32) {
    const uint32_t token = i / 8, chunk = i % 8;
    copy_16(tile + token * kRowBytes + ((chunk ^ (token % 8)) << 4), a.input + token * kRowBytes + chunk * 16,
            token < a.count ? 16 : 0);
  }
  if (kBug != kNoWait) wait_for_copies();
  if (kBug != kNoProxyFence) fence_proxy_async();
  if (kBug != kNoMeeting) __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(full);
  if (kBug == kNoWait) wait_for_copies();
}

// Each thread's sum over its outputs, exchanged by a warpgroup at a time.
template <Bug kBug>
__device__ void multiply_tokens(const Arguments& a, uint32_t tile, uint32_t full, uint32_t* exchange) {
  float d[128] = {};
#pragma unroll
  for (uint32_t i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
  const uint32_t* from = at<uint32_t>(a.scratch) + threadIdx.x * 16;
  uint32_t registers[4][4];
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) registers[k][i] = from[4 * k + i];
  wait(full, 0);
  wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) multiply(d, registers[k], tile_descriptor(tile) + 2 * k);  // reported: multiply
  wgmma_commit();
  wgmma_wait<0>();
  float sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < 128; ++i) sum += d[i];
  const uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (group == 1 && kBug != kNoTurns) named_barrier<1>(kMultipliers);
  exchange[thread] = __float_as_uint(sum);  // reported: exchange
  if (group == 0)
    named_barrier<2>(128);  // of this warpgroup's warps alone
  else
    named_barrier<3>(128);
  at<uint32_t>(a.output)[threadIdx.x] = exchange[thread ^ 64];
  if (group == 0 && kBug != kNoTurns) named_barrier<1>(kMultipliers);
}

template <Bug kBug>
__device__ void tokens(const Arguments& a) {
  __shared__ uint64_t barrier;
  __shared__ uint32_t exchange[128];
  const uint32_t tile = ptx::shared_address(shared), full = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kMultipliers) {
    release_registers<40>();
    if (threadIdx.x < kMultipliers + 32) copy_tokens<kBug>(a, tile, full);
  } else {
    acquire_registers<232>();
    multiply_tokens<kBug>(a, tile, full, exchange);
  }
}

#define TOKENS(name, bug)                                                                                   \
  extern "C" __global__ void __launch_bounds__(384, 1) tokens_##name(const __grid_constant__ Arguments a) { \
    tokens<bug>(a);                                                                                         \
  }
TOKENS(clean, kClean)
TOKENS(no_proxy_fence, kNoProxyFence)
TOKENS(no_wait, kNoWait)
TOKENS(no_meeting, kNoMeeting)
TOKENS(no_turns, kNoTurns)
