// docs/FORMAT.md sections 5 to 7 with AVX-512: one warp's stage -> a tile of BF16 weights in the first-level cache.
// Only for files compiled with the AVX-512 flags; everything here is local to the file that includes it.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own _mm512_undefined_epi32() sets this off wherever it is inlined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstring>

#include "../cuda/decode/bits.cuh"
#include "../cuda/decode/nibble.cuh"
#include "matrix_view.h"

#define UNWEIGHT_INLINE static inline __attribute__((always_inline))

namespace unweight {
namespace {

// A tile is 16 rows x 128 columns in the order that vdpbf16ps wants: a *unit* of 8 columns is four vectors, one for
// each *group* of 4 rows; a vector is 4 rows x 4 column pairs. Lanes 0…15 of a register are one vector, lanes 16…31
// another.
constexpr int kVectorBytes = 64;
constexpr int kUnitColumns = 8;
constexpr int kUnits = kStageColumns / kUnitColumns;
constexpr int kGroups = 4;
constexpr int kGroupRows = 4;
constexpr int kUnitBytes = kGroups * kVectorBytes;
constexpr int kTileBytes = kUnits * kUnitBytes;

UNWEIGHT_INLINE uint32_t tile_offset(uint32_t kstep, uint32_t lane, uint32_t reg) {
  return (2 * kstep + (reg >> 1)) * kUnitBytes + (2 * (reg & 1) + (lane >> 4)) * kVectorBytes + (lane & 15) * 4;
}

UNWEIGHT_INLINE __m512i splat(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
UNWEIGHT_INLINE __m512i select_bits(__m512i mask, __m512i ones, __m512i zeros) {
  return _mm512_ternarylogic_epi32(mask, ones, zeros, 0xCA);
}
// `ones` where the mask is set, else `zeros`, whose register takes the result.
UNWEIGHT_INLINE __m512i merge_bits(__m512i zeros, __m512i ones, __m512i mask) {
  return _mm512_ternarylogic_epi32(zeros, ones, mask, 0xD8);
}
UNWEIGHT_INLINE __m512i and_or(__m512i a, __m512i mask, __m512i c) {
  return _mm512_ternarylogic_epi32(a, mask, c, 0xEA);
}
UNWEIGHT_INLINE __m512i load_vector(const void* p) { return _mm512_loadu_si512(p); }
UNWEIGHT_INLINE uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// 16 lanes x 4 words, lane after lane -> words[i]: word i of the 16 lanes.
UNWEIGHT_INLINE void transpose_words(const uint8_t* p, __m512i (&words)[4]) {
  const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i high = _mm512_add_epi32(low, splat(2));
  const __m512i a = load_vector(p), b = load_vector(p + 64), c = load_vector(p + 128), d = load_vector(p + 192);
  const __m512i ab01 = _mm512_permutex2var_epi32(a, low, b), ab23 = _mm512_permutex2var_epi32(a, high, b);
  const __m512i cd01 = _mm512_permutex2var_epi32(c, low, d), cd23 = _mm512_permutex2var_epi32(c, high, d);
  words[0] = _mm512_shuffle_i64x2(ab01, cd01, 0x44);
  words[1] = _mm512_shuffle_i64x2(ab01, cd01, 0xEE);
  words[2] = _mm512_shuffle_i64x2(ab23, cd23, 0x44);
  words[3] = _mm512_shuffle_i64x2(ab23, cd23, 0xEE);
}

// Registers 0…3 of lanes 16·half … of a k-step.
UNWEIGHT_INLINE void store_registers(uint8_t* tile, int kstep, int half, const __m512i (&registers)[4]) {
  for (int i = 0; i < kRegisters; i++) _mm512_store_si512(tile + tile_offset(kstep, 16 * half, i), registers[i]);
}

struct Stage {
  const uint8_t* bytes;
  uint64_t size;
  bool prefetch;
};

// The stream is read linearly, and the hardware's prefetchers alone leave a third of the bandwidth unused. Each warp
// and pair of k-steps asks for its 16th of the stage that is two stages ahead.
UNWEIGHT_INLINE void prefetch_ahead(const Stage& stage, int warp, int step) {
  const uint64_t share = stage.prefetch ? stage.size / 16 : 0;
  // An address, not a pointer: it may be behind the tensor, where a prefetch does nothing.
  const uintptr_t from = reinterpret_cast<uintptr_t>(stage.bytes) + 3 * stage.size / 2 + (4 * warp + step) * share;
  for (uint64_t i = 0; i < share; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
}

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

// The bit streams of a warp: index 2·stream + half, for 16 lanes each.
struct Streams {
  __m512i word[4], next[4];
  __m512i position;  // byte i of a 32-bit lane: bits taken of stream i, modulo 256
};

UNWEIGHT_INLINE void start_streams(Streams& streams, const uint8_t*& words) {
  for (int stream = 0; stream < 2; stream++)
    for (int half = 0; half < 2; half++) {
      streams.word[2 * stream + half] = load_vector(words + stream * 256 + half * 64);
      streams.next[2 * stream + half] = load_vector(words + stream * 256 + 128 + half * 64);
    }
  streams.position = _mm512_setzero_si512();
  words += 512;
}

// 256 entries in memory: they are operands of the look-ups, which would otherwise need copies of them in registers.
UNWEIGHT_INLINE __m512i look_up(const uint8_t* table, __m512i index, __mmask64 upper_half) {
  asm("" : "+r"(table));  // or the compiler does keep them in registers
  return _mm512_mask_blend_epi8(upper_half,
                                _mm512_permutex2var_epi8(load_vector(table), index, load_vector(table + 64)),
                                _mm512_permutex2var_epi8(load_vector(table + 128), index, load_vector(table + 192)));
}

// What decoding a warp needs besides the tables.
struct WarpWork {
  Streams streams;
  const uint8_t *plane, *words;
  uint8_t* tile;
};

// The 4 x 16 streams of a warp go through the tables together: byte j of a 32-bit lane is stream j's.
struct Lookup {
  __m512i index;
  __mmask64 upper_half;
};

// `code`: where the next code's eight bits are in each window, from the bottom of its 64-bit lane.
UNWEIGHT_INLINE Lookup next_codes(const MatrixView& matrix, const __m512i (&window)[4], __m512i& code) {
  const __m512i even_bytes = splat(0x00FF00FF), lower_half = splat(0x0000FFFF);
  const __m512i low = merge_bits(_mm512_multishift_epi64_epi8(code, window[1]),
                                 _mm512_multishift_epi64_epi8(code, window[0]), even_bytes);
  const __m512i high = merge_bits(_mm512_multishift_epi64_epi8(code, window[3]),
                                  _mm512_multishift_epi64_epi8(code, window[2]), even_bytes);
  Lookup lookup;
  lookup.index = merge_bits(high, low, lower_half);
  lookup.upper_half = _mm512_movepi8_mask(lookup.index);
  code = _mm512_sub_epi8(code, look_up(matrix.code_length, lookup.index, lookup.upper_half));
  return lookup;
}

// Register i of the two k-steps and two halves of 16 lanes that the codes are for.
UNWEIGHT_INLINE void store_weights(const MatrixView& matrix, const Lookup& lookup, const __m512i (&signs)[2][4], int i,
                                   uint8_t* tile) {
  constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;
  const __m512i first = look_up(matrix.first_exponent, lookup.index, lookup.upper_half);
  const __m512i second = look_up(matrix.second_exponent, lookup.index, lookup.upper_half);
  // Only the exponent bits count: what is left of neighbours in the other bits gives way to signs and mantissas.
  const __m512i crossed = _mm512_shrdi_epi32(first, second, 16);  // first of streams 2, 3; second of streams 0, 1
  const __m512i low = _mm512_mask_blend_epi16(kUpperHalves, first, crossed);
  const __m512i high = _mm512_mask_blend_epi16(kUpperHalves, crossed, second);
  const __m512i exponents[4] = {_mm512_slli_epi16(low, 7), _mm512_srli_epi16(low, 1), _mm512_slli_epi16(high, 7),
                                _mm512_srli_epi16(high, 1)};
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const int k = j >> 1, half = j & 1;
    const __m512i s = signs[half][2 * k + (i >> 1)];
    _mm512_store_si512(tile + tile_offset(k, 16 * half, i),
                       merge_bits(exponents[j], i & 1 ? _mm512_rol_epi32(s, 8) : s, splat(kEvenBits)));
  }
}

// A code's length decides where the next one is, which takes twice as long as the instructions for it occupy the
// processor: so two warps take turns, and the next codes are looked up before the last ones are stored.
UNWEIGHT_INLINE void decode_huffman_pair(const MatrixView& matrix, const Stage& stage, int first_warp,
                                         WarpWork (&work)[2]) {
  const __m512i first_code = _mm512_set1_epi64(0x3838383818181818);
  for (int step = 0; step < kKSteps / 2; step++) {
    __m512i window[2][4], code[2] = {first_code, first_code}, signs[2][2][4];
    Lookup lookup[2];
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
      const Streams& streams = work[w].streams;
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
        window[w][j] = _mm512_shldv_epi32(streams.word[j], streams.next[j], _mm512_srli_epi32(streams.position, 8 * j));
      lookup[w] = next_codes(matrix, window[w], code[w]);
      transpose_words(work[w].plane + 512 * step, signs[w][0]);
      transpose_words(work[w].plane + 512 * step + 256, signs[w][1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; i++)
#pragma GCC unroll 2
      for (int w = 0; w < 2; w++) {
        const Lookup last = lookup[w];
        if (i < kRegisters - 1) lookup[w] = next_codes(matrix, window[w], code[w]);
        store_weights(matrix, last, signs[w], i, work[w].tile + 2 * step * 2 * kUnitBytes);
      }
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
      prefetch_ahead(stage, first_warp + w, step);
      Streams& streams = work[w].streams;
      const __m512i before = streams.position;
      streams.position = _mm512_add_epi8(before, _mm512_sub_epi8(first_code, code[w]));
      const __m512i passed = _mm512_xor_si512(streams.position, before);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __mmask16 refill = _mm512_test_epi32_mask(passed, splat(32u << (8 * j)));
        streams.word[j] = _mm512_mask_mov_epi32(streams.word[j], refill, streams.next[j]);
        streams.next[j] = _mm512_mask_expand_epi32(streams.next[j], refill, load_vector(work[w].words));
        work[w].words += 4 * __builtin_popcount(refill);
      }
    }
  }
}

UNWEIGHT_INLINE uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent - scale) & 255;
}

