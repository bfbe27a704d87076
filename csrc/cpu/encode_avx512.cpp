#ifndef UNWEIGHT_PORTABLE_ONLY
#include "encode_avx512.h"

#include "vectors_avx512.h"
#include "word_streams.h"

namespace unweight {
namespace {

// Two k-steps (32 columns) of a row are a vector: 32-bit words in order of k-step, half of its columns, pair of
// columns. A lane's registers are the same words of rows r (registers 0, 2) and r + 8 (1, 3).

UNWEIGHT_INLINE const uint16_t* first_row(const StageRows& stage, int warp, int half) {
  return stage.data + (kWarpRows * warp + 4 * half) * stage.stride;
}

// No hardware follows 64 rows at a time: the same place of the next stage is asked for while this one is encoded.
UNWEIGHT_INLINE __m512i load_row(const uint16_t* p, int64_t ahead) {
  // An address, not a pointer: it may be behind the matrix, where a prefetch does nothing.
  _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + sizeof *p * ahead), _MM_HINT_T0);
  return _mm512_loadu_si512(p);
}

// The S words of two k-steps, {S0(k) S1(k) S0(k+1) S1(k+1)} a lane, for the four lanes of rows r and r + 8.
UNWEIGHT_INLINE void store_plane(__m512i upper, __m512i lower, uint32_t* plane) {
  const __m512i s = select_bits(splat(kEvenBits), upper, _mm512_ror_epi32(lower, 8));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(plane, _mm512_permutexvar_epi32(order, s));
}

// Both exponents of each register, less the window's first, as 16-bit fields.
UNWEIGHT_INLINE __m512i relative_exponents(__m512i weights, __m512i first) {
  return _mm512_sub_epi16(_mm512_and_si512(_mm512_srli_epi32(weights, 7), splat(0x00FF00FFu)), first);
}

struct ByteTable {
  __m512i part[4];
};
UNWEIGHT_INLINE ByteTable load_table(const uint8_t* bytes) {
  ByteTable t;
  for (int i = 0; i < 4; i++) t.part[i] = _mm512_loadu_si512(bytes + 64 * i);
  return t;
}
UNWEIGHT_INLINE __m512i look_up(const ByteTable& t, __m512i index) {
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), _mm512_permutex2var_epi8(t.part[0], index, t.part[1]),
                                _mm512_permutex2var_epi8(t.part[2], index, t.part[3]));
}

// Where the pairs of four vectors are in a PairWindow: byte j of each 32-bit lane is vector j's. An exponent outside
// the window is its last one, which no entry has.
UNWEIGHT_INLINE __m512i window_indexes(__m512i a, __m512i b, __m512i c, __m512i d, __m512i first) {
  const __m512i even_bytes = splat(0x00FF00FFu), last = _mm512_set1_epi8(15);
  // First exponents are in bits 7…14, second ones in 23…30, of both words of a 64-bit lane.
  const __m512i first_below = _mm512_set1_epi64(0x3737272717170707),
                second_below = _mm512_set1_epi64(0x2727373707071717);
  const __m512i ab = select_bits(even_bytes, _mm512_multishift_epi64_epi8(first_below, a),
                                 _mm512_multishift_epi64_epi8(first_below, b));
  const __m512i cd = select_bits(even_bytes, _mm512_multishift_epi64_epi8(second_below, c),
                                 _mm512_multishift_epi64_epi8(second_below, d));
  const __m512i firsts = _mm512_mask_blend_epi16(0xAAAAAAAAu, ab, cd), seconds = _mm512_shrdi_epi32(ab, cd, 16);
  const __m512i low = _mm512_min_epu8(_mm512_sub_epi8(firsts, first), last);
  const __m512i high = _mm512_min_epu8(_mm512_sub_epi8(seconds, first), last);
  return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
}

UNWEIGHT_INLINE __m512i byte_of(__m512i x, int i, uint32_t mask) {
  return _mm512_and_si512(_mm512_srli_epi32(x, 8 * i), splat(mask));
}

