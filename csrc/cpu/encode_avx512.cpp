#ifndef UNWEIGHT_PORTABLE_ONLY
#include "encode_avx512.h"

#include <immintrin.h>

#include "word_streams.h"

namespace unweight {
namespace {

#define UNWEIGHT_INLINE static inline __attribute__((always_inline))

UNWEIGHT_INLINE __m512i all(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
UNWEIGHT_INLINE __m512i select(__m512i mask, __m512i ones, __m512i zeros) {
  return _mm512_ternarylogic_epi32(mask, ones, zeros, 0xCA);
}

// 4 rows x 32 columns -> out[c]: 4 rows x columns 8c…8c+7, a row a 128-bit lane.
UNWEIGHT_INLINE void load_rows(const uint16_t* p, int64_t stride, __m512i (&out)[4]) {
  const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + stride);
  const __m512i c = _mm512_loadu_si512(p + 2 * stride), d = _mm512_loadu_si512(p + 3 * stride);
  const __m512i ab0 = _mm512_shuffle_i32x4(a, b, 0x44), ab1 = _mm512_shuffle_i32x4(a, b, 0xEE);
  const __m512i cd0 = _mm512_shuffle_i32x4(c, d, 0x44), cd1 = _mm512_shuffle_i32x4(c, d, 0xEE);
  out[0] = _mm512_shuffle_i32x4(ab0, cd0, 0x88);
  out[1] = _mm512_shuffle_i32x4(ab0, cd0, 0xDD);
  out[2] = _mm512_shuffle_i32x4(ab1, cd1, 0x88);
  out[3] = _mm512_shuffle_i32x4(ab1, cd1, 0xDD);
}

// Registers of 16 lanes (8 of the warp's rows) in two k-steps: registers[k][i].
UNWEIGHT_INLINE void load_registers(const uint16_t* p, int64_t stride, __m512i (&registers)[2][kRegisters]) {
  __m512i upper[4], lower[4];
  load_rows(p, stride, upper);
  load_rows(p + 8 * stride, stride, lower);
  for (int k = 0; k < 2; k++) {
    registers[k][0] = upper[2 * k];
    registers[k][1] = lower[2 * k];
    registers[k][2] = upper[2 * k + 1];
    registers[k][3] = lower[2 * k + 1];
  }
}

// The S words of two k-steps, {S0(k) S1(k) S0(k+1) S1(k+1)} a lane, for 16 lanes.
UNWEIGHT_INLINE void store_plane(const __m512i (&registers)[2][kRegisters], uint32_t* plane) {
  const __m512i even = all(0x807F807Fu);
  __m512i s[2][2];
  for (int k = 0; k < 2; k++)
    for (int j = 0; j < 2; j++)
      s[k][j] = select(even, registers[k][2 * j], _mm512_ror_epi32(registers[k][2 * j + 1], 8));
  const __m512i low0 = _mm512_unpacklo_epi32(s[0][0], s[0][1]), high0 = _mm512_unpackhi_epi32(s[0][0], s[0][1]);
  const __m512i low1 = _mm512_unpacklo_epi32(s[1][0], s[1][1]), high1 = _mm512_unpackhi_epi32(s[1][0], s[1][1]);
  // q[t]: 128-bit lane r holds lane 4r + t.
  const __m512i q[4] = {_mm512_unpacklo_epi64(low0, low1), _mm512_unpackhi_epi64(low0, low1),
                        _mm512_unpacklo_epi64(high0, high1), _mm512_unpackhi_epi64(high0, high1)};
  const __m512i a = _mm512_shuffle_i32x4(q[0], q[1], 0x44), b = _mm512_shuffle_i32x4(q[2], q[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(q[0], q[1], 0xEE), d = _mm512_shuffle_i32x4(q[2], q[3], 0xEE);
  _mm512_storeu_si512(plane, _mm512_shuffle_i32x4(a, b, 0x88));
  _mm512_storeu_si512(plane + 16, _mm512_shuffle_i32x4(a, b, 0xDD));
  _mm512_storeu_si512(plane + 32, _mm512_shuffle_i32x4(c, d, 0x88));
  _mm512_storeu_si512(plane + 48, _mm512_shuffle_i32x4(c, d, 0xDD));
}

// Both exponents of each register, less the window's first, as 16-bit fields.
UNWEIGHT_INLINE __m512i relative_exponents(__m512i weights, __m512i first) {
  return _mm512_sub_epi16(_mm512_and_si512(_mm512_srli_epi32(weights, 7), all(0x00FF00FFu)), first);
}

// One bit a lane of 32 bits, from one a field of 16.
UNWEIGHT_INLINE uint32_t lanes_of_fields(__mmask32 fields) { return _pext_u32(fields | fields >> 1, 0x55555555u); }

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

// Four vectors of pairs looked up at once, a byte of each lane.
struct Looked {
  __m512i low, high;
  uint32_t missing[4];  // lanes, by vector
};
UNWEIGHT_INLINE Looked look_up_pairs(const ByteTable& low, const ByteTable& high, __m512i first,
                                     const __m512i (&pairs)[4]) {
  const __m512i byte = all(0xFF);
  Looked looked;
  __m512i index = _mm512_setzero_si512();
  for (int i = 0; i < 4; i++) {
    const __m512i e = relative_exponents(pairs[i], first);
    looked.missing[i] = lanes_of_fields(_mm512_cmpgt_epu16_mask(e, _mm512_set1_epi16(15)));
    const __m512i both = _mm512_and_si512(_mm512_or_si512(e, _mm512_srli_epi32(e, 12)), byte);
    index = _mm512_or_si512(index, _mm512_slli_epi32(both, 8 * i));
  }
  looked.low = look_up(low, index);
  looked.high = look_up(high, index);
  const uint64_t none = _mm512_testn_epi8_mask(looked.high, _mm512_set1_epi8(static_cast<char>(0xF0)));
  for (int i = 0; i < 4; i++) looked.missing[i] |= static_cast<uint32_t>(_pext_u64(none >> i, 0x1111111111111111ull));
  return looked;
}

UNWEIGHT_INLINE __m512i byte_of(__m512i x, int i, uint32_t mask) {
  return _mm512_and_si512(_mm512_srli_epi32(x, 8 * i), all(mask));
}

}  // namespace

void look_up_warp_avx512(const PairWindow& window, const uint16_t* corner, int64_t stride, uint32_t* plane,
                         uint32_t (*code)[kLanes], uint32_t (*bits)[kLanes], uint32_t* missing) {
  const ByteTable low = load_table(window.low), high = load_table(window.high);
  const __m512i first = _mm512_set1_epi16(window.first);
  for (int k = 0; k < kKSteps; k++) missing[k] = 0;
  for (int pair = 0; pair < kKSteps / 2; pair++)
    for (int half = 0; half < 2; half++) {
      __m512i registers[2][kRegisters];
      load_registers(corner + 4 * half * stride + 2 * kKStepColumns * pair, stride, registers);
      store_plane(registers, plane + (pair * kLanes + 16 * half) * 4);
      for (int k = 0; k < 2; k++) {
        const Looked looked = look_up_pairs(low, high, first, registers[k]);
        const __m512i lengths = _mm512_and_si512(_mm512_srli_epi32(looked.high, 4), all(0x0F0F0F0Fu));
        __m512i codes = byte_of(looked.low, 0, 0xFF), sum = byte_of(lengths, 0, 0xFF);
        for (int i = 1; i < kRegisters; i++) {
          const __m512i length = byte_of(lengths, i, 0xFF);
          codes = _mm512_or_si512(_mm512_sllv_epi32(codes, length), byte_of(looked.low, i, 0xFF));
          sum = _mm512_add_epi32(sum, length);
        }
        _mm512_storeu_si512(code[2 * pair + k] + 16 * half, codes);
        _mm512_storeu_si512(bits[2 * pair + k] + 16 * half, sum);
        missing[2 * pair + k] |= (looked.missing[0] | looked.missing[1] | looked.missing[2] | looked.missing[3])
                                 << (16 * half);
      }
    }
}

uint64_t look_up_round_avx512(const PairWindow& window, const uint16_t* weights, uint8_t* plane, uint32_t* code,
                              uint32_t* bits) {
  const ByteTable low = load_table(window.low), high = load_table(window.high);
  const __m512i first = _mm512_set1_epi16(window.first);
  uint64_t missing = 0;
  // Two groups of 16 streams at once: first and second code of each.
  for (int g = 0; g < 4; g += 2) {
    __m512i pairs[4];
    for (int i = 0; i < 4; i++) {
      const int at = 32 * (g + i / 2) + 128 * (i % 2);
      pairs[i] = _mm512_loadu_si512(weights + at);
      const __m512i signs = _mm512_srli_epi16(pairs[i], 8);
      const __m512i bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0x7F), pairs[i], signs, 0xCA);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(plane + at), _mm512_cvtepi16_epi8(bytes));
    }
    const Looked looked = look_up_pairs(low, high, first, pairs);
    for (int j = 0; j < 2; j++) {
      __m512i codes[2], lengths[2];
      for (int i = 0; i < 2; i++) {
        const int byte = 2 * j + i;
        codes[i] =
            _mm512_or_si512(byte_of(looked.low, byte, 0xFF), _mm512_slli_epi32(byte_of(looked.high, byte, 15), 8));
        lengths[i] = _mm512_srli_epi32(byte_of(looked.high, byte, 0xF0), 4);
      }
      const int s = 16 * (g + j);
      _mm512_storeu_si512(code + s, _mm512_or_si512(_mm512_sllv_epi32(codes[0], lengths[1]), codes[1]));
      _mm512_storeu_si512(bits + s, _mm512_add_epi32(lengths[0], lengths[1]));
      missing |= uint64_t{looked.missing[2 * j] | looked.missing[2 * j + 1]} << s;
    }
  }
  return missing;
}