// Signs and mantissas come from the S-plane again: reading them back from the tile would wait for its wide stores.
// False if the patches and the k-steps that have some don't go together.
UNWEIGHT_INLINE bool apply_patches(const uint8_t* patches, const uint8_t* plane, WarpHeader header, bool nibble,
                                   uint32_t scale, uint8_t* tile) {
  uint32_t ksteps = header.patched_ksteps();
  for (uint32_t n = 0; n < header.patches(); n++) {
    if (ksteps == 0) return false;
    const uint32_t patch = load_word(patches + 4 * n), lane = patch_place(patch) >> 2, reg = patch_place(patch) & 3;
    const uint32_t kstep = __builtin_ctz(ksteps);
    const uint32_t signs = load_word(plane + (kstep >> 1) * 512 + lane * 16 + (kstep & 1) * 8 + (reg >> 1) * 4);
    uint32_t exponents = patch & kExponentBits;
    if (nibble)
      exponents = unscaled_exponent(patch >> 7 & 255, scale) << 7 | unscaled_exponent(patch >> 23 & 255, scale) << 23;
    const uint32_t weights = (rotate_left(signs, 8 * (reg & 1)) & ~kExponentBits) | exponents;
    std::memcpy(tile + tile_offset(kstep, lane, reg), &weights, 4);
    ksteps &= (ksteps - 1) | (0 - (patch >> 31));  // kPatchContinues; a branch here would be guessed wrong
  }
  return ksteps == 0;
}