// Codes of registers 0, 1 or 2, 3 one behind the other, of two rows, and their bits with what is missing.
struct Halves {
  __m512i code, bits;  // 16 bits a lane and row; kMissing in the bytes of `bits`
};
UNWEIGHT_INLINE Halves join_codes(const ByteTable& codes, const ByteTable& lengths, __m512i index) {
  const __m512i code = look_up(codes, index), entry = look_up(lengths, index), low_byte = _mm512_set1_epi16(0xFF);
  const __m512i length = _mm512_and_si512(entry, _mm512_set1_epi8(15)), second = _mm512_srli_epi16(length, 8);
  const __m512i above = _mm512_sllv_epi16(_mm512_and_si512(code, low_byte), second);
  const __m512i sum = _mm512_add_epi16(length, second);
  return {_mm512_or_si512(above, _mm512_srli_epi16(code, 8)),
          select_bits(_mm512_set1_epi8(static_cast<char>(kMissing)), entry, sum)};
}

// Field h of lane 4r + q is that of row r, half h, pair q: r is two rows of a vector, by 16-bit halves, then two of the
// other.
struct alignas(64) FieldOrder {
  uint16_t field[2][32];  // by k-step
};
constexpr FieldOrder make_field_order() {
  FieldOrder order{};
  for (int k = 0; k < 2; k++)
    for (int lane = 0; lane < 16; lane++)
      for (int h = 0; h < 2; h++) {
        const int row = lane / 4, word = 8 * k + 4 * h + lane % 4;
        order.field[k][2 * lane + h] = static_cast<uint16_t>(2 * word + row % 2 + 32 * (row / 2));
      }
  return order;
}
constexpr FieldOrder kFieldOrder = make_field_order();

UNWEIGHT_INLINE void add_missing(MissingCodes& missing, uint64_t places, int kstep, int half) {
  alignas(64) static constexpr uint8_t kPlaces[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                      48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  const __m512i all_places =
      _mm512_or_si512(_mm512_load_si512(kPlaces), _mm512_set1_epi8(static_cast<char>(64 * half)));
  // Stored whether there are any or not: which it is can't be guessed.
  _mm512_storeu_si512(missing.place + missing.count, _mm512_maskz_compress_epi8(places, all_places));
  _mm512_storeu_si512(missing.kstep + missing.count, _mm512_set1_epi8(static_cast<char>(kstep)));
  missing.count += static_cast<uint32_t>(_mm_popcnt_u64(places));
}

}  // namespace

void look_up_warp_avx512(const PairWindow& window, const StageRows& stage, int warp, uint32_t* plane,
                         uint32_t (*code)[2 * kLanes], uint32_t (*bits)[2 * kLanes], MissingCodes& missing) {
  const ByteTable codes = load_table(window.low), lengths = load_table(window.length);
  const __m512i first = _mm512_set1_epi8(static_cast<char>(window.first)), low_half = splat(0xFFFF);
  missing.count = 0;
  for (int pair = 0; pair < kKSteps / 2; pair++) {
    uint64_t places[2][2];  // by k-step and half of the lanes
    for (int half = 0; half < 2; half++) {
      const uint16_t* rows = first_row(stage, warp, half) + 2 * kKStepColumns * pair;
      Halves halves[2];
      for (int i = 0; i < 2; i++) {
        __m512i upper[2], lower[2];
        for (int j = 0; j < 2; j++) {
          const int row = 2 * i + j;
          upper[j] = load_row(rows + row * stage.stride, stage.ahead);
          lower[j] = load_row(rows + (row + 8) * stage.stride, stage.ahead);
          store_plane(upper[j], lower[j], plane + (pair * kLanes + 16 * half + 4 * row) * 4);
        }
        halves[i] = join_codes(codes, lengths, window_indexes(upper[0], lower[0], upper[1], lower[1], first));
      }
      for (int k = 0; k < 2; k++) {
        const __m512i order = _mm512_load_si512(kFieldOrder.field[k]), some_bits = splat(31);
        const int stream = kLanes * k + 16 * half;
        const __m512i c = _mm512_permutex2var_epi16(halves[0].code, order, halves[1].code);
        const __m512i b = _mm512_permutex2var_epi16(halves[0].bits, order, halves[1].bits);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi32(b, 16), some_bits);
        const __m512i above = _mm512_sllv_epi32(_mm512_and_si512(c, low_half), second);
        _mm512_storeu_si512(code[pair] + stream, _mm512_or_si512(above, _mm512_srli_epi32(c, 16)));
        _mm512_storeu_si512(bits[pair] + stream, _mm512_add_epi32(_mm512_and_si512(b, some_bits), second));
        places[k][half] = _mm512_movepi8_mask(b);
      }
    }
    for (int k = 0; k < 2; k++)
      for (int half = 0; half < 2; half++) add_missing(missing, places[k][half], 2 * pair + k, half);
  }
}

