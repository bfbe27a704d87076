// docs/FORMAT.md section 4: canonical, length-limited Huffman codes of exponent pairs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace unweight {

constexpr int kMaxCodeBits = 12;
constexpr int kPairs = 1 << 16;
constexpr size_t kCodeCountBytes = 32;  // u16 count[16]

struct Code {
  int longest = 0;              // limit on the length: 8 or 12
  uint16_t count[16] = {0};     // codes of each length
  std::vector<uint16_t> pairs;  // in order of their codes

  size_t bytes() const { return kCodeCountBytes + 2 * pairs.size(); }
  void write(uint8_t* out) const;
  uint64_t id() const;

  // Entry of each `longest`-bit prefix: exponent bits of a register | length (decode/huffman.cuh).
  std::vector<uint32_t> decode_table() const;
  // For each pair: code | length << 16, and kNoCode with the first code where it has none.
  std::vector<uint32_t> encode_table() const;
};

constexpr uint32_t kNoCode = 1u << 31;

// How often each pair occurs. Few second exponents occur at all: only they have a row.
struct PairCounts {
  std::vector<uint64_t> row[256];  // by first exponent; empty or 256

  void add(uint32_t second, const uint64_t (&counts)[256]) {
    row[second].resize(256, 0);
    for (int first = 0; first < 256; first++) row[second][first] += counts[first];
  }
};

// The table that `pack` writes for these counts.
Code build_code(const PairCounts& pairs, int longest);

// Reads and checks a table of at most `available` bytes. Throws Error.
Code read_code(const uint8_t* bytes, size_t available, int longest);

}  // namespace unweight
