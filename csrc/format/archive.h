// docs/FORMAT.md section 8: the parts of an archive chunk.
#pragma once
#include <cstddef>
#include <cstdint>

namespace unweight {

constexpr int kArchiveStreams = 64;
constexpr int kRoundPairs = 2 * kArchiveStreams;
constexpr size_t kChunkHeaderBytes = 16;

// Byte offsets in a chunk of `weights` weights.
struct ArchiveChunk {
  size_t plane = kChunkHeaderBytes, positions, pairs, words, end;
  ArchiveChunk(size_t weights, size_t patches, size_t word_count) {
    positions = plane + (weights + 15) / 16 * 16;
    pairs = positions + 4 * patches;
    words = pairs + (2 * patches + 3) / 4 * 4;
    end = (words + 4 * word_count + 15) / 16 * 16;
  }
};

}  // namespace unweight