namespace {

// The low bytes of two vectors of 16-bit fields.
struct alignas(64) LowBytes {
  uint8_t byte[64];
};
constexpr LowBytes make_low_bytes() {
  LowBytes low{};
  for (int i = 0; i < 64; i++) low.byte[i] = static_cast<uint8_t>(2 * i);
  return low;
}
constexpr LowBytes kLowBytes = make_low_bytes();

}  // namespace

uint64_t look_up_round_avx512(const PairWindow& window, const uint16_t* weights, uint8_t* plane, uint32_t* code,
                              uint32_t* bits) {
  const ByteTable lows = load_table(window.low), highs = load_table(window.high);
  const __m512i first = _mm512_set1_epi8(static_cast<char>(window.first));
  const __m512i low_bytes = _mm512_load_si512(kLowBytes.byte);
  uint64_t missing = 0;
  // Two groups of 16 streams at once: first and second code of each.
  for (int g = 0; g < 4; g += 2) {
    __m512i pairs[4];
    for (int half = 0; half < 2; half++) {
      const int at = 32 * g + 128 * half;
      __m512i bytes[2];
      for (int i = 0; i < 2; i++) {
        const __m512i w = pairs[2 * i + half] = _mm512_loadu_si512(weights + at + 32 * i);
        bytes[i] = select_bits(_mm512_set1_epi16(0x7F), w, _mm512_srli_epi16(w, 8));
      }
      _mm512_storeu_si512(plane + at, _mm512_permutex2var_epi8(bytes[0], low_bytes, bytes[1]));
    }
    const __m512i index = window_indexes(pairs[0], pairs[1], pairs[2], pairs[3], first);
    const __m512i low = look_up(lows, index), high = look_up(highs, index);
    const uint64_t none = _mm512_testn_epi8_mask(high, _mm512_set1_epi8(static_cast<char>(0xF0)));
    for (int j = 0; j < 2; j++) {
      __m512i codes[2], lengths[2];
      for (int i = 0; i < 2; i++) {
        const int byte = 2 * j + i;
        codes[i] = _mm512_or_si512(byte_of(low, byte, 0xFF), _mm512_slli_epi32(byte_of(high, byte, 15), 8));
        lengths[i] = _mm512_srli_epi32(byte_of(high, byte, 0xF0), 4);
      }
      const int s = 16 * (g + j);
      _mm512_storeu_si512(code + s, _mm512_or_si512(_mm512_sllv_epi32(codes[0], lengths[1]), codes[1]));
      _mm512_storeu_si512(bits + s, _mm512_add_epi32(lengths[0], lengths[1]));
      missing |= _pext_u64(none >> 2 * j | none >> (2 * j + 1), 0x1111111111111111u) << s;
    }
  }
  return missing;
}

