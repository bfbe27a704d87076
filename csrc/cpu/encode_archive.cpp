// docs/FORMAT.md section 8.
#include <algorithm>

#include "../format/archive.h"
#include "../format/checksum.h"
#include "encode.h"
#include "word_streams.h"

namespace unweight {
namespace {

// The chunk's last pair, when the number of weights is odd.
uint32_t half_pair(uint16_t last) { return last | (last & 0x7F80u) << 16; }

void write_signs_mantissas(const uint16_t* weights, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = static_cast<uint8_t>((weights[i] >> 8 & 0x80) | (weights[i] & 0x7F));
}

}  // namespace

EncodedBlock encode_archive_chunk(const EncodePlan& plan, const uint16_t* weights, int64_t count) {
  const int64_t pairs = (count + 1) / 2, rounds = (pairs + kRoundPairs - 1) / kRoundPairs;
  const uint32_t* table = plan.encode_table.data();
  const uint32_t padding = table[plan.code.pairs[0]];

  std::vector<uint32_t> positions;
  std::vector<uint16_t> patched;
  // A word more a stream and round at most, the two that each starts with, and the place that is cleared ahead.
  std::unique_ptr<uint32_t[]> words(new uint32_t[kArchiveStreams * (rounds + 2) + 1]);
  WordWriter<kArchiveStreams> writer;
  writer.start(words.get(), kArchiveStreams);
  for (int64_t round = 0; round < rounds; round++) {
    const int64_t first = round * kRoundPairs;
    for (int s = 0; s < kArchiveStreams; s++) {
      uint32_t code = 0, bits = 0;
      for (int64_t q : {first + s, first + kArchiveStreams + s}) {
        uint32_t entry = padding;
        if (q < pairs) {
          const uint32_t pair = exponent_pair(2 * q + 1 < count ? load_pair(weights + 2 * q) : half_pair(weights[2 * q]));
          entry = table[pair];
          if (entry & kNoCode) {
            positions.push_back(static_cast<uint32_t>(q));
            patched.push_back(static_cast<uint16_t>(pair));
          }
        }
        const uint32_t length = entry >> 16 & 15;
        code = code << length | (entry & 0xFFFF);
        bits += length;
      }
      writer.append(writer.streams[s], code, bits);
    }
  }
  const uint32_t kept = writer.finish();

  // Streams interleave two rounds of patches; the format wants them by position.
  std::vector<uint32_t> order(positions.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return positions[a] < positions[b]; });

  const ArchiveChunk layout(count, positions.size(), kept);
  EncodedBlock block;
  block.reserve(layout.end);
  uint8_t* out = block.bytes.get();
  const uint32_t header[4] = {static_cast<uint32_t>(positions.size()), kept, 0, 0};
  std::memcpy(out, header, sizeof header);
  write_signs_mantissas(weights, count, out + layout.plane);
  std::fill(out + layout.plane + count, out + layout.positions, 0);
  for (size_t i = 0; i < order.size(); i++) {
    std::memcpy(out + layout.positions + 4 * i, &positions[order[i]], 4);
    std::memcpy(out + layout.pairs + 2 * i, &patched[order[i]], 2);
  }
  std::fill(out + layout.pairs + 2 * order.size(), out + layout.words, 0);
  std::memcpy(out + layout.words, words.get(), 4 * size_t{kept});
  std::fill(out + layout.words + 4 * size_t{kept}, out + layout.end, 0);
  block.size = layout.end;
  block.close_unit(0);
  block.patches = positions.size();
  block.checksum = checksum(out, block.size);
  return block;
}

}  // namespace unweight
