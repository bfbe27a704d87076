#include "pair_counts.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "capability.h"
#include "encode.h"

namespace unweight {
namespace {

// Neighbours are often equal, and a counter just stored can't be loaded at once: two tables take turns.
struct Tables {
  uint32_t count[2][kPairs];
};

void count_run(const uint16_t* weights, int64_t count, bool avx512, Tables& tables) {
  int64_t i = 0;
  if (avx512) {
    uint16_t pairs[32];
    for (; i + 64 <= count; i += 64) {
      exponent_pairs_avx512(weights + i, pairs);
      for (int j = 0; j < 32; j += 2) {
        tables.count[0][pairs[j]]++;
        tables.count[1][pairs[j + 1]]++;
      }
    }
  }
  for (; i + 4 <= count; i += 4) {
    tables.count[0][exponent_pair(load_pair(weights + i))]++;
    tables.count[1][exponent_pair(load_pair(weights + i + 2))]++;
  }
  if (i + 2 <= count) tables.count[0][exponent_pair(load_pair(weights + i))]++;
}

// The exponent that the encoder gives the missing half of a pair; for nibble one that is in no window.
uint32_t half_exponent(uint32_t e, Layout layout) {
  if (layout == Layout::kArchive) return e;
  return layout == Layout::kHuffman && e != 255 ? e : 0;
}

// Few of the 256 rows of a table are in use: only those are added, and cleared for the next time.
void flush(Tables& tables, PairCounts& total) {
  static std::mutex merging;
  const std::lock_guard<std::mutex> lock(merging);
  for (int row = 0; row < 256; row++) {
    uint32_t *a = tables.count[0] + 256 * row, *b = tables.count[1] + 256 * row, any = 0;
    for (int i = 0; i < 256; i++) any |= a[i] | b[i];
    if (!any) continue;
    total.used[row] = true;
    for (int i = 0; i < 256; i++) total.count[256 * row + i] += uint64_t{a[i]} + b[i];
    std::fill_n(a, 256, 0);
    std::fill_n(b, 256, 0);
  }
}

}  // namespace

void count_pairs(const uint16_t* weights, int64_t count, int64_t run, Layout layout, PairCounts& total) {
  // All zero between calls.
  thread_local std::unique_ptr<Tables> tables{new Tables{}};
  const bool avx512 = capability() == Capability::kAvx512;
  if (run % 2 == 0) run = count;
  // A counter has 32 bits.
  constexpr int64_t kFlushAfter = int64_t{1} << 32;
  int64_t since_flush = 0;
  for (; count > 0; weights += run, count -= run) {
    const int64_t n = std::min(run, count);
    count_run(weights, n, avx512, *tables);
    if (n % 2) {
      const uint32_t e = weights[n - 1] >> 7 & 255;
      tables->count[0][e | half_exponent(e, layout) << 8]++;
    }
    since_flush += n;
    if (since_flush < kFlushAfter) continue;
    flush(*tables, total);
    since_flush = 0;
  }
  flush(*tables, total);
}

}  // namespace unweight