namespace {

// words[place[i]] = value[i] for i < count. Scatter instructions are slower than this, and a loop of unknown length is
// guessed wrong: so eight are stored, of 3 to 6 there usually are; the places of the others are free.
UNWEIGHT_INLINE void store_words(uint32_t* words, uint32_t count, __m512i place, __m512i value) {
  constexpr uint32_t kUsual = 8;
  alignas(64) uint32_t places[16], values[16];
  _mm512_store_si512(places, place);
  _mm512_store_si512(values, value);
#pragma GCC unroll 8
  for (uint32_t i = 0; i < kUsual; i++) words[places[i]] = values[i];
  for (uint32_t i = kUsual; i < count; i++) words[places[i]] = values[i];
}

}  // namespace

void append_avx512(WordStreams& streams, const uint32_t (*code)[kMostStreams], const uint32_t (*bits)[kMostStreams],
                   int rounds) {
  constexpr int kGroups = kMostStreams / 16;
  const __m512i word_bits = splat(32), below = splat(31);
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i word[kGroups], position[kGroups], place[kGroups], next[kGroups];
  for (int g = 0; g < kGroups; g++) {
    word[g] = _mm512_loadu_si512(streams.word + 16 * g);
    position[g] = _mm512_loadu_si512(streams.position + 16 * g);
    place[g] = _mm512_loadu_si512(streams.place + 16 * g);
    next[g] = _mm512_loadu_si512(streams.next_place + 16 * g);
  }
  uint32_t count = streams.count;
  for (int round = 0; round < rounds; round++)
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) {
      const __m512i n = _mm512_loadu_si512(bits[round] + 16 * g);
      const __m512i top = _mm512_sllv_epi32(_mm512_loadu_si512(code[round] + 16 * g), _mm512_sub_epi32(word_bits, n));
      const __m512i filled = _mm512_or_si512(word[g], _mm512_srlv_epi32(top, position[g]));
      // A shift by 32, where a word begins, gives 0.
      const __m512i rest = _mm512_sllv_epi32(top, _mm512_sub_epi32(word_bits, position[g]));
      const __m512i moved = _mm512_add_epi32(position[g], n);
      const __mmask16 full = _mm512_cmpge_epu32_mask(moved, word_bits);
      const uint32_t words = static_cast<uint32_t>(_mm_popcnt_u32(full));
      store_words(streams.words, words, _mm512_mask_compress_epi32(splat(count), full, place[g]),
                  _mm512_maskz_compress_epi32(full, filled));
      word[g] = _mm512_mask_mov_epi32(filled, full, rest);
      place[g] = _mm512_mask_mov_epi32(place[g], full, next[g]);
      next[g] = _mm512_mask_expand_epi32(next[g], full, _mm512_add_epi32(order, splat(count)));
      position[g] = _mm512_and_si512(moved, below);
      count += words;
    }
  streams.count = count;
  for (int g = 0; g < kGroups; g++) {
    _mm512_storeu_si512(streams.word + 16 * g, word[g]);
    _mm512_storeu_si512(streams.position + 16 * g, position[g]);
    _mm512_storeu_si512(streams.place + 16 * g, place[g]);
    _mm512_storeu_si512(streams.next_place + 16 * g, next[g]);
  }
}

namespace {

// The codes of a row's 32 columns, rotated as registers 0 and 2 have them. `outside`: words that need patches.
UNWEIGHT_INLINE __m512i window_codes(__m512i weights, __m512i first, __mmask16& outside) {
  const __m512i e = relative_exponents(weights, first);
  outside = _mm512_test_epi32_mask(e, splat(0xFFF0FFF0u));
  return _mm512_slli_epi16(_mm512_maskz_mov_epi16(_mm512_cmple_epu16_mask(e, _mm512_set1_epi16(15)), e), 7);
}

}  // namespace

