#include "pair_counts.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "capability.h"
#include "encode.h"

namespace unweight {
namespace {

// Neighbours are often equal, and a counter just stored can't be loaded at once: two tables take turns. The pairs in
// use are a few columns of a few rows, which would all compete for the same sets of the first-level cache: so each row
// is permuted by its number, and the second table starts a few lines later.
inline uint32_t swizzle(uint32_t pair) { return pair ^ (pair >> 4 & 0xF0); }
struct Tables {
  struct alignas(64) Table {
    uint32_t count[kPairs];
    uint32_t shift[5 * 16];
  };
  Table table[2];
  uint16_t most = 0;  // the largest pair counted since the last flush

  void count(int i, uint32_t pair) {
    most = std::max(most, static_cast<uint16_t>(pair));
    table[i].count[swizzle(pair)]++;
  }
};

constexpr int64_t kBatch = 1024, kAhead = 2 * kBatch, kCacheLinePairs = 16;

void count_run(const uint16_t* weights, int64_t count, bool avx512, Tables& tables) {
  uint32_t *even = tables.table[0].count, *odd = tables.table[1].count;
  int64_t i = 0;
  if (avx512) {
    // Far more than are on their way at once: a pair is long stored when it is loaded again.
    uint16_t pairs[kBatch / 2];
    for (; i + kBatch <= count; i += kBatch) {
      swizzled_pairs_avx512(weights + i, kBatch, pairs, tables.most);
      // Counting is slow enough to hide memory behind it, if what comes next is asked for evenly.
      for (int64_t j = 0; j < kBatch / 2; j += kCacheLinePairs) {
        __builtin_prefetch(weights + std::min(i + 2 * j + kAhead, count - 1));
        for (int64_t k = j; k < j + kCacheLinePairs; k += 2) {
          even[pairs[k]]++;
          odd[pairs[k + 1]]++;
        }
      }
    }
  }
  const auto pair_at = [&](int64_t at) { return exponent_pair(load_pair(weights + at)); };
  for (; i + 4 <= count; i += 4) {
    tables.count(0, pair_at(i));
    tables.count(1, pair_at(i + 2));
  }
  if (i + 2 <= count) tables.count(0, pair_at(i));
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
  for (uint32_t second = 0; second <= uint32_t{tables.most} >> 8; second++) {
    uint32_t *a = tables.table[0].count + 256 * second, *b = tables.table[1].count + 256 * second, any = 0;
    for (int i = 0; i < 256; i++) any |= a[i] | b[i];
    if (!any) continue;
    uint64_t counts[256];
    for (uint32_t i = 0; i < 256; i++) counts[swizzle(256 * second + i) & 255] = uint64_t{a[i]} + b[i];
    total.add(second, counts);
    std::fill_n(a, 256, 0);
    std::fill_n(b, 256, 0);
  }
  tables.most = 0;
}

}  // namespace

void count_pairs(const uint16_t* weights, int64_t count, int64_t run, Layout layout, PairCounts& total) {
  // All zero between calls; those of a call that throws go with it.
  thread_local std::unique_ptr<Tables> kept;
  std::unique_ptr<Tables> tables = kept ? std::move(kept) : std::unique_ptr<Tables>(new Tables{});
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
      tables->count(0, e | half_exponent(e, layout) << 8);
    }
    since_flush += n;
    if (since_flush < kFlushAfter) continue;
    flush(*tables, total);
    since_flush = 0;
  }
  flush(*tables, total);
  kept = std::move(tables);
}

}  // namespace unweight
