// supported_configs, and the tables of what was measured to be fastest.
#include "configs.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "../cuda/linear/choice.h"
#include "../cuda/plan.h"
#include "../format/error.h"
#include "arguments.h"

namespace unweight {

std::vector<int64_t> supported_configs(int64_t layout) {
  std::vector<int64_t> tokens{kScratch};
  if (layout != cuda::kAnyLayout && check_layout(layout) == Layout::kArchive) return tokens;
  for (const cuda::LinearConfig& config : cuda::kLinearConfigs) tokens.push_back(config.tokens);
  return tokens;
}

namespace {

// Five numbers an entry: layout, out_features, in_features, rows (a power of two), tokens of the configuration.
constexpr size_t kEntryNumbers = 5;

void set_tuned(const std::string& gpu, const std::vector<int64_t>& numbers) {
  if (numbers.size() % kEntryNumbers)
    fail("entries: ", numbers.size(), " numbers, expected a multiple of ", kEntryNumbers);
  std::vector<cuda::TunedEntry> entries;
  for (auto n = numbers.begin(); n != numbers.end(); n += kEntryNumbers) {
    const auto* begin = std::begin(cuda::kLinearConfigs);
    const auto* end = std::end(cuda::kLinearConfigs);
    const auto* config = std::find_if(begin, end, [n](const cuda::LinearConfig& c) { return c.tokens == n[4]; });
    if (config == end && n[4] != kScratch)
      fail("entries: tokens ", n[4], ", expected one of ", text_of(supported_configs(cuda::kAnyLayout)));
    entries.push_back({static_cast<int>(n[0]), static_cast<uint64_t>(n[1]), static_cast<uint64_t>(n[2]),
                       static_cast<uint64_t>(n[3]), n[4] == kScratch ? -1 : static_cast<int>(config - begin)});
  }
  cuda::set_tuned(gpu, entries);
}

std::vector<int64_t> tuned(const std::string& gpu) {
  std::vector<int64_t> numbers;
  for (const cuda::TunedEntry& entry : cuda::tuned(gpu))
    numbers.insert(numbers.end(),
                   {entry.layout, static_cast<int64_t>(entry.out_features), static_cast<int64_t>(entry.in_features),
                    static_cast<int64_t>(entry.tokens),
                    entry.config_index < 0 ? kScratch : cuda::kLinearConfigs[entry.config_index].tokens});
  return numbers;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CompositeExplicitAutograd, m) {
  m.impl("supported_configs", TORCH_BOX(&supported_configs));
  m.impl("_set_tuned", TORCH_BOX(&set_tuned));
  m.impl("_tuned", TORCH_BOX(&tuned));
}

}  // namespace unweight
