// 16 streams a register, both codes of a round by gather. No C++ library here (see matrix_view.h).
#ifndef UNWEIGHT_PORTABLE_ONLY
#include "archive_decoder.h"
#include "vectors_avx512.h"

namespace unweight {
namespace {

constexpr int kGroups = kArchiveStreams / 16;
constexpr int kPrefixShift = 32 - 12;

// 32 weights from their sign+mantissa bytes and 16 table entries.
UNWEIGHT_INLINE __m512i merge(const uint8_t* plane, __m512i entries) {
  const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  const __m512i signs = _mm512_slli_epi16(bytes, 8);
  const __m512i parts = select_bits(_mm512_set1_epi16(0x7F), bytes, signs);
  return select_bits(_mm512_set1_epi16(static_cast<short>(0x807F)), parts, entries);
}

template <bool kAroundCaches>
UNWEIGHT_INLINE void store(uint16_t* out, __m512i weights) {
  if (kAroundCaches)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), weights);
  else
    _mm512_storeu_si512(out, weights);
}

template <bool kAroundCaches>
int64_t decode(ArchiveStreamState& state, const uint32_t* table, const uint8_t* plane, uint16_t* out, int64_t rounds) {
  __m512i w0[kGroups], w1[kGroups], position[kGroups];
  for (int g = 0; g < kGroups; g++) {
    w0[g] = _mm512_loadu_si512(state.w0 + 16 * g);
    w1[g] = _mm512_loadu_si512(state.w1 + 16 * g);
    position[g] = _mm512_loadu_si512(state.position + 16 * g);
  }
  const uint8_t* next = state.next;
  const __m512i passed = _mm512_set1_epi32(32), in_word = _mm512_set1_epi32(31);
  int64_t round = 0;
  // A round takes a word a stream at most, and a whole register is loaded for the last of them.
  for (; round < rounds && state.end - next >= 4 * (kArchiveStreams + 16); round++) {
    for (int g = 0; g < kGroups; g++) {
      const __m512i x = _mm512_shldv_epi32(w0[g], w1[g], position[g]);
      const __m512i first = _mm512_i32gather_epi32(_mm512_srli_epi32(x, kPrefixShift), table, 4);
      // The shift takes its count modulo 32, so the exponents above the length don't matter.
      const __m512i y = _mm512_shldv_epi32(x, x, first);
      const __m512i second = _mm512_i32gather_epi32(_mm512_srli_epi32(y, kPrefixShift), table, 4);
      const __m512i moved = _mm512_add_epi32(position[g], _mm512_add_epi32(first, second));
      const __mmask16 full = _mm512_test_epi32_mask(moved, passed);
      position[g] = _mm512_and_si512(moved, in_word);
      w0[g] = _mm512_mask_mov_epi32(w0[g], full, w1[g]);
      w1[g] = _mm512_mask_expand_epi32(w1[g], full, _mm512_loadu_si512(next));
      next += 4 * _mm_popcnt_u32(full);
      store<kAroundCaches>(out + 32 * g, merge(plane + 32 * g, first));
      store<kAroundCaches>(out + kRoundPairs + 32 * g, merge(plane + kRoundPairs + 32 * g, second));
    }
    _mm_prefetch(reinterpret_cast<const char*>(plane) + 2048, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(plane) + 2112, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(plane) + 2176, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(plane) + 2240, _MM_HINT_T0);
    plane += 2 * kRoundPairs;
    out += 2 * kRoundPairs;
  }
  for (int g = 0; g < kGroups; g++) {
    _mm512_storeu_si512(state.w0 + 16 * g, w0[g]);
    _mm512_storeu_si512(state.w1 + 16 * g, w1[g]);
    _mm512_storeu_si512(state.position + 16 * g, position[g]);
  }
  state.next = next;
  if (kAroundCaches) _mm_sfence();
  return round;
}

}  // namespace

int64_t decode_archive_rounds_avx512(ArchiveStreamState& state, const uint32_t* table, const uint8_t* plane,
                                     uint16_t* out, int64_t rounds, bool around_caches) {
  return around_caches && reinterpret_cast<uintptr_t>(out) % 64 == 0 ? decode<true>(state, table, plane, out, rounds)
                                                                     : decode<false>(state, table, plane, out, rounds);
}

}  // namespace unweight
#endif
