// The ring of slots between the warps that copy and those that multiply: each slot takes the x of one stage, and one
// stage for each block of a group.
#pragma once
#include "../../format/header.h"
#include "../ptx.cuh"
#include "../staging.cuh"
#include "config.h"
#include "walk.cuh"
#include "wgmma.cuh"

namespace unweight::cuda {

// kOfLayout: of the matrices, or -1 for any.
template <int kOfLayout, int kTokens>
struct Instance {
  static constexpr int kAny = -1, kLayout = kOfLayout, kN = kTokens;
  static constexpr bool kHasTable = kLayout == kAny || kLayout == static_cast<int>(Layout::kHuffman);
  static constexpr bool kRawStages = kLayout != static_cast<int>(Layout::kNibble);

  static constexpr uint32_t kWarpgroups = linear_warpgroups(kTokens);
  static constexpr LinearShared kShared = linear_shared(kTokens, kWarpgroups, kRawStages, kHasTable);
  static constexpr uint32_t kConsumers = kWarpgroups * kWarpgroupThreads, kThreads = kConsumers + kWarpgroupThreads;
  // The register file is dealt out anew where sums take much of it.
  static constexpr bool kMovesRegisters = kTokens >= 128;
};

template <class I>
struct Ring {
  uint32_t shared;  // the address of everything
  uint32_t slot = 0, phase = 0;

  __device__ __forceinline__ explicit Ring(uint32_t shared) : shared(shared) {}
  __device__ __forceinline__ uint32_t x() const { return shared + I::kShared.x + I::kShared.x_bytes * slot; }
  // As wgmma wants it.
  __device__ __forceinline__ uint32_t x_descriptor_low() const {
    return ptx::wgmma_descriptor_low(shared + I::kShared.x) + I::kShared.x_bytes / 16 * slot;
  }
  __device__ __forceinline__ uint32_t stage(uint32_t block) const {
    return shared + I::kShared.stages + I::kShared.stage_bytes * block + I::kShared.stage_bytes * I::kWarpgroups * slot;
  }
  __device__ __forceinline__ uint32_t length(uint32_t block) const {
    return shared + I::kShared.lengths + 4 * block + 4 * I::kWarpgroups * slot;
  }
  __device__ __forceinline__ uint32_t full() const { return shared + I::kShared.barriers + 8 * slot; }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8 * I::kShared.slots; }
  __device__ __forceinline__ void wait_full() const { wait_phase(full(), phase); }
  __device__ __forceinline__ void wait_empty() const { wait_phase(empty(), phase ^ 1); }
  __device__ __forceinline__ void next() {
    if (++slot == I::kShared.slots) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ SharedWork work() const {
    return {shared + I::kShared.shares + 4 * kShareWords * (threadIdx.x / kLanes)};
  }
  // By one thread, before all meet.
  __device__ __forceinline__ void make_barriers() const {
    for (uint32_t i = 0; i < I::kShared.slots; i++) {
      const uint32_t full = shared + I::kShared.barriers + 8 * i;
      ptx::mbarrier_init(full, I::kWarpgroups + kLoaderWarps);
      ptx::mbarrier_init(full + 8 * I::kShared.slots, I::kWarpgroups * kWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace unweight::cuda
