// docs/FORMAT.md section 7 for every CPU.
#pragma once
#include <cstdint>

#include "matrix_view.h"

namespace unweight {

// Decodes the stages of one 64-row block of a huffman matrix, in order.
class HuffmanStages {
 public:
  HuffmanStages(const MatrixView& matrix, uint64_t block);

  // The next stage as 64 x 128 row-major BF16 bits, padding included. Throws Error on damage.
  void next(uint16_t* tile) { next(0, kWarps, 0xFFFF, tile); }

  // Only the rows of some warps, and of them those whose bits are set in `wanted`; the others are left undefined. Use
  // the same warps for all stages. (The other rows' codes have to be measured: where a word is depends on all lanes.)
  void next(int first_warp, int last_warp, uint32_t wanted, uint16_t* tile);

 private:
  struct Streams {                 // of even k-steps and of odd ones
    uint64_t window[2][kLanes];    // the bits that are left of two words, at the top
    uint32_t position[2][kLanes];  // bits taken of the first one
  };
  void decode_warp(const StageView& stage, int warp, const uint8_t* words, uint32_t wanted, uint16_t* rows);

  const MatrixView& matrix_;
  uint64_t first_stage_, stage_ = 0;  // stage_: of the block
  uint32_t entries_[256];             // by prefix: exponent bits of a register | length of the code
  Streams streams_[kWarps];
  bool started_ = false;  // of this segment: a raw stage has no words, so the first stage may not be where it starts
};

}  // namespace unweight
