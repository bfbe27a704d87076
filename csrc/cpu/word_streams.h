// Bit streams whose 32-bit words are stored in the order in which a decoder takes them (docs/FORMAT.md section 7).
#pragma once
#include <cstdint>
#include <vector>

namespace unweight {

// A decoder takes word j + 1 when it passes the end of word j - 1. So the place of a word is known before its content:
// each stream keeps the places of the word it is filling and of the next one.
struct WordStream {
  uint32_t word = 0;
  uint32_t position = 0;
  uint32_t place = 0, next_place = 0;
};

template <int kStreams>
class WordWriter {
 public:
  WordStream streams[kStreams];

  // `words` must hold what the streams can take; starts with two words a stream, first all w0 of a group of
  // `group` streams, then all w1.
  void start(uint32_t* words, int group) {
    words_ = words;
    count_ = 2 * kStreams;
    for (int s = 0; s < kStreams; s++) {
      const uint32_t first = s / group * 2 * group + s % group;
      streams[s] = {0, 0, first, first + group};
      words_[first] = words_[first + group] = 0;
    }
  }

  // Appends `bits` (1…32) low bits of `code`. Every store is unconditional, so that nothing branches on the data: a
  // word is stored again until it is full, and the place behind the last word is cleared before it is taken.
  inline __attribute__((always_inline)) void append(WordStream& s, uint32_t code, uint32_t bits) {
    const uint64_t window = uint64_t{code} << (64 - bits) >> s.position;
    s.word |= static_cast<uint32_t>(window >> 32);
    words_[s.place] = s.word;
    words_[count_] = 0;
    const uint32_t position = s.position + bits;
    const bool full = position >= 32;
    s.word = full ? static_cast<uint32_t>(window) : s.word;
    s.place = full ? s.next_place : s.place;
    s.next_place = full ? count_ : s.next_place;
    s.position = position & 31;
    count_ += full;
  }

  uint32_t count() const { return count_; }

  // Writes the words that aren't full. Returns the number of words up to the last that holds a bit of a code.
  uint32_t finish() {
    std::vector<bool> idle(count_, false);
    for (const WordStream& s : streams) {
      words_[s.place] = s.word;
      idle[s.next_place] = true;
      if (s.position == 0) idle[s.place] = true;
    }
    uint32_t n = count_;
    while (n && idle[n - 1]) n--;
    return n;
  }

 private:
  uint32_t* words_ = nullptr;
  uint32_t count_ = 0;
};

}  // namespace unweight
