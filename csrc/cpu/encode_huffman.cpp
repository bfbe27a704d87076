// docs/FORMAT.md section 7.
#include <algorithm>
#include <memory>

#include "../cuda/decode/bits.cuh"
#include "encode.h"
#include "word_streams.h"

namespace unweight {
namespace {

constexpr int kMaxSegmentStages = 32;

struct WarpPatches {
  uint32_t ksteps = 0, count = 0;
  uint32_t entries[kMaxWarpPatches];
};

// One stage between lookup and bit packing. Splitting the two lets a stage turn out raw before it is in any stream.
struct StageCodes {
  // Of the four codes of each lane, one behind the other: by stream, those of even k-steps first.
  uint32_t code[kWarps][kKSteps / 2][2 * kLanes];
  uint32_t bits[kWarps][kKSteps / 2][2 * kLanes];
  MissingCodes missing;
};

// False if a warp needs more patches than a stage takes.
bool add_patch(WarpPatches& patches, int kstep, uint32_t place, uint32_t weights) {
  if (patches.count == kMaxWarpPatches) return false;
  if (patches.ksteps >> kstep & 1) patches.entries[patches.count - 1] |= kPatchContinues;
  patches.ksteps |= 1u << kstep;
  patches.entries[patches.count++] = (weights & kExponentBits) | place;
  return true;
}

// A lane of a stage.
struct Lane {
  const StageRows& rows;
  int warp, kstep, lane;

  uint32_t load(int i) const {
    return load_pair(rows.data + fragment_row(warp, lane, i) * rows.stride + fragment_column(kstep, lane, i));
  }
};

// Returns the registers without a code of their own, a bit each.
uint32_t join_codes(const EncodePlan& plan, const Lane& at, const uint32_t (&registers)[kRegisters],
                    StageCodes& stage) {
  uint32_t code = 0, bits = 0, missing = 0;
  for (int i = 0; i < kRegisters; i++) {
    const uint32_t entry = plan.encode_table[exponent_pair(registers[i])], length = entry >> 16 & 15;
    code = code << length | (entry & 0xFFFF);
    bits += length;
    missing |= uint32_t{(entry & kNoCode) != 0} << i;
  }
  const int stream = at.kstep % 2 * kLanes + at.lane;
  stage.code[at.warp][at.kstep / 2][stream] = code;
  stage.bits[at.warp][at.kstep / 2][stream] = bits;
  return missing;
}

void load_registers(const Lane& at, uint32_t (&registers)[kRegisters]) {
  for (int i = 0; i < kRegisters; i++) registers[i] = at.load(i);
}

bool look_up_warp(const EncodePlan& plan, const StageRows& rows, int w, uint32_t* plane, StageCodes& stage,
                  WarpPatches& patches) {
  for (int k = 0; k < kKSteps; k++)
    for (int l = 0; l < kLanes; l++) {
      const Lane lane{rows, w, k, l};
      uint32_t registers[kRegisters];
      load_registers(lane, registers);
      for (uint32_t missing = join_codes(plan, lane, registers, stage); missing; missing &= missing - 1) {
        const int i = __builtin_ctz(missing);
        if (!add_patch(patches, k, 4 * l + i, registers[i])) return false;
      }
      uint32_t* words = plane + (k / 2 * kLanes + l) * 4 + k % 2 * 2;
      words[0] = merge_signs_mantissas(registers[0], registers[1]);
      words[1] = merge_signs_mantissas(registers[2], registers[3]);
    }
  return true;
}

// The same from the window of frequent pairs: what is missing in it has a patch, or a code after all.
bool look_up_warp_fast(const EncodePlan& plan, const StageRows& rows, int w, uint32_t* plane, StageCodes& stage,
                       WarpPatches& patches) {
  MissingCodes& missing = stage.missing;
  look_up_warp_avx512(plan.window, rows, w, plane, stage.code[w], stage.bits[w], missing);
  for (uint32_t m = 0; m < missing.count; m++) {
    const uint32_t place = missing.place[m];
    const Lane lane{rows, w, missing.kstep[m], static_cast<int>(place / kRegisters)};
    const uint32_t weights = lane.load(place % kRegisters);
    if (plan.encode_table[exponent_pair(weights)] & kNoCode) {
      if (!add_patch(patches, lane.kstep, place, weights)) return false;
    } else {
      uint32_t registers[kRegisters];
      load_registers(lane, registers);
      join_codes(plan, lane, registers, stage);
    }
  }
  return true;
}

// False if the stage has to be raw. Writes its S-plane.
bool look_up(const EncodePlan& plan, const StageRows& rows, uint8_t* planes, StageCodes& stage,
             WarpPatches (&patches)[kWarps]) {
  for (int w = 0; w < kWarps; w++) {
    patches[w].ksteps = patches[w].count = 0;
    // Stages are 16-byte aligned in the tensor and here.
    auto* plane = reinterpret_cast<uint32_t*>(planes + w * kWarpPlaneBytes);
    if (!(plan.avx512 ? look_up_warp_fast : look_up_warp)(plan, rows, w, plane, stage, patches[w])) return false;
  }
  return true;
}

// One segment of a block: its streams, and what is needed to lay out its stages once the streams are complete.
struct Segment {
  WordStreams streams[kWarps];
  std::unique_ptr<uint32_t[]> words[kWarps];
  WarpPatches patches[kMaxSegmentStages][kWarps];
  uint32_t words_before[kMaxSegmentStages + 1][kWarps];
  bool raw[kMaxSegmentStages];
  size_t begin[kMaxSegmentStages];  // where the S-plane is while words at the streams' ends may still be left out

