// docs/FORMAT.md section 8.
#include <algorithm>
#include <memory>

#include "../format/archive.h"
#include "encode.h"
#include "word_streams.h"

namespace unweight {
namespace {

// The chunk's last pair, when the number of weights is odd.
uint32_t half_pair(uint16_t last) { return last | (last & 0x7F80u) << 16; }

// One chunk on its way: the streams, and what has no code.
struct Chunk {
  const EncodePlan& plan;
  const uint16_t* weights;
  int64_t count;
  WordStreams streams;
  std::vector<std::pair<uint32_t, uint16_t>> patches;  // position and pair
  // Of rounds on their way to the streams.
  static constexpr int kBatch = 8;
  uint32_t code[kBatch][kArchiveStreams], bits[kBatch][kArchiveStreams];

  // Both codes of one stream in a round.
  void look_up_stream(int64_t round, int s) {
    uint32_t &joined = code[round % kBatch][s], &length = bits[round % kBatch][s];
    joined = length = 0;
    for (int64_t q : {round * kRoundPairs + s, round * kRoundPairs + kArchiveStreams + s}) {
      uint32_t entry = plan.encode_table[plan.packing.code.pairs[0]];
      if (2 * q < count) {
        const uint32_t pair = exponent_pair(2 * q + 1 < count ? load_pair(weights + 2 * q) : half_pair(weights[2 * q]));
        entry = plan.encode_table[pair];
        if (entry & kNoCode) patches.emplace_back(static_cast<uint32_t>(q), static_cast<uint16_t>(pair));
      }
      joined = joined << (entry >> 16 & 15) | (entry & 0xFFFF);
      length += entry >> 16 & 15;
    }
  }

  void look_up_round(int64_t round, uint8_t* plane) {
    const int64_t first = round * 2 * kRoundPairs, end = first + 2 * kRoundPairs;
    if (plan.avx512 && end <= count) {
      uint64_t missing =
          look_up_round_avx512(plan.window, weights + first, plane + first, code[round % kBatch], bits[round % kBatch]);
      for (; missing; missing &= missing - 1) look_up_stream(round, __builtin_ctzll(missing));
      return;
    }
    for (int64_t i = first; i < std::min(end, count); i++)
      plane[i] = static_cast<uint8_t>((weights[i] >> 8 & 0x80) | (weights[i] & 0x7F));
    for (int s = 0; s < kArchiveStreams; s++) look_up_stream(round, s);
  }

  void append(int rounds) {
    if (plan.avx512) return append_avx512(streams, code, bits, rounds);
    for (int r = 0; r < rounds; r++)
      for (int s = 0; s < kArchiveStreams; s++) streams.append(s, code[r][s], bits[r][s]);
  }

  void encode(int64_t rounds, uint8_t* plane) {
    for (int64_t round = 0; round < rounds; round++) {
      look_up_round(round, plane);
      if (round % kBatch == kBatch - 1) append(kBatch);
    }
    append(static_cast<int>(rounds % kBatch));
  }
};
static_assert(kArchiveStreams == kMostStreams, "a chunk fills its WordStreams");

}  // namespace

void encode_archive_chunk(const EncodePlan& plan, const uint16_t* weights, int64_t count, EncodedBlock& block) {
  const int64_t pairs = (count + 1) / 2, rounds = (pairs + kRoundPairs - 1) / kRoundPairs;
  // A word a stream and round at most, and the two that each starts with.
  std::unique_ptr<uint32_t[]> words(new uint32_t[kArchiveStreams * (rounds + 2) + 1]);
  uint8_t* out = block.bytes;

  Chunk chunk{plan, weights, count, {}, {}, {}, {}};
  chunk.streams.start(words.get(), kArchiveStreams);
  chunk.encode(rounds, out + kChunkHeaderBytes);
  const uint32_t kept = chunk.streams.finish();
  // A round's patches come stream by stream; the format wants them by position.
  auto& patches = chunk.patches;
  std::sort(patches.begin(), patches.end());

  const ArchiveChunk layout(count, patches.size(), kept);
  const uint32_t header[4] = {static_cast<uint32_t>(patches.size()), kept, 0, 0};
  std::memcpy(out, header, sizeof header);
  std::fill(out + layout.plane + count, out + layout.positions, 0);
  for (size_t i = 0; i < patches.size(); i++) {
    std::memcpy(out + layout.positions + 4 * i, &patches[i].first, 4);
    std::memcpy(out + layout.pairs + 2 * i, &patches[i].second, 2);
  }
  std::fill(out + layout.pairs + 2 * patches.size(), out + layout.words, 0);
  std::memcpy(out + layout.words, words.get(), 4 * size_t{kept});
  std::fill(out + layout.words + 4 * size_t{kept}, out + layout.end, 0);
  block.size = layout.end;
  block.close_unit(0);
  block.patches = patches.size();
}

}  // namespace unweight
