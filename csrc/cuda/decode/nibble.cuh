// docs/FORMAT.md section 6: eight 4-bit codes and two sign+mantissa words -> one lane's A registers of a k-step.
#pragma once
#include "bits.cuh"

namespace unweight {

constexpr uint32_t kNibbleBits = 0x87878787u;
// Or-ed in, it makes each 4-bit code the exponent 112 + code: no table, no shift.
constexpr uint32_t kNibbleExponents = 0x38383838u;
constexpr int kNibbleScaledBase = 112;

// Exponents come out scaled by 112 - base.
UNWEIGHT_HD void decode_nibbles(uint32_t codes, uint32_t s0, uint32_t s1, uint32_t (&registers)[4]) {
  const uint32_t t0 = and_or(codes, kNibbleBits, kNibbleExponents);
  const uint32_t t1 = and_or(rotate_right(codes, 4), kNibbleBits, kNibbleExponents);
  registers[0] = select_bits(kEvenBits, s0, t0);
  registers[1] = rotate_byte_left(select_bits(kEvenBits, t0, s0));
  registers[2] = select_bits(kEvenBits, s1, t1);
  registers[3] = rotate_byte_left(select_bits(kEvenBits, t1, s1));
}

// The two codes of register i, at bits 7 and 23, i = 0…3.
UNWEIGHT_HD uint32_t encode_nibbles(const uint32_t (&codes)[4]) {
  return (codes[0] | rotate_right(codes[1], 8)) | rotate_left(codes[2] | rotate_right(codes[3], 8), 4);
}

}  // namespace unweight
