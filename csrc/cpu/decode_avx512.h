// The tiled layouts with AVX-512: stages -> tiles, two warps at a time. See tile_avx512.h.
#pragma once
#include "decode_huffman_avx512.h"
#include "decode_nibble_avx512.h"

namespace unweight {
namespace {

UNWEIGHT_INLINE void decode_raw_warp(const Stage& stage, int warp, uint8_t* tile) {
  for (int kstep = 0; kstep < kKSteps; kstep++) {
    prefetch_ahead<32>(stage, kKSteps * warp + kstep);
    for (int half = 0; half < 2; half++) {
      __m512i registers[4];
      transpose_words(stage.bytes + kStageHeaderBytes + warp * kWarpRawBytes + kstep * 512 + half * 256, registers);
      store_registers(tile, kstep, half, registers);
    }
  }
}

// False if there are more patches than k-steps for them, or fewer.
template <bool kNibble>
UNWEIGHT_INLINE bool apply_patches(Patches patches, uint32_t scale, uint8_t* tile) {
  for (; (patches.left != 0) & (patches.ksteps != 0); patches.left--, patches.next += 4) {
    const uint32_t patch = load_word(patches.next), place = patch_place(patch);
    uint8_t* at = tile + tile_offset(__builtin_ctz(patches.ksteps), place >> 2, place & 3);
    const uint32_t exponents = kNibble ? unscaled_exponents(patch, scale) : patch & kExponentBits;
    const uint32_t weights = (load_word(at) & ~kExponentBits) | exponents;
    std::memcpy(at, &weights, 4);
    patches.ksteps &= (patches.ksteps - 1) | (0 - (patch >> 31));  // kPatchContinues; a branch would be guessed wrong
  }
  return !patches.left && !patches.ksteps;
}

// Decodes the stages of one block in order; of each stage any pairs of warps, each pair in every stage. A tile is
// complete only after the next decode_pair() or finish_patches(): patches right behind the tile's wide stores would
// wait for them, and that costs a sixth of the time.
struct BlockDecoder {
  const MatrixView& matrix;
  const uint64_t first_stage;
  const bool prefetch;  // unless the caller does it while it uses the tiles
  // Bit w: damage of warp w counts. Those that nobody decodes, since their rows lie past N, are checked all the same.
  const uint32_t checked, undecoded;
  bool started[kWarps / 2];
  Streams streams[kWarps];
  Patches waiting[2];
  uint8_t* waiting_tiles[2];
  Damage waiting_for;  // what it is if the first one's don't fit the tile
};

constexpr uint32_t kAllWarps = (1u << kWarps) - 1;

// Of a block with so many rows.
UNWEIGHT_INLINE uint32_t warps_past(uint64_t rows) {
  return rows < kBlockRows ? kAllWarps & (kAllWarps << ((rows + kWarpRows - 1) / kWarpRows)) : 0;
}

UNWEIGHT_INLINE Damage finish_patches(BlockDecoder& decoder) {
  Damage damage{Flaw::kNone, 0, 0};
  for (int w = 1; w >= 0; w--) {
    Patches& patches = decoder.waiting[w];
    uint8_t* tile = decoder.waiting_tiles[w];
    const bool good = decoder.matrix.layout == Layout::kNibble
                          ? apply_patches<true>(patches, nibble_scale(decoder.matrix), tile)
                          : apply_patches<false>(patches, 0, tile);
    const uint8_t warp = static_cast<uint8_t>(decoder.waiting_for.warp + w);
    if (!good && (decoder.checked >> warp & 1)) damage = {Flaw::kPatches, warp, decoder.waiting_for.stage};
    patches.left = patches.ksteps = 0;
  }
  return damage;
}

// The sections of warps that nobody decodes. The stage is no raw one.
UNWEIGHT_NOINLINE Damage check_undecoded(const BlockDecoder& decoder, const Stage& stage, uint64_t s) {
  for (uint32_t left = decoder.undecoded; left; left &= left - 1) {
    const uint8_t warp = static_cast<uint8_t>(__builtin_ctz(left));
    WarpSection section;
    if (!open_section(stage, warp, decoder.matrix.layout == Layout::kNibble, section))
      return {Flaw::kSection, warp, decoder.first_stage + s};
    if (!patches_fit(section.patches)) return {Flaw::kPatches, warp, decoder.first_stage + s};
  }
  return {Flaw::kNone, 0, 0};
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
  if (!find_stage(matrix, decoder.first_stage + s, decoder.prefetch, stage)) return damage(Flaw::kIndex, 0);
  const bool raw = WarpHeader{load_word(stage.bytes)}.is_raw();
  if (raw || matrix.layout == Layout::kRaw) {
    if (!raw || stage.size < kRawStageBytes) return damage(Flaw::kRawStage, 0);
    for (int w = 0; w < 2; w++) decode_raw_warp(stage, first_warp + w, tiles + w * tile_stride);
    return finish_patches(decoder);
  }

  WarpSection sections[2];
  for (int w = 0; w < 2; w++)
    if (!open_section(stage, first_warp + w, nibble, sections[w])) {
      if (decoder.checked >> (first_warp + w) & 1) return damage(Flaw::kSection, first_warp + w);
      sections[w] = {{stage.bytes, 0, 0}, stage.bytes + kHuffmanSections, 0};
    }
  if (decoder.undecoded && first_warp == 0) {
    const Damage found = check_undecoded(decoder, stage, s);
    if (found.flaw != Flaw::kNone) return found;
  }
  if (nibble) {
    for (int w = 0; w < 2; w++) {
      decode_nibble_warp(stage, first_warp + w, nibble_scale(matrix), tiles + w * tile_stride);
      clear_rows(sections[w].zero_rows, tiles + w * tile_stride);
    }
  } else {
    HuffmanWarp warps[2];
    uint8_t copies[2][kWordsReach];
    for (int w = 0; w < 2; w++) {
      warps[w] = {&decoder.streams[first_warp + w], warp_plane(stage, first_warp + w), sections[w].words,
                  tiles + w * tile_stride};
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
  for (int w = 0; w < 2; w++) {
    decoder.waiting[w] = sections[w].patches;
    decoder.waiting_tiles[w] = tiles + w * tile_stride;
  }
  decoder.waiting_for = damage(Flaw::kPatches, first_warp);
  return last;
}

}  // namespace
}  // namespace unweight
