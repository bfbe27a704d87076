// The status word: how kernels say what is damaged. 0 is fine. Else it is the complement of a key, so that atomicMax
// keeps the smallest key: what is reported doesn't depend on which thread came first.
#pragma once
#include <cstdint>

#include "../format/tile.h"

namespace unweight::cuda {

// In the order in which they are reported. What `place` counts stands behind each.
enum class Flaw : uint32_t {
  kNone,
  kHeader,          // a field is impossible, or is not what the host knows
  kLayout,          // not the layout that the host gave: the one found
  kHeaderChecksum,  //
  kCode,            // the code table isn't one, or isn't the one of its id
  kIndex,           // unit
  kGap,             // byte of the matrix that isn't zero
  kBlockChecksum,   // block or chunk
  kRawStage,        // stage
  kSection,         // warp of a stage
  kPatches,         // warp of a stage
  kChunk,           // chunk whose parts don't fill it
  kChunkPatch,      // chunk
  kId,              // index into ids
};

struct Damage {
  Flaw flaw;
  uint32_t matrix;
  uint64_t place;
};

constexpr int kPlaceBits = 40, kFlawBits = 4;
constexpr uint64_t kMostPlace = (uint64_t{1} << kPlaceBits) - 1, kMostMatrix = (1u << 20) - 1;
static_assert(20 + kFlawBits + kPlaceBits == 64, "a key fills the word");

UNWEIGHT_HD uint64_t make_status(Flaw flaw, uint64_t matrix, uint64_t place) {
  matrix = matrix < kMostMatrix ? matrix : kMostMatrix;
  place = place < kMostPlace ? place : kMostPlace;
  return ~(matrix << (kFlawBits + kPlaceBits) | static_cast<uint64_t>(flaw) << kPlaceBits | place);
}

UNWEIGHT_HD Damage read_status(uint64_t status) {
  if (status == 0) return {Flaw::kNone, 0, 0};
  const uint64_t key = ~status;
  return {static_cast<Flaw>(key >> kPlaceBits & ((1 << kFlawBits) - 1)),
          static_cast<uint32_t>(key >> (kFlawBits + kPlaceBits)), key & kMostPlace};
}

UNWEIGHT_HD constexpr uint64_t warp_place(uint64_t stage, uint32_t warp) { return stage * kWarps + warp; }

}  // namespace unweight::cuda
