// Packed bytes on their way to shared memory, and weights on theirs out of registers: the two things that GPUs before
// Hopper do by other instructions. All the rest of the reading kernels is the same code for all of them.
#pragma once
#include "ptx.cuh"
#include "unpack_shared.h"

namespace unweight::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHopper = false;
#else
constexpr bool kHopper = true;  // or newer
#endif

// Arrivals that complete a phase of a barrier of copies. Without bulk copies each lane copies a part, and arrives when
// it is there; lane 0 arrives once more, for what it wrote itself.
constexpr uint32_t kCopyArrivals = kHopper ? 1 : kLanes + 1;

// A warp's lanes call it together: bytes from global to shared memory, all multiples of 16 (0: none), as one phase of
// `barrier`. Who waits for that also sees what lane 0 wrote before.
static __device__ __forceinline__ void copy_to_shared(uint32_t to, const uint8_t* from, uint32_t bytes,
                                                      uint32_t barrier, uint32_t lane, uint64_t policy) {
  if constexpr (kHopper) {
    if (lane != 0) return;
    ptx::mbarrier_arrive_expect(barrier, bytes);
    if (bytes) ptx::bulk_load(to, from, bytes, barrier, policy);
  } else {
#pragma unroll 4
    for (uint32_t i = 16 * lane; i < bytes; i += 16 * kLanes) ptx::copy_async(to + i, from + i, 16);
    ptx::mbarrier_arrive_after_copies(barrier);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
}

static __device__ __forceinline__ void wait_phase(uint32_t barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
}

// Where a lane stores its part of a k-step. Registers are 8 x 8 matrices: the odd ones 8 rows below, the last two 8
// columns further.
static __device__ __forceinline__ uint32_t matrix_row(uint32_t tile, uint32_t lane) {
  if constexpr (kHopper) return tile + (lane % 16) * kTilePitch + lane / 16 * 16;
  return tile + lane / 4 * kTilePitch + lane % 4 * 4;
}

static __device__ __forceinline__ void store_kstep(uint32_t to, const uint32_t (&registers)[kRegisters]) {
  if constexpr (kHopper) {
    ptx::store_matrices(to, registers);
  } else {
#pragma unroll
    for (int i = 0; i < kRegisters; i++)
      ptx::store_shared(to + (i & 1 ? 8 * kTilePitch : 0) + (i >> 1) * 16, registers[i]);
  }
}

}  // namespace unweight::cuda
