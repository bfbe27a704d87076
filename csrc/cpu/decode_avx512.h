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
};

// The stream is read linearly, and the hardware's prefetchers alone leave a third of the bandwidth unused. Each warp
// and pair of k-steps asks for its 16th of the stage that is two stages ahead.
UNWEIGHT_INLINE void prefetch_ahead(const Stage& stage, int warp, int step) {
  const uint64_t share = stage.size / 16;
  // An address, not a pointer: it may be behind the tensor, where a prefetch does nothing.
  const uintptr_t from = reinterpret_cast<uintptr_t>(stage.bytes) + 2 * stage.size + (4 * warp + step) * share;
  for (uint64_t i = 0; i < share; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
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

struct CodeTables {
  __m512i length[4], first[4], second[4];
};

UNWEIGHT_INLINE __m512i look_up(const __m512i (&table)[4], __m512i index, __mmask64 upper_half) {
  return _mm512_mask_blend_epi8(upper_half, _mm512_permutex2var_epi8(table[0], index, table[1]),
                                _mm512_permutex2var_epi8(table[2], index, table[3]));
}

// Byte j of `four`'s lanes into the exponent bits of a register.
UNWEIGHT_INLINE __m512i exponent_bits(__m512i first, __m512i second, int j) {
  const __m512i second_bits = splat(0x7F800000u);
  switch (j) {
    case 0: return select_bits(second_bits, _mm512_rol_epi32(second, 23), _mm512_rol_epi32(first, 7));
    case 1: return select_bits(second_bits, _mm512_rol_epi32(second, 15), _mm512_rol_epi32(first, 31));
    case 2: return select_bits(second_bits, _mm512_rol_epi32(second, 7), _mm512_rol_epi32(first, 23));
    default: return select_bits(second_bits, _mm512_rol_epi32(second, 31), _mm512_rol_epi32(first, 15));
  }
}

// The 4 x 16 streams go through the tables together: byte j of a 32-bit lane is stream j's.
UNWEIGHT_INLINE void decode_huffman_warp(const MatrixView& matrix, const Stage& stage, int warp, Streams& state,
                                         const uint8_t* words, uint8_t* tile) {
  CodeTables tables;
  for (int i = 0; i < 4; i++) {
    tables.length[i] = load_vector(matrix.code_length + 64 * i);
    tables.first[i] = load_vector(matrix.first_exponent + 64 * i);
    tables.second[i] = load_vector(matrix.second_exponent + 64 * i);
  }
  Streams streams = state;
  const __m512i even_bits = splat(kEvenBits);
  // A window's top byte into all four bytes of its lane; a write mask then takes the one byte.
  const __m512i top_byte =
      _mm512_broadcast_i32x4(_mm_setr_epi8(3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15));
  const uint8_t* plane = stage.bytes + kStageHeaderBytes + warp * kWarpPlaneBytes;
  for (int step = 0; step < kKSteps / 2; step++, plane += 512) {
    prefetch_ahead(stage, warp, step);
    __m512i s[2][4];
    transpose_words(plane, s[0]);
    transpose_words(plane + 256, s[1]);
    const __m512i before = streams.position;
    __m512i window[4];
    for (int j = 0; j < 4; j++)
      window[j] = _mm512_shldv_epi32(streams.word[j], streams.next[j], _mm512_srli_epi32(before, 8 * j));
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; i++) {
      __m512i index = window[3];
      index = _mm512_mask_shuffle_epi8(index, 0x4444444444444444, window[2], top_byte);
      index = _mm512_mask_shuffle_epi8(index, 0x2222222222222222, window[1], top_byte);
      index = _mm512_mask_shuffle_epi8(index, 0x1111111111111111, window[0], top_byte);
      const __mmask64 upper_half = _mm512_movepi8_mask(index);
      const __m512i length = look_up(tables.length, index, upper_half);
      const __m512i first = look_up(tables.first, index, upper_half);
      const __m512i second = look_up(tables.second, index, upper_half);
      streams.position = _mm512_add_epi8(streams.position, length);
      if (i < 3)  // the shift looks at five bits of its count only; what it rotates in is never reached
        for (int j = 0; j < 4; j++)
          window[j] = _mm512_shldv_epi32(window[j], window[j], _mm512_srli_epi32(length, 8 * j));
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const int k = j >> 1, half = j & 1;
        const __m512i signs = s[half][2 * k + (i >> 1)];
        const __m512i weights =
            select_bits(even_bits, i & 1 ? _mm512_rol_epi32(signs, 8) : signs, exponent_bits(first, second, j));
        _mm512_store_si512(tile + tile_offset(2 * step + k, 16 * half, i), weights);
      }
    }
    const __m512i passed = _mm512_xor_si512(streams.position, before);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __mmask16 refill = _mm512_test_epi32_mask(passed, splat(32u << (8 * j)));
      streams.word[j] = _mm512_mask_mov_epi32(streams.word[j], refill, streams.next[j]);
      streams.next[j] = _mm512_mask_expand_epi32(streams.next[j], refill, load_vector(words));
      words += 4 * __builtin_popcount(refill);
    }
  }
  state = streams;
}

