// The helpers that host and device share: tile order, bit merges, the code streams.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <vector>

#include "../../csrc/cuda/decode/huffman.cuh"
#include "../../csrc/cuda/decode/nibble.cuh"
#include "../../csrc/format/error.h"
#include "../../csrc/format/header.h"
#include "module.h"

namespace unweight {
namespace {

using Registers = std::array<uint32_t, kRegisters>;

Registers registers_of(const uint32_t (&a)[kRegisters]) { return {a[0], a[1], a[2], a[3]}; }

Registers nibbles_to_registers(uint32_t codes, uint32_t s0, uint32_t s1) {
  uint32_t a[kRegisters];
  decode_nibbles(codes, s0, s1, a);
  return registers_of(a);
}

uint32_t nibbles_of(const Registers& codes) {
  const uint32_t c[4] = {codes[0], codes[1], codes[2], codes[3]};
  return encode_nibbles(c);
}

Registers entries_to_registers(const Registers& entries, uint32_t s0, uint32_t s1) {
  const uint32_t e[4] = {entries[0], entries[1], entries[2], entries[3]};
  uint32_t a[kRegisters];
  merge_entries(e, s0, s1, a);
  return registers_of(a);
}

// One lane's stream alone: `words` in the order in which it takes them, `table` of 256 entries.
std::vector<Registers> decode_stream(const std::vector<uint32_t>& table, const std::vector<uint32_t>& words,
                                     int steps) {
  if (table.size() != 256) fail("table: ", table.size(), " entries, expected 256");
  size_t taken = 2;
  const auto word = [&words](size_t i) {
    if (i >= words.size()) fail("words: ", words.size(), ", the stream takes more");
    return words[i];
  };
  BitStream stream{word(0), word(1), 0};
  std::vector<Registers> entries(steps);
  for (Registers& step : entries) {
    uint32_t four[4];
    // The top byte times 128 is the byte offset of a row of 32 entries: what the kernels add to a lane's column.
    const bool wants =
        decode_four_codes(stream, [&table](uint32_t x) { return table[dot4(x, 0x80000000u, 0) / 128]; }, four);
    step = registers_of(four);
    if (wants) refill(stream, word(taken++));
  }
  return entries;
}

}  // namespace

void bind_decode(pybind11::module_& m) {
  m.def("fragment_row", [](int warp, int lane, int reg) { return fragment_row(warp, lane, reg); });
  m.def("fragment_column", [](int kstep, int lane, int reg) { return fragment_column(kstep, lane, reg); });
  m.def("segment_stages", &segment_stages);
  m.def("merge_signs_mantissas", [](uint32_t even, uint32_t odd) { return merge_signs_mantissas(even, odd); });
  m.def("decode_nibbles", &nibbles_to_registers);
  m.def("encode_nibbles", &nibbles_of);
  m.def("make_code_entry", [](uint32_t pair, uint32_t length) { return make_code_entry(pair, length); });
  m.def("merge_entries", &entries_to_registers);
  m.def("decode_stream", &decode_stream);
}

}  // namespace unweight