void encode_nibbles_avx512(int base, const StageRows& stage, int warp, uint32_t* plane, uint32_t* codes,
                           uint32_t (*outside)[kRegisters]) {
  const __m512i first = _mm512_set1_epi16(static_cast<short>(base));
  // {N(k) N(k+1)} of the lanes of two rows: their first halves; the second ones are four words further.
  const __m512i lanes = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  const __m512i second_half = _mm512_add_epi32(lanes, splat(4));
  for (int pair = 0; pair < kKSteps / 2; pair++)
    for (int half = 0; half < 2; half++) {
      const uint16_t* rows = first_row(stage, warp, half) + 2 * kKStepColumns * pair;
      uint64_t missing[2] = {0, 0};  // rows r and r + 8: 16 words a row
      __m512i merged[2];
      for (int row = 0; row < 4; row++) {
        const __m512i upper = load_row(rows + row * stage.stride, stage.ahead);
        const __m512i lower = load_row(rows + (row + 8) * stage.stride, stage.ahead);
        const int lane = 16 * half + 4 * row;
        store_plane(upper, lower, plane + (pair * kLanes + lane) * 4);
        __mmask16 out[2];
        const __m512i codes_upper = window_codes(upper, first, out[0]);
        merged[row % 2] = _mm512_or_si512(codes_upper, _mm512_ror_epi32(window_codes(lower, first, out[1]), 8));
        for (int i = 0; i < 2; i++) missing[i] |= uint64_t{out[i]} << (16 * row);
        if (row % 2 == 0) continue;
        const __m512i second = _mm512_permutex2var_epi32(merged[0], second_half, merged[1]);
        _mm512_storeu_si512(
            codes + (pair * kLanes + lane - 4) * 2,
            _mm512_or_si512(_mm512_permutex2var_epi32(merged[0], lanes, merged[1]), _mm512_rol_epi32(second, 4)));
      }
      for (int k = 0; k < 2; k++)
        for (int i = 0; i < kRegisters; i++) {
          const uint64_t words = 0x000F000F000F000Fu << (8 * k + 4 * (i >> 1));
          uint32_t& to = outside[2 * pair + k][i];
          to = (half ? to : 0) | static_cast<uint32_t>(_pext_u64(missing[i & 1], words)) << (16 * half);
        }
    }
}

void swizzled_pairs_avx512(const uint16_t* weights, int64_t count, uint16_t* pairs, uint16_t& most) {
  // Bytes of both exponents of a word, in its lower or its upper half.
  const __m512i lower = _mm512_set1_epi64(0x0000372700001707), upper = _mm512_set1_epi64(0x3727000017070000);
  __m512i largest = _mm512_set1_epi16(static_cast<short>(most));
  for (int64_t i = 0; i < count; i += 64, pairs += 32) {
    const __m512i a = _mm512_multishift_epi64_epi8(lower, _mm512_loadu_si512(weights + i));
    const __m512i b = _mm512_multishift_epi64_epi8(upper, _mm512_loadu_si512(weights + i + 32));
    const __m512i pair = select_bits(splat(0xFFFF), a, b);
    largest = _mm512_max_epu16(largest, pair);
    // pair ^ (pair >> 4 & 0xF0)
    const __m512i row = _mm512_srli_epi16(pair, 4);
    _mm512_storeu_si512(pairs, _mm512_ternarylogic_epi32(pair, row, _mm512_set1_epi16(0xF0), 0x78));
  }
  const __m512i halves = _mm512_max_epu16(largest, _mm512_srli_epi32(largest, 16));
  most = static_cast<uint16_t>(_mm512_reduce_max_epu32(_mm512_and_si512(halves, splat(0xFFFF))));
}

void copy_around_caches_avx512(uint8_t* to, const uint8_t* from, size_t size) {
  const size_t misaligned = (0 - reinterpret_cast<uintptr_t>(to)) % kVectorBytes;
  const size_t head = misaligned < size ? misaligned : size;
  __builtin_memcpy(to, from, head);
  size_t at = head;
  for (; at + kVectorBytes <= size; at += kVectorBytes)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  __builtin_memcpy(to + at, from + at, size - at);
  _mm_sfence();
}

}  // namespace unweight
#endif
