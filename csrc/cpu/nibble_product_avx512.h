// The product of a nibble stage and a few tokens, from registers: the weights see no memory between decoding and
// multiplication. Same sums as from tiles, bit for bit.
#pragma once
#include "decode_nibble_avx512.h"
#include "product_avx512.h"

namespace unweight {
namespace {

// The patches of a k-step to the registers of 16 of its lanes.
UNWEIGHT_INLINE void patch_registers(Patches& patches, int half, uint32_t scale, __m512i (&registers)[4]) {
  uint32_t patch = kPatchContinues;
  while ((patch & kPatchContinues) && patches.left) {
    patch = load_word(patches.next);
    patches.next += 4;
    patches.left--;
    const uint32_t lane = patch_place(patch) >> 2, reg = patch_place(patch) & 3;
    const uint32_t lanes = lane >> 4 == static_cast<uint32_t>(half) ? 1u << (lane & 15) : 0;
    const __m512i exponents = splat(unscaled_exponents(patch, scale)), bits = splat(kExponentBits);
    for (uint32_t i = 0; i < kRegisters; i++)  // in the chosen lane: (register & ~bits) | exponents
      registers[i] = _mm512_mask_ternarylogic_epi32(registers[i], static_cast<__mmask16>(i == reg ? lanes : 0), bits,
                                                    exponents, 0xBA);
  }
  if (!(patch & kPatchContinues)) patches.ksteps &= patches.ksteps - 1;
}

// Adds a warp's stage to the sums of kTokens tokens. False if its patches and k-steps don't go together.
template <int kTokens>
UNWEIGHT_INLINE bool multiply_nibble_warp(const Stage& stage, int warp, const Patches& patches, uint32_t scale,
                                          const uint16_t* x, int64_t x_stride, float* sums) {
  Patches left = patches;
  for (int half = 0; half < 2; half++) {
    // Of the warp's four groups of rows, the half's lanes have two.
    left = patches;
    float* group_sums = sums + half * 16;
    __m512 sum[kTokens][2];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++)
      for (int g = 0; g < 2; g++) sum[t][g] = _mm512_load_ps(group_sums + t * kSums + g * 32);
    for (int step = 0; step < kKSteps / 2; step++) {
      prefetch_ahead<32>(stage, kKSteps * warp + half * kKSteps / 2 + step);
      __m512i registers[2][4];
      decode_nibbles(warp_plane(stage, warp) + step * 512 + half * 256,
                     warp_nibbles(stage, warp) + step * 256 + half * 128, scale, registers);
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const int kstep = 2 * step + k;
        if (__builtin_expect(left.ksteps >> kstep & 1, 0)) patch_registers(left, half, scale, registers[k]);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; t++) {
          const __m128i* columns = reinterpret_cast<const __m128i*>(x + t * x_stride + kstep * kKStepColumns);
          const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128(columns));
          const __m512i second = _mm512_broadcast_i32x4(_mm_loadu_si128(columns + 1));
          for (int g = 0; g < 2; g++) {
            sum[t][g] = _mm512_dpbf16_ps(sum[t][g], (__m512bh)registers[k][g], (__m512bh)first);
            sum[t][g] = _mm512_dpbf16_ps(sum[t][g], (__m512bh)registers[k][g + 2], (__m512bh)second);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++)
      for (int g = 0; g < 2; g++) _mm512_store_ps(group_sums + t * kSums + g * 32, sum[t][g]);
  }
  return !left.left && !left.ksteps;
}

}  // namespace
}  // namespace unweight
