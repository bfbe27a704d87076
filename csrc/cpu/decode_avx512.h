// The tiled layouts with AVX-512: stages -> tiles, two warps at a time. See tile_avx512.h.
#pragma once
#include "../cuda/decode/nibble.cuh"
#include "decode_huffman_avx512.h"

namespace unweight {
namespace {

UNWEIGHT_INLINE void decode_raw_warp(const Stage& stage, int warp, uint8_t* tile) {
  for (int kstep = 0; kstep < kKSteps; kstep++) {
    if (kstep % 2 == 0) prefetch_ahead(stage, warp, kstep / 2);
    for (int half = 0; half < 2; half++) {
      __m512i registers[4];
      transpose_words(stage.bytes + kStageHeaderBytes + warp * kWarpRawBytes + kstep * 512 + half * 256, registers);
      store_registers(tile, kstep, half, registers);
    }
  }
}

UNWEIGHT_INLINE void decode_nibble_warp(const Stage& stage, int warp, uint32_t scale, uint8_t* tile) {
  const __m512i even_bits = splat(kEvenBits), nibble_bits = splat(kNibbleBits), exponents = splat(kNibbleExponents);
  const __m512i unscale = _mm512_set1_epi16(static_cast<short>(scale << 7));  // a code never borrows: it is 112 or more
  const __m512i even_words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd_words = _mm512_add_epi32(even_words, splat(1));
  const uint8_t* plane = stage.bytes + kStageHeaderBytes + warp * kWarpPlaneBytes;
  const uint8_t* nibbles = stage.bytes + kStageHeaderBytes + kPlaneBytes + warp * kWarpNibbleBytes;
  for (int step = 0; step < kKSteps / 2; step++) {
    prefetch_ahead(stage, warp, step);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, plane += 256, nibbles += 128) {
      __m512i s[4];
      transpose_words(plane, s);
      const __m512i low = load_vector(nibbles), high = load_vector(nibbles + 64);
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const __m512i codes = _mm512_permutex2var_epi32(low, k ? odd_words : even_words, high);
        const __m512i t0 = and_or(codes, nibble_bits, exponents);
        const __m512i t1 = and_or(_mm512_ror_epi32(codes, 4), nibble_bits, exponents);
        __m512i registers[4] = {
            select_bits(even_bits, s[2 * k], t0), _mm512_rol_epi32(select_bits(even_bits, t0, s[2 * k]), 8),
            select_bits(even_bits, s[2 * k + 1], t1), _mm512_rol_epi32(select_bits(even_bits, t1, s[2 * k + 1]), 8)};
        for (__m512i& r : registers) r = _mm512_sub_epi16(r, unscale);
        store_registers(tile, 2 * step + k, half, registers);
      }
    }
  }
}

UNWEIGHT_INLINE void clear_rows(uint32_t rows, uint8_t* tile) {
  for (rows &= 0xFFFF; rows; rows &= rows - 1) {
    const uint32_t row = __builtin_ctz(rows);
    for (int unit = 0; unit < kUnits; unit++) std::memset(tile + unit * kUnitBytes + row * 16, 0, 16);
  }
}

UNWEIGHT_INLINE uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent - scale) & 255;
}

// A warp's patches that its tile still lacks.
struct Patches {
  const uint8_t* next;
  uint32_t left;
  uint32_t ksteps;  // of the patches that are left
  uint8_t* tile;
};

// `scale`: what exponents in the patches are above the true ones (nibble). False if there are more patches than k-steps
// for them, or fewer.
template <bool kScaled>
UNWEIGHT_INLINE bool apply_patches(Patches patches, uint32_t scale) {
  for (; (patches.left != 0) & (patches.ksteps != 0); patches.left--, patches.next += 4) {
    const uint32_t patch = load_word(patches.next), place = patch_place(patch);
    uint8_t* at = patches.tile + tile_offset(__builtin_ctz(patches.ksteps), place >> 2, place & 3);
    uint32_t exponents = patch & kExponentBits;
    if (kScaled)
      exponents = unscaled_exponent(patch >> 7 & 255, scale) << 7 | unscaled_exponent(patch >> 23 & 255, scale) << 23;
    const uint32_t weights = (load_word(at) & ~kExponentBits) | exponents;
    std::memcpy(at, &weights, 4);
    patches.ksteps &= (patches.ksteps - 1) | (0 - (patch >> 31));  // kPatchContinues; a branch would be guessed wrong
  }
  return (patches.left | patches.ksteps) == 0;
}

// Decodes the stages of one block in order; of each stage any pairs of warps, each pair in every stage. A tile is
// complete only after the next decode_pair() or finish_patches(): patches right behind the tile's wide stores would
// wait for them, and that costs a sixth of the time.
struct BlockDecoder {
  const MatrixView& matrix;
  const uint64_t first_stage;
  const bool prefetch;  // unless the caller does it while it uses the tiles
  bool started[kWarps / 2];
  Streams streams[kWarps];
  Patches waiting[2];
  Damage waiting_for;  // what it is if they don't fit the tile
};