void append_avx512(WordStreams& streams, int first, int groups, const uint32_t* code, const uint32_t* bits) {
  const __m512i word_bits = all(32), below = all(31);
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  uint32_t count = streams.count;
  for (int g = 0; g < groups; g++) {
    const int s = first + 16 * g;
    const __m512i n = _mm512_loadu_si512(bits + 16 * g), position = _mm512_loadu_si512(streams.position + s);
    const __m512i top = _mm512_sllv_epi32(_mm512_loadu_si512(code + 16 * g), _mm512_sub_epi32(word_bits, n));
    const __m512i filled = _mm512_or_si512(_mm512_loadu_si512(streams.word + s), _mm512_srlv_epi32(top, position));
    // A shift by 32, where a word begins, gives 0.
    const __m512i rest = _mm512_sllv_epi32(top, _mm512_sub_epi32(word_bits, position));
    const __m512i moved = _mm512_add_epi32(position, n);
    const __mmask16 full = _mm512_cmpge_epu32_mask(moved, word_bits);
    const __m512i place = _mm512_loadu_si512(streams.place + s), next = _mm512_loadu_si512(streams.next_place + s);
    _mm512_mask_i32scatter_epi32(streams.words, full, place, filled, 4);
    _mm512_storeu_si512(streams.word + s, _mm512_mask_mov_epi32(filled, full, rest));
    _mm512_storeu_si512(streams.place + s, _mm512_mask_mov_epi32(place, full, next));
    _mm512_storeu_si512(streams.next_place + s,
                        _mm512_mask_expand_epi32(next, full, _mm512_add_epi32(order, all(count))));
    _mm512_storeu_si512(streams.position + s, _mm512_and_si512(moved, below));
    count += static_cast<uint32_t>(_mm_popcnt_u32(full));
  }
  streams.count = count;
}

