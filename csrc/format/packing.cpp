#include "packing.h"

#include <algorithm>
#include <cstring>

#include "checksum.h"
#include "error.h"

namespace unweight {
namespace {

constexpr uint64_t kStackAlignment = 128;

uint64_t largest(const std::vector<Header>& headers) {
  uint64_t most = 0;
  for (const Header& h : headers) most = std::max(most, h.used_bytes);
  return most;
}

}  // namespace

int best_nibble_base(const PairCounts& pairs) {
  uint64_t exponents[256] = {0};
  for (int second = 0; second < 256; second++)
    for (size_t first = 0; first < pairs.row[second].size(); first++) {
      exponents[first] += pairs.row[second][first];
      exponents[second] += pairs.row[second][first];
    }
  uint64_t window = 0, best = 0;
  for (int e = 1; e <= 16; e++) window += exponents[e];
  int base = 1;
  best = window;
  for (int b = 2; b <= 239; b++) {
    window += exponents[b + 15] - exponents[b - 1];
    if (window > best) {
      best = window;
      base = b;
    }
  }
  return base;
}

uint16_t padding_pair(const Code& code) {
  const uint16_t pair = code.pairs[0];
  return (pair & 255) == 255 || pair >> 8 == 255 ? 0 : pair;
}

void check_packable(int64_t matrices, int64_t out_features, int64_t in_features) {
  if (matrices < 1 || out_features < 1 || in_features < 1)
    fail("weight: ", matrices, " x ", out_features, " x ", in_features, " is empty");
  Header raw{};
  raw.layout = Layout::kRaw;
  raw.out_features = out_features;
  raw.in_features = in_features;
  if (const char* reason = too_large(raw)) fail("weight: ", out_features, " x ", in_features, " weights; ", reason);
}

bool few_enough_patches(uint64_t patches, uint64_t out_features, uint64_t in_features) {
  return patches * 128 <= out_features * in_features;
}

Header make_header(const Packing& packing, uint64_t out_features, uint64_t in_features,
                   const std::vector<int64_t>& shape, const PackedParts& parts) {
  Header h{};
  h.layout = packing.layout;
  h.out_features = out_features;
  h.in_features = in_features;
  h.longest_code = static_cast<uint8_t>(packing.code.longest);
  h.nibble_base = packing.layout == Layout::kNibble ? static_cast<uint8_t>(packing.nibble_base) : 0;
  h.rank = static_cast<uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), h.shape);
  h.code_id = packing.code.longest ? packing.code.id() : 0;
  h.patches = parts.patches;
  place_sections(h, packing.code.longest ? packing.code.bytes() : 0);
  h.used_bytes = h.data_offset;
  for (uint32_t steps : parts.unit_steps) h.used_bytes += 16 * uint64_t{steps};
  return h;
}

bool raw_is_no_larger(const std::vector<Header>& headers) {
  const Header& h = headers[0];
  return largest(headers) >= least_bytes(Layout::kRaw, h.out_features, h.in_features);
}

int64_t common_row_bytes(const std::vector<Header>& headers, bool stacked) {
  const uint64_t rows = headers[0].out_features;
  uint64_t row_bytes = (largest(headers) + rows - 1) / rows;
  if (stacked)
    while (row_bytes * rows % kStackAlignment) row_bytes++;
  return static_cast<int64_t>(row_bytes);
}

void write_head(const Header& h, const Packing& packing, const PackedParts& parts,
                const std::vector<uint64_t>& checksums, uint8_t* out) {
  std::memset(out, 0, h.data_offset);
  std::memcpy(out, &h, sizeof h);
  if (h.longest_code) packing.code.write(out + kHeaderBytes);
  uint32_t steps = 0;
  for (size_t unit = 0; unit < parts.unit_steps.size(); unit++) {
    steps += parts.unit_steps[unit];
    std::memcpy(out + h.index_offset + 4 * (unit + 1), &steps, sizeof steps);
  }
  std::memcpy(out + h.checksums_offset, checksums.data(), 8 * checksums.size());
  const uint64_t sum = checksum(out, h.data_offset);
  std::memcpy(out + offsetof(Header, header_checksum), &sum, sizeof sum);
}

}  // namespace unweight
