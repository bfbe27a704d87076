// The portable decoder of tiled layouts, stage by stage.
#pragma once
#include <cstdint>

#include "../cuda/decode/huffman.cuh"
#include "matrix_view.h"

namespace unweight {

constexpr int kTileWeights = kBlockRows * kStageColumns;

// Decodes the stages of one 64-row block in order.
class TileDecoder {
 public:
  TileDecoder(const MatrixView& matrix, uint64_t block)
      : matrix_(matrix), stage_(block * matrix.stages_per_block), first_stage_(stage_) {}

  // The next stage as 64 x 128 row-major BF16 bits, padding included (any finite value). Throws Error on damage.
  void next(uint16_t* tile);

 private:
  struct Stage;
  Stage open_stage() const;
  void decode_raw(const Stage& stage, uint16_t* tile) const;
  uint32_t decode_nibble(const Stage& stage, int warp, uint16_t* tile) const;
  uint32_t decode_huffman(const Stage& stage, int warp, uint16_t* tile);
  void apply_patches(const Stage& stage, int warp, uint32_t at, uint16_t* tile) const;
  uint32_t word(uint64_t at) const;

  const MatrixView& matrix_;
  uint64_t stage_, first_stage_;
  BitStream streams_[kWarps][2][kLanes];
  bool started_ = false;  // of this segment: a raw stage has no words, so the first stage may not be where it starts
};

}  // namespace unweight
