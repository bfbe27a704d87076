// docs/FORMAT.md section 7: four codes of exponent pairs -> one lane's A registers of a k-step.
#pragma once
#include "bits.cuh"

namespace unweight {

// A table entry is the exponent bits of a register, with the code's length in the low bits.
constexpr uint32_t kCodeLengthBits = 31;
UNWEIGHT_HD constexpr uint32_t make_code_entry(uint32_t pair, uint32_t length) {
  return (pair & 255) << 7 | (pair >> 8) << 23 | length;
}

struct BitStream {
  uint32_t w0, w1;  // the current word and the one after it
  // Bits taken: bits 0…4 index into w0, bit 5 toggles when w0 is used up, bits from 7 on are the entries' and nothing
  // looks at them.
  uint32_t position;
};

// `lookup(x)` gives the entry of the code that x starts with. Returns 0 unless the stream needs its next word: the
// caller then calls `refill`. Four codes of at most 8 bits never pass more than one word.
template <class Lookup>
UNWEIGHT_HD uint32_t decode_four_codes(BitStream& stream, Lookup lookup, uint32_t (&entries)[4]) {
  const uint32_t before = stream.position;
  uint32_t x = funnel_left(stream.w1, stream.w0, before);
  for (int i = 0; i < 4; i++) {
    entries[i] = lookup(x);
    x = funnel_left(0, x, entries[i]);  // the wrap ignores everything above the length
    stream.position += entries[i];
  }
  return (stream.position ^ before) & 32;
}

UNWEIGHT_HD void refill(BitStream& stream, uint32_t next_word) {
  stream.w0 = stream.w1;
  stream.w1 = next_word;
}

UNWEIGHT_HD void merge_entries(const uint32_t (&entries)[4], uint32_t s0, uint32_t s1, uint32_t (&registers)[4]) {
  registers[0] = select_bits(kEvenBits, s0, entries[0]);
  registers[1] = select_bits(kEvenBits, rotate_byte_left(s0), entries[1]);
  registers[2] = select_bits(kEvenBits, s1, entries[2]);
  registers[3] = select_bits(kEvenBits, rotate_byte_left(s1), entries[3]);
}

}  // namespace unweight
