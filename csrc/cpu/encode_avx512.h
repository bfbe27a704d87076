// The inner loops of the encoders with AVX-512: plain data in and out (see matrix_view.h). What they can't do with a
// window of 15 x 15 exponents they report, and the portable code does it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../format/tile.h"

namespace unweight {

// The 64 x 128 weights of a stage, with padding filled in: in place where the stage is whole.
struct StageRows {
  const uint16_t* data;
  int64_t stride;  // weights from one row to the next
  int64_t ahead;   // and to the stage that is encoded next
};

// Codes of the pairs whose exponents both are in first … first + 14, by (e0 - first) | (e1 - first) << 4. Where there
// is no code: the first code.
struct PairWindow {
  uint8_t first;
  uint8_t low[256];     // code bits 0…7
  uint8_t high[256];    // code bits 8…11 | length << 4; 0 where there is no code
  uint8_t length[256];  // with kMissing where there is no code
};
constexpr uint8_t kMissing = 0x80;

// The registers of a warp's stage without an entry in the window, ordered by k-step, then by place (4 * lane +
// register). With room for the vector stores behind the last one.
struct MissingCodes {
  uint32_t count;
  uint8_t kstep[kKSteps * kLanes * kRegisters + 64], place[kKSteps * kLanes * kRegisters + 64];
};

// A warp's rows of a stage; codes have at most 8 bits. Writes the S-plane (docs/FORMAT.md section 5), the four codes of
// each lane behind one another, the first code for what is missing, and their bits. `code`, `bits`: by pair of k-steps,
// then by stream.
void look_up_warp_avx512(const PairWindow& window, const StageRows& stage, int warp, uint32_t* plane,
                         uint32_t (*code)[2 * kLanes], uint32_t (*bits)[2 * kLanes], MissingCodes& missing);

// One archive round of 256 weights: sign+mantissa bytes, both codes of each of 64 streams, and the streams that hold a
// pair without an entry.
uint64_t look_up_round_avx512(const PairWindow& window, const uint16_t* weights, uint8_t* plane, uint32_t* code,
                              uint32_t* bits);

// The pairs (e0 | e1 << 8) of `count` weights, a multiple of 64, as `swizzle` in pair_counts.cpp permutes them, in any
// order. `most` becomes the largest pair if it is smaller.
void swizzled_pairs_avx512(const uint16_t* weights, int64_t count, uint16_t* pairs, uint16_t& most);

// A warp's rows of a stage: S-plane and N-plane, and per k-step and register the lanes with an exponent outside the
// window (its code is 0).
void encode_nibbles_avx512(int base, const StageRows& stage, int warp, uint32_t* plane, uint32_t* codes,
                           uint32_t (*outside)[kRegisters]);

// memcpy for what isn't read again soon: a normal store would first fetch the line it fills.
void copy_around_caches_avx512(uint8_t* to, const uint8_t* from, size_t size);

}  // namespace unweight
