#include "code.h"

#include <algorithm>
#include <cstring>

#include "../cuda/decode/huffman.cuh"
#include "checksum.h"
#include "error.h"

namespace unweight {
namespace {

struct Package {
  uint64_t weight;
  bool leaf;
};

// Package-merge (Larmore and Hirschberg 1990). Only how many leaves each level takes is needed: leaves are sorted, so
// a level always takes a prefix of them. `weights` ascending; returns lengths in the same order.
std::vector<int> limited_lengths(const std::vector<uint64_t>& weights, int limit) {
  const size_t n = weights.size();
  if (n == 1) return {1};
  std::vector<std::vector<Package>> levels(limit);
  std::vector<uint64_t> packages;
  for (auto& level : levels) {
    level.reserve(n + packages.size());
    size_t leaf = 0, package = 0;
    while (leaf < n || package < packages.size()) {
      const bool take_leaf = package == packages.size() || (leaf < n && weights[leaf] <= packages[package]);
      level.push_back({take_leaf ? weights[leaf++] : packages[package++], take_leaf});
    }
    packages.clear();
    for (size_t i = 0; i + 1 < level.size(); i += 2) packages.push_back(level[i].weight + level[i + 1].weight);
  }
  std::vector<int> lengths(n, 0);
  size_t take = 2 * n - 2;
  for (int level = limit - 1; level >= 0; level--) {
    size_t leaves = 0;
    for (size_t i = 0; i < take; i++) leaves += levels[level][i].leaf;
    for (size_t i = 0; i < leaves; i++) lengths[i]++;
    take = 2 * (take - leaves);
  }
  return lengths;
}

// Rarer pairs cost less as patches than the code space they would take; see bench/code_table.py.
int rarity_bits(int longest) { return longest == 8 ? 12 : 17; }

}  // namespace

Code build_code(const PairCounts& pairs, int longest) {
  struct Counted {
    uint64_t count;
    uint32_t pair;
  };
  std::vector<Counted> order;
  uint64_t total = 0;
  for (uint32_t second = 0; second < 256; second++)
    for (uint32_t first = 0; first < pairs.row[second].size(); first++) {
      const uint64_t count = pairs.row[second][first];
      if (!count) continue;
      order.push_back({count, first | second << 8});
      total += count;
    }
  const auto more_frequent = [](const Counted& a, const Counted& b) {
    return a.count != b.count ? a.count > b.count : a.pair < b.pair;
  };
  const auto frequent = [&](const Counted& c) { return c.count << rarity_bits(longest) >= total; };
  auto end = std::partition(order.begin(), order.end(), frequent);
  // Nothing is frequent when more than 2^rarity pairs are equally rare: then the most frequent one alone.
  if (end == order.begin()) std::iter_swap(end++, std::min_element(order.begin(), order.end(), more_frequent));
  order.erase(end, order.end());
  std::sort(order.begin(), order.end(), more_frequent);
  if (order.size() > size_t{1} << longest) order.resize(size_t{1} << longest);

  std::vector<uint64_t> weights;
  uint64_t coded = 0;
  for (auto c = order.rbegin(); c != order.rend(); ++c) {
    weights.push_back(c->count);
    coded += c->count;
  }
  weights.back() += total - coded;  // pairs without a code are written with the first code

  Code code;
  code.longest = longest;
  for (int length : limited_lengths(weights, longest)) code.count[length]++;
  for (const Counted& c : order) code.pairs.push_back(static_cast<uint16_t>(c.pair));
  return code;
}

void Code::write(uint8_t* out) const {
  std::memcpy(out, count, sizeof count);
  std::memcpy(out + sizeof count, pairs.data(), 2 * pairs.size());
}

uint64_t Code::id() const {
  std::vector<uint8_t> table((bytes() + 3) / 4 * 4, 0);
  write(table.data());
  return checksum(table.data(), table.size());
}

Code read_code(const uint8_t* bytes, size_t available, int longest) {
  Code code;
  code.longest = longest;
  if (available < kCodeCountBytes) fail("packed: the code table is cut off at ", available, " bytes");
  std::memcpy(code.count, bytes, sizeof code.count);
  uint32_t space = 0, n = 0;
  for (int length = 0; length < 16; length++) {
    if (code.count[length] && (length == 0 || length > longest))
      fail("packed: the code table has codes of ", length, " bits; 1 to ", longest, " are allowed");
    n += code.count[length];
    if (length && length <= longest) space += uint32_t{code.count[length]} << (longest - length);
  }
  if (n == 0) fail("packed: the code table is empty");
  if (space > 1u << longest)
    fail("packed: the code table's lengths overlap (Kraft sum ", space, " of ", 1u << longest, ")");
  if (available < kCodeCountBytes + 2 * size_t{n})
    fail("packed: the code table of ", n, " codes is cut off at ", available, " bytes");
  code.pairs.resize(n);
  std::memcpy(code.pairs.data(), bytes + kCodeCountBytes, 2 * size_t{n});
  return code;
}

std::vector<uint32_t> Code::decode_table() const {
  std::vector<uint32_t> table(size_t{1} << longest, make_code_entry(0, 1));
  size_t i = 0, next = 0;
  for (int length = 1; length <= longest; length++)
    for (int c = 0; c < count[length]; c++, i++)
      for (int j = 0; j < 1 << (longest - length); j++) table[next++] = make_code_entry(pairs[i], length);
  return table;
}

std::vector<uint32_t> Code::encode_table() const {
  std::vector<uint32_t> table(kPairs);
  size_t i = 0, next = 0;
  for (int length = 1; length <= longest; length++)
    for (int c = 0; c < count[length]; c++, i++, next += size_t{1} << (longest - length)) {
      const uint32_t entry = static_cast<uint32_t>(next >> (longest - length)) | uint32_t(length) << 16;
      if (i == 0) std::fill(table.begin(), table.end(), entry | kNoCode);
      table[pairs[i]] = entry;
    }
  return table;
}

}  // namespace unweight
