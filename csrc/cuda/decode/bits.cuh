// The few bit operations of the decoders, one instruction each on the device, plain C++ on the host.
#pragma once
#include <cstdint>

#include "../../format/tile.h"

namespace unweight {

// Bits of a sign+mantissa word that belong to the even register; the odd one's are rotated into the gaps.
constexpr uint32_t kEvenBits = 0x807F807Fu;

UNWEIGHT_HD uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(ones), "r"(zeros));
  return d;
#else
  return (mask & ones) | (~mask & zeros);
#endif
}

UNWEIGHT_HD uint32_t and_or(uint32_t a, uint32_t mask, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
  return d;
#else
  return (a & mask) | c;
#endif
}

// The upper word of (high:low) << (shift mod 32).
UNWEIGHT_HD uint32_t funnel_left(uint32_t low, uint32_t high, uint32_t shift) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(shift));
  return d;
#else
  shift &= 31;
  return shift ? (high << shift) | (low >> (32 - shift)) : high;
#endif
}

UNWEIGHT_HD uint32_t rotate_left(uint32_t x, uint32_t shift) { return funnel_left(x, x, shift); }
UNWEIGHT_HD uint32_t rotate_right(uint32_t x, uint32_t shift) { return funnel_left(x, x, 32 - shift); }

// Rotation by one byte has an instruction of its own on a device pipe that has room.
UNWEIGHT_HD uint32_t rotate_byte_left(uint32_t x) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("prmt.b32 %0, %1, %1, 0x2103;" : "=r"(d) : "r"(x));
  return d;
#else
  return rotate_left(x, 8);
#endif
}

// Four byte products added to c. dot4(x, 0x80000000, c) = c + 128 * (top byte of x): a table row's address in one go.
UNWEIGHT_HD uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
#endif
}

// Signs and mantissas of two registers in one word.
UNWEIGHT_HD uint32_t merge_signs_mantissas(uint32_t even, uint32_t odd) {
  return select_bits(kEvenBits, even, rotate_right(odd, 8));
}

}  // namespace unweight
