// The patches of a warp in a stage: where they go, and which k-steps have some (docs/FORMAT.md section 5).
#pragma once
#include "tile.cuh"

namespace unweight::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct PatchWriter {
  uint32_t* entries;  // nullptr where only their number is wanted
  uint32_t count = 0, ksteps = 0;

  // Bit i of `missing` says that register i of this lane needs a patch; `patch(i)` makes it.
  template <class Patch>
  __device__ __forceinline__ void add(int kstep, int lane, uint32_t missing, Patch patch) {
    if (!__any_sync(kAllLanes, missing)) return;
    const uint32_t lower = (1u << lane) - 1;
    uint32_t place = count, total = 0;
#pragma unroll
    for (int i = 0; i < kRegisters; i++) {
      const uint32_t lanes = __ballot_sync(kAllLanes, missing >> i & 1);
      place += __popc(lanes & lower);
      total += __popc(lanes);
    }
    ksteps |= 1u << kstep;
    count += total;
#pragma unroll
    for (int i = 0; i < kRegisters; i++)
      if (missing >> i & 1) {
        const uint32_t more = place + 1 < count ? kPatchContinues : 0;
        entries[place++] = patch(i) | static_cast<uint32_t>(kRegisters * lane + i) | more;
      }
  }
};

}  // namespace unweight::cuda