UNWEIGHT_INLINE uint32_t nibble_scale(const MatrixView& matrix) { return kNibbleScaledBase - matrix.nibble_base; }

UNWEIGHT_INLINE Damage finish_patches(BlockDecoder& decoder) {
  bool good = true;
  for (Patches& patches : decoder.waiting) {
    good &= decoder.matrix.layout == Layout::kNibble ? apply_patches<true>(patches, nibble_scale(decoder.matrix))
                                                     : apply_patches<false>(patches, 0);
    patches.left = patches.ksteps = 0;
  }
  return good ? Damage{Flaw::kNone, 0, 0} : decoder.waiting_for;
}

UNWEIGHT_INLINE bool find_stage(const MatrixView& matrix, uint64_t stage, Stage& found) {
  const uint8_t* entry = matrix.bytes + matrix.index_offset + 4 * stage;
  const uint64_t begin = matrix.data_offset + 16 * uint64_t{load_word(entry)};
  const uint64_t end = matrix.data_offset + 16 * uint64_t{load_word(entry + 4)};
  if (begin > end || end > matrix.used_bytes || end - begin < kHuffmanSections) return false;
  found = {matrix.bytes + begin, end - begin, false};
  return true;
}

// Refills load a whole vector, so near the end of the tensor they would read behind it.
constexpr uint64_t kWordsReach = 4 * kMaxWarpWords + kVectorBytes;

// Stage `s` of the block, rows of warps first_warp (0 or 2) and the one after it, to tiles `tile_stride` bytes apart
// (kTileBytes each, 64-byte aligned).
UNWEIGHT_NOINLINE Damage decode_pair(BlockDecoder& decoder, uint64_t s, int first_warp, uint8_t* tiles,
                                     uint64_t tile_stride) {
  const MatrixView& matrix = decoder.matrix;
  const bool nibble = matrix.layout == Layout::kNibble;
  const auto damage = [&](Flaw flaw, int warp) {
    return Damage{flaw, static_cast<uint8_t>(warp), decoder.first_stage + s};
  };
  bool& started = decoder.started[first_warp / 2];
  if (s % matrix.segment_stages == 0) started = false;
  Stage stage;
  if (!find_stage(matrix, decoder.first_stage + s, stage)) return damage(Flaw::kIndex, 0);
  stage.prefetch = decoder.prefetch;
  const bool raw = WarpHeader{load_word(stage.bytes)}.is_raw();
  if (raw || matrix.layout == Layout::kRaw) {
    if (!raw || stage.size < kRawStageBytes) return damage(Flaw::kRawStage, 0);
    for (int w = 0; w < 2; w++) decode_raw_warp(stage, first_warp + w, tiles + w * tile_stride);
    return finish_patches(decoder);
  }

  WarpHeader headers[2];
  HuffmanWarp warps[2];
  Patches patches[2];
  for (int w = 0; w < 2; w++) {
    const WarpHeader header = headers[w] = {load_word(stage.bytes + 4 * (first_warp + w))};
    const uint64_t first_patch = header.section() + 4 * (nibble && header.has_zero_rows());
    const uint64_t first_word = first_patch + 4 * header.patches();
    if (header.section() < static_cast<uint32_t>(nibble ? kNibbleSections : kHuffmanSections) ||
        first_word > stage.size)
      return damage(Flaw::kSection, first_warp + w);
    uint8_t* tile = tiles + w * tile_stride;
    patches[w] = {stage.bytes + first_patch, header.patches(), header.patched_ksteps(), tile};
    warps[w] = {&decoder.streams[first_warp + w], stage.bytes + kStageHeaderBytes + (first_warp + w) * kWarpPlaneBytes,
                stage.bytes + first_word, tile};
  }
  if (nibble) {
    for (int w = 0; w < 2; w++) {
      decode_nibble_warp(stage, first_warp + w, nibble_scale(matrix), patches[w].tile);
      if (headers[w].has_zero_rows()) clear_rows(load_word(stage.bytes + headers[w].section()), patches[w].tile);
    }
  } else {
    uint8_t copies[2][kWordsReach];
    for (int w = 0; w < 2; w++) {
      const uint64_t available = matrix.bytes + matrix.size - warps[w].words;
      if (available < kWordsReach) {
        std::memset(copies[w], 0, kWordsReach);
        std::memcpy(copies[w], warps[w].words, available);
        warps[w].words = copies[w];
      }
      if (!started) start_streams(*warps[w].streams, warps[w].words);
    }
    started = true;
    decode_huffman_pair(matrix, stage, first_warp, warps);
  }
  const Damage last = finish_patches(decoder);
  decoder.waiting[0] = patches[0];
  decoder.waiting[1] = patches[1];
  decoder.waiting_for = damage(Flaw::kPatches, first_warp);
  return last;
}

}  // namespace
}  // namespace unweight