  Segment() {
    // A word a lane and k-step at most, and the four that each lane starts with.
    for (auto& w : words) w.reset(new uint32_t[kLanes * (kMaxSegmentStages * kKSteps + 4) + 1]);
  }
};

void append_stage(const EncodePlan& plan, Segment& segment, const StageCodes& stage) {
  for (int w = 0; w < kWarps; w++)
    if (plan.avx512)
      append_avx512(segment.streams[w], stage.code[w], stage.bits[w], kKSteps / 2);
    else
      for (int k = 0; k < kKSteps / 2; k++)
        for (int s = 0; s < 2 * kLanes; s++) segment.streams[w].append(s, stage.code[w][k][s], stage.bits[w][k][s]);
}

size_t stage_bytes(const Segment& segment, int s) {
  if (segment.raw[s]) return kRawStageBytes;
  size_t bytes = kHuffmanSections;
  for (int w = 0; w < kWarps; w++)
    bytes += 4 * (segment.patches[s][w].count + segment.words_before[s + 1][w] - segment.words_before[s][w]);
  return (bytes + 15) / 16 * 16;
}

void write_stage(const Segment& segment, int s, const uint32_t (&kept)[kWarps], EncodedBlock& block) {
  uint8_t* const begin = block.end();
  // In place, unless words were left out in an earlier stage.
  if (segment.begin[s] != block.size)
    std::memmove(begin + kStageHeaderBytes, block.bytes + segment.begin[s] + kStageHeaderBytes, kPlaneBytes);
  uint32_t at = kHuffmanSections;
  for (int w = 0; w < kWarps; w++) {
    const WarpPatches& patches = segment.patches[s][w];
    const uint32_t header = make_warp_header(at, false, patches.ksteps, patches.count);
    std::memcpy(begin + 4 * w, &header, 4);
    std::memcpy(begin + at, patches.entries, 4 * patches.count);
    at += 4 * patches.count;
    const uint32_t from = std::min(segment.words_before[s][w], kept[w]);
    const uint32_t to = std::min(segment.words_before[s + 1][w], kept[w]);
    std::memcpy(begin + at, segment.words[w].get() + from, 4 * (to - from));
    at += 4 * (to - from);
    block.patches += patches.count;
  }
  block.size += at;
}

}  // namespace

void encode_huffman_block(const EncodePlan& plan, const uint16_t* rows, int64_t row_count, EncodedBlock& block) {
  const int64_t stages = (plan.in_features + kStageColumns - 1) / kStageColumns;
  // Both are too large for a stack, and worth keeping for the thread's next block.
  thread_local std::unique_ptr<Segment> segment_memory{new Segment};
  thread_local std::unique_ptr<StageCodes> stage_memory{new StageCodes};
  Segment& segment = *segment_memory;
  StageCodes& stage = *stage_memory;
  uint16_t edge[kBlockRows * kStageColumns];

  for (int64_t first = 0; first < stages; first += plan.segment_stages) {
    const int n = static_cast<int>(std::min<int64_t>(plan.segment_stages, stages - first));
    bool started = false;
    size_t end = block.size;
    for (int w = 0; w < kWarps; w++) segment.words_before[0][w] = 0;
    for (int s = 0; s < n; s++) {
      const StageRows source =
          stage_rows(rows, row_count, plan.in_features, first + s, Padding::kPairs, plan.padding_pair, edge);
      segment.begin[s] = end;
      segment.raw[s] = !look_up(plan, source, block.bytes + end + kStageHeaderBytes, stage, segment.patches[s]);
      if (!segment.raw[s]) {
        if (!started)
          for (int w = 0; w < kWarps; w++) segment.streams[w].start(segment.words[w].get(), kLanes);
        started = true;
        append_stage(plan, segment, stage);
      }
      for (int w = 0; w < kWarps; w++) segment.words_before[s + 1][w] = started ? segment.streams[w].count : 0;
      end += stage_bytes(segment, s);
    }
    uint32_t kept[kWarps] = {0};
    for (int w = 0; w < kWarps && started; w++) kept[w] = segment.streams[w].finish();
    for (int s = 0; s < n; s++) {
      const size_t begin = block.size;
      if (segment.raw[s]) {
        encode_raw_stage(stage_rows(rows, row_count, plan.in_features, first + s, Padding::kZero, 0, edge),
                         block.end());
        block.size += kRawStageBytes;
      } else {
        write_stage(segment, s, kept, block);
      }
      block.close_unit(begin);
    }
  }
}

}  // namespace unweight
