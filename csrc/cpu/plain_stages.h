// Raw and nibble stages for every CPU.
#pragma once
#include <cstdint>

#include "matrix_view.h"

namespace unweight {

// Nibble exponents are stored this much above the true ones, modulo 2^32.
uint32_t nibble_scale(const MatrixView& matrix);
// Takes the scale off an exponent of a patch: 0 and 255 are never scaled.
uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale);

// A warp's patches to its 16 rows of a tile. False if there are more patches than k-steps for them, or fewer.
bool apply_patches(WarpHeader header, const uint8_t* patches, bool scaled, uint32_t scale, uint16_t* rows);

// A warp of a stage that isn't raw: where its zero-row mask (if it has one) and its patches are. Throws Error if they
// are outside the stage.
struct NibbleWarp {
  WarpHeader header;
  uint32_t zero_rows;  // bit r: row r of the warp
  const uint8_t* patches;
};
NibbleWarp nibble_warp(const MatrixView& matrix, const StageView& stage, uint64_t stage_number, int warp);

// Decodes the rows of some warps if the stage is a raw one. Throws Error if it isn't where it must be, or too short.
bool decode_raw_stage(const MatrixView& matrix, const StageView& stage, uint64_t stage_number, int first_warp,
                      int last_warp, uint16_t* tile);

// Stage `stage_number` of a raw or nibble matrix as 64 x 128 row-major BF16 bits, padding included. Throws Error on
// damage.
void decode_plain_stage(const MatrixView& matrix, uint64_t stage_number, uint16_t* tile);

}  // namespace unweight