UNWEIGHT_INLINE uint32_t unscaled_exponent(uint32_t exponent, uint32_t scale) {
  return exponent == 0 || exponent == 255 ? exponent : (exponent - scale) & 255;
}

// False if the patches and the k-steps that have some don't go together.
UNWEIGHT_INLINE bool apply_patches(const uint8_t* patches, WarpHeader header, bool nibble, uint32_t scale,
                                   uint8_t* tile) {
  uint32_t ksteps = header.patched_ksteps();
  for (uint32_t n = 0; n < header.patches(); n++) {
    if (ksteps == 0) return false;
    const uint32_t patch = load_word(patches + 4 * n), place = patch_place(patch);
    uint8_t* at = tile + tile_offset(__builtin_ctz(ksteps), place >> 2, place & 3);
    uint32_t exponents = patch & kExponentBits;
    if (nibble)
      exponents = unscaled_exponent(patch >> 7 & 255, scale) << 7 | unscaled_exponent(patch >> 23 & 255, scale) << 23;
    const uint32_t patched = (load_word(at) & ~kExponentBits) | exponents;
    std::memcpy(at, &patched, 4);
    if (!(patch & kPatchContinues)) ksteps &= ksteps - 1;
  }
  return ksteps == 0;
}

UNWEIGHT_INLINE void clear_rows(uint32_t rows, uint8_t* tile) {
  for (rows &= 0xFFFF; rows; rows &= rows - 1) {
    const uint32_t row = __builtin_ctz(rows);
    for (int unit = 0; unit < kUnits; unit++) std::memset(tile + unit * kUnitBytes + row * 16, 0, 16);
  }
}

// Decodes the stages of one block in order, and of each stage any warps, each in every stage.
struct BlockDecoder {
  const MatrixView& matrix;
  const uint64_t first_stage;
  const uint32_t scale;  // what nibble exponents are above the true ones, modulo 256
  bool started[kWarps];
  Streams streams[kWarps];
};

UNWEIGHT_INLINE uint32_t nibble_scale(const MatrixView& matrix) { return kNibbleScaledBase - matrix.nibble_base; }

UNWEIGHT_INLINE bool find_stage(const MatrixView& matrix, uint64_t stage, Stage& found) {
  const uint8_t* entry = matrix.bytes + matrix.index_offset + 4 * stage;
  const uint64_t begin = matrix.data_offset + 16 * uint64_t{load_word(entry)};
  const uint64_t end = matrix.data_offset + 16 * uint64_t{load_word(entry + 4)};
  if (begin > end || end > matrix.used_bytes || end - begin < kHuffmanSections) return false;
  found = {matrix.bytes + begin, end - begin};
  return true;
}

// Stage `s` of the block, 16 rows of one warp, to a tile (kTileBytes, 64-byte aligned).
UNWEIGHT_INLINE Flaw decode_warp(BlockDecoder& decoder, uint64_t s, int warp, uint8_t* tile) {
  const MatrixView& matrix = decoder.matrix;
  Stage stage;
  if (!find_stage(matrix, decoder.first_stage + s, stage)) return Flaw::kIndex;
  if (s % matrix.segment_stages == 0) decoder.started[warp] = false;
  const WarpHeader header{load_word(stage.bytes + 4 * warp)};
  const bool raw = WarpHeader{load_word(stage.bytes)}.is_raw();
  if (raw || matrix.layout == Layout::kRaw) {
    if (!raw || stage.size < kRawStageBytes) return Flaw::kRawStage;
    decode_raw_warp(stage, warp, tile);
    return Flaw::kNone;
  }
  const bool nibble = matrix.layout == Layout::kNibble;
  const uint64_t patches = header.section() + 4 * (nibble && header.has_zero_rows());
  const uint64_t words = patches + 4 * header.patches();
  if (header.section() < static_cast<uint32_t>(nibble ? kNibbleSections : kHuffmanSections) || words > stage.size)
    return Flaw::kSection;
  if (nibble) {
    decode_nibble_warp(stage, warp, decoder.scale, tile);
    if (header.has_zero_rows()) clear_rows(load_word(stage.bytes + header.section()), tile);
  } else {
    const uint8_t* next = stage.bytes + words;
    // Refills load a whole vector, so near the end of the tensor they would read behind it.
    constexpr uint64_t kReach = 4 * kMaxWarpWords + kVectorBytes;
    uint8_t copy[kReach];
    const uint64_t available = matrix.bytes + matrix.size - next;
    if (available < kReach) {
      std::memset(copy, 0, kReach);
      std::memcpy(copy, next, available);
      next = copy;
    }
    if (!decoder.started[warp]) start_streams(decoder.streams[warp], next);
    decoder.started[warp] = true;
    decode_huffman_warp(matrix, stage, warp, decoder.streams[warp], next, tile);
  }
  if (header.patches() | header.patched_ksteps())
    if (!apply_patches(stage.bytes + patches, header, nibble, decoder.scale, tile)) return Flaw::kPatches;
  return Flaw::kNone;
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