UNWEIGHT_INLINE void clear_rows(uint32_t rows, uint8_t* tile) {
  for (rows &= 0xFFFF; rows; rows &= rows - 1) {
    const uint32_t row = __builtin_ctz(rows);
    for (int unit = 0; unit < kUnits; unit++) std::memset(tile + unit * kUnitBytes + row * 16, 0, 16);
  }
}

// Decodes the stages of one block in order; of each stage any pairs of warps, each pair in every stage.
struct BlockDecoder {
  const MatrixView& matrix;
  const uint64_t first_stage;
  const uint32_t scale;  // what nibble exponents are above the true ones, modulo 2^32
  const bool prefetch;   // unless the caller does it while it uses the tiles
  bool started[kWarps / 2];
  Streams streams[kWarps];
};

UNWEIGHT_INLINE uint32_t nibble_scale(const MatrixView& matrix) { return kNibbleScaledBase - matrix.nibble_base; }

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
UNWEIGHT_INLINE Damage decode_pair(BlockDecoder& decoder, uint64_t s, int first_warp, uint8_t* tiles,
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
    return damage(Flaw::kNone, 0);
  }

  WarpHeader headers[2];
  uint64_t patches[2], words[2];  // from the start of the stage
  for (int w = 0; w < 2; w++) {
    headers[w] = {load_word(stage.bytes + 4 * (first_warp + w))};
    patches[w] = headers[w].section() + 4 * (nibble && headers[w].has_zero_rows());
    words[w] = patches[w] + 4 * headers[w].patches();
    if (headers[w].section() < static_cast<uint32_t>(nibble ? kNibbleSections : kHuffmanSections) ||
        words[w] > stage.size)
      return damage(Flaw::kSection, first_warp + w);
  }
  if (nibble) {
    for (int w = 0; w < 2; w++) {
      decode_nibble_warp(stage, first_warp + w, decoder.scale, tiles + w * tile_stride);
      if (headers[w].has_zero_rows())
        clear_rows(load_word(stage.bytes + headers[w].section()), tiles + w * tile_stride);
    }
  } else {
    WarpWork work[2];
    uint8_t copies[2][kWordsReach];
    for (int w = 0; w < 2; w++) {
      work[w].plane = stage.bytes + kStageHeaderBytes + (first_warp + w) * kWarpPlaneBytes;
      work[w].words = stage.bytes + words[w];
      work[w].tile = tiles + w * tile_stride;
      const uint64_t available = matrix.bytes + matrix.size - work[w].words;
      if (available < kWordsReach) {
        std::memset(copies[w], 0, kWordsReach);
        std::memcpy(copies[w], work[w].words, available);
        work[w].words = copies[w];
      }
      if (started)
        work[w].streams = decoder.streams[first_warp + w];
      else
        start_streams(work[w].streams, work[w].words);
    }
    started = true;
    decode_huffman_pair(matrix, stage, first_warp, work);
    for (int w = 0; w < 2; w++) decoder.streams[first_warp + w] = work[w].streams;
  }
  for (int w = 0; w < 2; w++)
    if (headers[w].patches() | headers[w].patched_ksteps())
      if (!apply_patches(stage.bytes + patches[w], stage.bytes + kStageHeaderBytes + (first_warp + w) * kWarpPlaneBytes,
                         headers[w], nibble, decoder.scale, tiles + w * tile_stride))
        return damage(Flaw::kPatches, first_warp + w);
  return damage(Flaw::kNone, 0);
}

// Four vectors of 4 rows x 8 columns <-> four rows x 32 columns: its own inverse.
UNWEIGHT_INLINE void transpose_pieces(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xEE);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
  v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

}  // namespace
}  // namespace unweight
