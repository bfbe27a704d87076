// Bit streams whose 32-bit words are stored in the order in which a decoder takes them (docs/FORMAT.md section 7).
#pragma once
#include <cstddef>
#include <cstdint>

namespace unweight {

constexpr int kMostStreams = 64;

// A decoder takes word j + 1 when it passes the end of word j - 1. So the place of a word is known before its content:
// each stream keeps the places of the word it is filling and of the next one. Plain data: AVX-512 code works on it too.
struct WordStreams {
  uint32_t word[kMostStreams];      // bits so far, from the top
  uint32_t position[kMostStreams];  // how many
  uint32_t place[kMostStreams], next_place[kMostStreams];
  uint32_t* words;  // full words, in place, and room for one more
  uint32_t count;   // places given out

  // Each stream starts with two words: first all w0 of a group of `group` streams, then all their w1.
  void start(uint32_t* memory, int group) {
    words = memory;
    count = 2 * kMostStreams;
    for (int s = 0; s < kMostStreams; s++) {
      word[s] = position[s] = 0;
      place[s] = static_cast<uint32_t>(s / group * 2 * group + s % group);
      next_place[s] = place[s] + static_cast<uint32_t>(group);
    }
  }

  // Appends the low `bits` (1…32) bits of `code`. Nothing branches on the data: a word is stored again until it is
  // full.
  inline __attribute__((always_inline)) void append(int s, uint32_t code, uint32_t bits) {
    const uint64_t window = uint64_t{code} << (64 - bits) >> position[s];
    const uint32_t filled = word[s] | static_cast<uint32_t>(window >> 32);
    words[place[s]] = filled;
    const uint32_t moved = position[s] + bits;
    const bool full = moved >= 32;
    word[s] = full ? static_cast<uint32_t>(window) : filled;
    place[s] = full ? next_place[s] : place[s];
    next_place[s] = full ? count : next_place[s];
    position[s] = moved & 31;
    count += full;
  }

  // Stores the words that aren't full. Returns the number of words up to the last that holds a bit of a code.
  uint32_t finish() {
    // Every word is full but two of each stream, so only so many at the end can be idle.
    bool idle[2 * kMostStreams + 1] = {false};
    const auto mark = [&](uint32_t at) {
      if (count - at <= 2 * kMostStreams) idle[count - at] = true;
    };
    for (int s = 0; s < kMostStreams; s++) {
      words[place[s]] = word[s];
      words[next_place[s]] = 0;
      mark(next_place[s]);
      if (position[s] == 0) mark(place[s]);
    }
    uint32_t dropped = 0;
    while (dropped < 2 * kMostStreams && idle[dropped + 1]) dropped++;
    return count - dropped;
  }
};

// All streams take code[round] of bits[round], round by round. In encode_avx512.cpp.
void append_avx512(WordStreams& streams, const uint32_t (*code)[kMostStreams], const uint32_t (*bits)[kMostStreams],
                   int rounds);

}  // namespace unweight
