// What all encoders of tiles share: edges and raw stages.
#include "encode.h"

#include <algorithm>

#include "../format/archive.h"

namespace unweight {

StageRows stage_rows(const uint16_t* rows, int64_t row_count, int64_t in_features, int64_t stage, Padding padding,
                     uint16_t padding_pair, uint16_t* edge) {
  const int64_t first = stage * kStageColumns;
  const int64_t columns = std::min<int64_t>(kStageColumns, in_features - first);
  if (row_count == kBlockRows && columns == kStageColumns) {
    const bool last = first + kStageColumns == in_features;
    return {rows + first, in_features, last ? kBlockRows * in_features - first : kStageColumns};
  }

  const bool pairs = padding == Padding::kPairs;
  const uint16_t pad[2] = {static_cast<uint16_t>(pairs ? (padding_pair & 255) << 7 : 0),
                           static_cast<uint16_t>(pairs ? (padding_pair >> 8) << 7 : 0)};
  for (int64_t r = 0; r < kBlockRows; r++) {
    uint16_t* out = edge + r * kStageColumns;
    const int64_t valid = r < row_count ? columns : 0;
    std::copy_n(rows + (valid ? r * in_features + first : 0), valid, out);
    int64_t c = valid;
    if (c % 2) {
      const uint16_t exponent = out[c - 1] & 0x7F80;
      out[c++] = pairs && exponent != 0x7F80 ? exponent : 0;
    }
    for (; c < kStageColumns; c++) out[c] = pad[c & 1];
  }
  return {edge, kStageColumns, 0};
}

size_t block_limit(const EncodePlan& plan, Layout layout, int64_t row_count) {
  const size_t stages = (plan.in_features + kStageColumns - 1) / kStageColumns;
  if (layout == Layout::kNibble) return stages * (kNibbleSections + 4 * kWarps * (1 + kMaxWarpPatches) + 16);
  if (layout != Layout::kArchive) return stages * kRawStageBytes;
  // Patches cost more than anything else.
  const size_t weights = row_count * plan.in_features, pairs = weights / 2 + 1, rounds = pairs / kRoundPairs + 1;
  return ArchiveChunk(weights, pairs, kArchiveStreams * (rounds + 2)).end;
}

PairWindow make_pair_window(const Code& code, const std::vector<uint32_t>& encode_table) {
  uint32_t mass[256] = {0};
  for (uint16_t pair : code.pairs) {
    const uint32_t weight = 1u << (kMaxCodeBits - (encode_table[pair] >> 16 & 15));
    mass[pair & 255] += weight;
    mass[pair >> 8] += weight;
  }
  constexpr int kExponents = 15;
  uint32_t best = 0;
  PairWindow window{};
  for (int first = 0; first <= 256 - kExponents; first++) {
    uint32_t sum = 0;
    for (int e = first; e < first + kExponents; e++) sum += mass[e];
    if (sum > best) {
      best = sum;
      window.first = static_cast<uint8_t>(first);
    }
  }
  const uint32_t first_code = encode_table[code.pairs[0]];
  for (int i = 0; i < 256; i++) {
    const int e0 = i % 16, e1 = i / 16;
    const bool inside = e0 < kExponents && e1 < kExponents;
    const uint32_t found = inside ? encode_table[(window.first + e0) | (window.first + e1) << 8] : kNoCode;
    const uint32_t entry = found & kNoCode ? first_code : found, length = entry >> 16 & 15;
    window.low[i] = static_cast<uint8_t>(entry);
    window.high[i] = static_cast<uint8_t>((entry >> 8 & 15) | (found & kNoCode ? 0 : length << 4));
    window.length[i] = static_cast<uint8_t>(length | (found & kNoCode ? kMissing : 0));
  }
  return window;
}

void encode_raw_stage(const StageRows& rows, uint8_t* out) {
  for (int w = 0; w < kWarps; w++) std::memcpy(out + 4 * w, &kRawWarpHeader, 4);
  out += kStageHeaderBytes;
  for (int w = 0; w < kWarps; w++)
    for (int k = 0; k < kKSteps; k++)
      for (int l = 0; l < kLanes; l++)
        for (int i = 0; i < kRegisters; i++, out += 4)
          std::memcpy(out, rows.data + fragment_row(w, l, i) * rows.stride + fragment_column(k, l, i), 4);
}

void encode_raw_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block) {
  const int64_t stages = (plan.in_features + kStageColumns - 1) / kStageColumns;
  uint16_t edge[kBlockRows * kStageColumns];
  for (int64_t s = 0; s < stages; s++) {
    const size_t begin = block.size;
    encode_raw_stage(stage_rows(rows, row_count, plan.in_features, s, Padding::kZero, 0, edge), block.end());
    block.size += kRawStageBytes;
    block.close_unit(begin);
  }
}

}  // namespace unweight