void encode_nibbles_avx512(int base, const uint16_t* corner, int64_t stride, uint32_t* plane, uint32_t* codes,
                           uint32_t (*outside)[kRegisters]) {
  const __m512i first = _mm512_set1_epi16(static_cast<short>(base));
  for (int pair = 0; pair < kKSteps / 2; pair++)
    for (int half = 0; half < 2; half++) {
      __m512i registers[2][kRegisters], nibbles[2];
      load_registers(corner + 4 * half * stride + 2 * kKStepColumns * pair, stride, registers);
      store_plane(registers, plane + (pair * kLanes + 16 * half) * 4);
      for (int k = 0; k < 2; k++) {
        __m512i c[kRegisters];
        for (int i = 0; i < kRegisters; i++) {
          const __m512i e = relative_exponents(registers[k][i], first);
          const __mmask32 out = _mm512_cmpgt_epu16_mask(e, _mm512_set1_epi16(15));
          c[i] = _mm512_slli_epi16(_mm512_maskz_mov_epi16(~out, e), 7);
          uint32_t& lanes = outside[2 * pair + k][i];
          lanes = (half ? lanes : 0) | lanes_of_fields(out) << (16 * half);
        }
        nibbles[k] = _mm512_or_si512(_mm512_or_si512(c[0], _mm512_ror_epi32(c[1], 8)),
                                     _mm512_rol_epi32(_mm512_or_si512(c[2], _mm512_ror_epi32(c[3], 8)), 4));
      }
      // {N(k) N(k+1)} a lane, lanes in order.
      const __m512i low = _mm512_unpacklo_epi32(nibbles[0], nibbles[1]);
      const __m512i high = _mm512_unpackhi_epi32(nibbles[0], nibbles[1]);
      const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                    back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
      uint32_t* out = codes + (pair * kLanes + 16 * half) * 2;
      _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, front, high));
      _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(low, back, high));
    }
}

void swizzled_pairs_avx512(const uint16_t* weights, int64_t count, uint16_t* pairs) {
  for (int64_t i = 0; i < count; i += 32, pairs += 16) {
    const __m512i both = _mm512_srli_epi32(_mm512_loadu_si512(weights + i), 7);
    const __m512i pair = select(all(0xFF), both, _mm512_srli_epi32(both, 8));
    const __m512i row = _mm512_and_si512(_mm512_srli_epi32(pair, 4), all(0xF0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), _mm512_cvtepi32_epi16(_mm512_xor_si512(pair, row)));
  }
}

}  // namespace unweight
#endif
