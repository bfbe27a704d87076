// The patches of a warp in a stage: where they go, and which k-steps have some (docs/FORMAT.md section 5).
#pragma once
#include "tile.cuh"

namespace unweight::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Registers can't be indexed at run time.
__device__ __forceinline__ uint32_t pick(const uint32_t (&registers)[kRegisters], uint32_t i) {
  return i & 2 ? (i & 1 ? registers[3] : registers[2]) : (i & 1 ? registers[1] : registers[0]);
}

struct PatchWriter {
  uint32_t* entries;
  uint32_t count = 0, ksteps = 0;

  // Bit i of `missing` says that register i of this lane needs a patch; `exponents(register)` are what stands in it.
  template <class Exponents>
  __device__ __forceinline__ void add(int kstep, int lane, uint32_t missing, const uint32_t (&registers)[kRegisters],
                                      Exponents exponents) {
    if (!__any_sync(kAllLanes, missing)) return;
    const uint32_t lower = (1u << lane) - 1;
    uint32_t place = count;
#pragma unroll
    for (int i = 0; i < kRegisters; i++) {
      const uint32_t lanes = __ballot_sync(kAllLanes, missing >> i & 1);
      place += __popc(lanes & lower);
      count += __popc(lanes);
    }
    ksteps |= 1u << kstep;
    for (; missing; missing &= missing - 1, place++) {
      const uint32_t i = __ffs(missing) - 1;
      const uint32_t more = place + 1 < count ? kPatchContinues : 0;
      entries[place] = exponents(pick(registers, i)) | (kRegisters * lane + i) | more;
    }
  }
};

}  // namespace unweight::cuda
