#include "choice.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "../../format/error.h"
#include "../../format/header.h"
#include "../grid.h"
#include "../plan.h"

namespace unweight::cuda {
namespace {

constexpr int kScratch = -1;
constexpr uint64_t kLeastBucket = 8, kMostBucket = 16384;

// From so many tokens on, decoding once and multiplying takes less time than decoding for every tile of tokens, by the
// model of bench/products.py: the nearest power of two. tests/test_tuning_predict.py compares.
uint64_t scratch_from(int layout) {
  switch (layout) {
    case static_cast<int>(Layout::kNibble): return 8192;
    case static_cast<int>(Layout::kArchive): return 0;
    default: return 2048;  // also where the layout isn't known: most weights are huffman
  }
}

// The smallest instance that takes all tokens at once; where none does, the one of the last two whose tiles cost less.
// A tile of the smaller one takes about 0.64 of the time, but for raw weights: their bytes take most of it.
int fused_config(int layout, uint64_t tokens) {
  const int smallest = smallest_config(tokens);
  if (static_cast<uint64_t>(kLinearConfigs[smallest].tokens) >= tokens) return smallest;
  const auto tiles = [tokens](int i) { return ceil_div(tokens, static_cast<uint64_t>(kLinearConfigs[i].tokens)); };
  const int largest = kLinearConfigCount - 1;
  if (layout == static_cast<int>(Layout::kRaw)) return largest;
  return 16 * tiles(largest - 1) < 25 * tiles(largest) ? largest - 1 : largest;
}

Choice choice_of(int config_index) {
  if (config_index == kScratch) return {true, {}, kScratch};
  return {false, kLinearConfigs[config_index], config_index};
}

using Key = std::tuple<int, uint64_t, uint64_t, uint64_t>;  // layout, out_features, in_features, bucket
using Table = std::map<Key, int>;

class Tables {
 public:
  std::shared_ptr<const Table> of(const std::string& gpu) const {
    if (!any_.load(std::memory_order_acquire)) return nullptr;
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = tables_.find(gpu);
    return found == tables_.end() ? nullptr : found->second;
  }

  void set(const std::string& gpu, std::shared_ptr<const Table> table) {
    const std::lock_guard<std::mutex> guard(lock_);
    if (table->empty())
      tables_.erase(gpu);
    else
      tables_[gpu] = std::move(table);
    any_.store(!tables_.empty(), std::memory_order_release);
  }

 private:
  mutable std::mutex lock_;
  std::map<std::string, std::shared_ptr<const Table>> tables_;
  std::atomic<bool> any_{false};  // calls are many, tables are few: most never take the lock
};

Tables& tables() {
  static Tables all;
  return all;
}

void check_entry(const TunedEntry& entry) {
  if (entry.layout < kAnyLayout || entry.layout >= static_cast<int>(Layout::kArchive))
    fail("layout: ", entry.layout, ", expected -1 (any), 0 (raw), 1 (huffman) or 2 (nibble)");
  if (entry.tokens != token_bucket(entry.tokens))
    fail("tokens: ", entry.tokens, ", expected a power of two in ", kLeastBucket, "...", kMostBucket);
  if (entry.config_index < kScratch || entry.config_index >= kLinearConfigCount)
    fail("config: ", entry.config_index, ", expected 0...", kLinearConfigCount - 1, ", or -1 for scratch");
  const uint64_t of_config =
      entry.config_index == kScratch ? 0 : static_cast<uint64_t>(kLinearConfigs[entry.config_index].tokens);
  const bool invariant = of_config >= entry.tokens && of_config <= kInvariantTokens;
  if (entry.tokens <= kInvariantTokens && !invariant)
    fail("config: ", entry.config_index, " for ", entry.tokens, " tokens, expected one of ", entry.tokens, "...",
         kInvariantTokens, " tokens: results may not depend on the number of rows there");
  if (entry.tokens > kInvariantTokens && entry.config_index != kScratch && of_config <= kInvariantTokens)
    fail("config: ", entry.config_index, " for ", entry.tokens, " tokens, expected one of more than ", kInvariantTokens,
         " tokens, or -1 for scratch");
}

}  // namespace

uint64_t token_bucket(uint64_t tokens) {
  uint64_t bucket = kLeastBucket;
  while (bucket < tokens && bucket < kMostBucket) bucket *= 2;
  return bucket;
}

Choice choose(int layout, uint64_t out_features, uint64_t in_features, uint64_t tokens, int, const std::string& gpu) {
  if (layout == static_cast<int>(Layout::kArchive)) return choice_of(kScratch);
  if (!gpu.empty()) {
    if (const auto table = tables().of(gpu)) {
      const auto found = table->find({layout, out_features, in_features, token_bucket(tokens)});
      if (found != table->end()) return choice_of(found->second);
    }
  }
  if (tokens > kInvariantTokens && tokens >= scratch_from(layout)) return choice_of(kScratch);
  return choice_of(fused_config(layout, tokens));
}

void set_tuned(const std::string& gpu, const std::vector<TunedEntry>& entries) {
  if (gpu.empty()) fail("gpu: an empty name, expected the name of a GPU");
  auto table = std::make_shared<Table>();
  for (const TunedEntry& entry : entries) {
    check_entry(entry);
    (*table)[{entry.layout, entry.out_features, entry.in_features, entry.tokens}] = entry.config_index;
  }
  tables().set(gpu, std::move(table));
}

std::vector<TunedEntry> tuned(const std::string& gpu) {
  std::vector<TunedEntry> entries;
  if (const auto table = tables().of(gpu))
    for (const auto& [key, config] : *table)
      entries.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), std::get<3>(key), config});
  return entries;
}

}  // namespace unweight::cuda
