// The shape of a product with packed weights: a ring of bulk copies, weights decoded to registers, of which one half is
// multiplied while the other is filled, and a slot that is given back one group late. D = A B^T, 64 x 16, FP32 sums.
#include "seeded.cuh"

enum Bug {
  kClean,
  kLanesStillRead,     // a lane gives the slot back for lanes that it hasn't met
  kWaitTooShort,       // the registers of a group in flight are filled again
  kOneBuffer,          // likewise, and no second half
  kSlotInFlight,       // the newest group still reads the slot that is given back
  kFenceTooEarly,      // before the registers are written
  kNoLastWait,         // sums are stored while a group adds to them
  kSlotForgotten,      // the first slot is never given back
  kOneWarpDoesntWait,  // for the slot to be full
};

constexpr uint32_t kSlots = 2, kKSteps = 4, kHalf = 2;              // k-steps of a stage, and of a group
constexpr uint32_t kWeightBytes = 128 * 16 * kKSteps;               // each thread's registers of a k-step
constexpr uint32_t kTokenBytes = 16 * 128, kSlotBytes = 11 * 1024;  // a tile of 16 rows; slots are 1024-aligned
constexpr uint32_t kBarriers = kSlots * kSlotBytes, kConsumers = 128;

extern __shared__ __align__(1024) uint8_t shared[];

__device__ void produce(const Arguments& a, uint32_t base, uint32_t full, uint32_t empty) {
  for (uint32_t stage = 0; stage < a.count; ++stage) {
    uint32_t slot = stage % kSlots, to = base + slot * kSlotBytes;
    wait(empty + 8 * slot, stage / kSlots + 1 & 1);
    ptx::mbarrier_arrive_expect(full + 8 * slot, kTokenBytes + kWeightBytes);
    load(to, a.scratch + stage * kTokenBytes, kTokenBytes, full + 8 * slot);
    load(to + kTokenBytes, a.input + stage * kWeightBytes, kWeightBytes, full + 8 * slot);
  }
}

// Stands for decoding: weights lie in memory with their bits turned over.
__device__ __forceinline__ void decode(uint32_t from, uint32_t (&registers)[4]) {
  uint4 words = ptx::load_shared_quad(from);
  registers[0] = ~words.x, registers[1] = ~words.y, registers[2] = ~words.z, registers[3] = ~words.w;
}

template <Bug kBug>
__device__ void consume(const Arguments& a, uint32_t base, uint32_t full, uint32_t empty) {
  float d[8] = {};
  pin(d);
  uint32_t registers[2][kHalf][4];
  const uint32_t lane = threadIdx.x % 32;
  const auto give_back = [&](uint32_t stage) {
    if (kBug != kLanesStillRead) __syncwarp();  // meeting at a wgmma orders no memory accesses
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * (stage % kSlots));
  };
  for (uint32_t stage = 0; stage < a.count; ++stage) {
    uint32_t slot = stage % kSlots, tile = base + slot * kSlotBytes;
    if (kBug != kOneWarpDoesntWait || threadIdx.x >= 32) wait(full + 8 * slot, stage / kSlots & 1);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      auto& mine = registers[kBug == kOneBuffer ? 0 : half];
      if (kBug == kFenceTooEarly) wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kHalf; ++k)
        decode(tile + kTokenBytes + (128 * (kHalf * half + k) + threadIdx.x) * 16, mine[k]);  // reported: fill
      if (kBug != kFenceTooEarly) wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kHalf; ++k)
        multiply(d, mine[k], tile_descriptor(tile) + 2 * (kHalf * half + k), true);  // reported: multiply
      wgmma_commit();
      wgmma_wait<kBug == kWaitTooShort || kBug == kOneBuffer ? 2 : 1>();
      if (kBug == kSlotInFlight && half == 1) give_back(stage);
      if (kBug != kSlotInFlight && half == 0 && stage > (kBug == kSlotForgotten ? 1 : 0)) give_back(stage - 1);
    }
  }
  if (kBug != kNoLastWait) wgmma_wait<0>();
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) at<float>(a.output)[8 * threadIdx.x + i] = d[i];  // reported: output
  wgmma_wait<0>();
}

template <Bug kBug>
__device__ void fused(const Arguments& a) {
  uint32_t base = ptx::shared_address(shared), full = base + kBarriers, empty = full + 8 * kSlots;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, kConsumers / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    release_registers<40>();
    if (threadIdx.x / 32 == kConsumers / 32 && elect()) produce(a, base, full, empty);  // reported: produce
  } else {
    acquire_registers<232>();
    consume<kBug>(a, base, full, empty);
  }
}

#define FUSED(name, bug)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 1) fused_##name(const __grid_constant__ Arguments a) { \
    fused<bug>(a);                                                                                         \
  }
FUSED(clean, kClean)
FUSED(lanes_still_read, kLanesStillRead)
FUSED(wait_too_short, kWaitTooShort)
FUSED(one_buffer, kOneBuffer)
FUSED(slot_in_flight, kSlotInFlight)
FUSED(fence_too_early, kFenceTooEarly)
FUSED(no_last_wait, kNoLastWait)
FUSED(slot_forgotten, kSlotForgotten)
FUSED(one_warp_does_not_wait, kOneWarpDoesntWait)
