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
  uint32_t* plane;                         // S-plane, in the segment
  uint32_t code[kWarps][kKSteps][kLanes];  // four codes, one behind the other
  uint32_t bits[kWarps][kKSteps][kLanes];
  WarpPatches patches[kWarps];
};

// False if a warp needs more patches than a stage takes.
bool add_patch(WarpPatches& patches, int kstep, uint32_t place, uint32_t weights) {
  if (patches.count == kMaxWarpPatches) return false;
  if (patches.ksteps >> kstep & 1) patches.entries[patches.count - 1] |= kPatchContinues;
  patches.ksteps |= 1u << kstep;
  patches.entries[patches.count++] = (weights & kExponentBits) | place;
  return true;
}

// The four codes of one lane. False if its patches don't fit.
bool look_up_lane(const EncodePlan& plan, const uint32_t (&registers)[kRegisters], StageCodes& stage, int w, int k,
                  int l) {
  uint32_t code = 0, bits = 0;
  bool fits = true;
  for (int i = 0; i < kRegisters; i++) {
    const uint32_t entry = plan.encode_table[exponent_pair(registers[i])], length = entry >> 16 & 15;
    code = code << length | (entry & 0xFFFF);
    bits += length;
    if (entry & kNoCode) fits &= add_patch(stage.patches[w], k, 4 * l + i, registers[i]);
  }
  stage.code[w][k][l] = code;
  stage.bits[w][k][l] = bits;
  return fits;
}

void load_lane(const StageRows& rows, int w, int k, int l, uint32_t (&registers)[kRegisters]) {
  for (int i = 0; i < kRegisters; i++)
    registers[i] = load_pair(rows.data + fragment_row(w, l, i) * rows.stride + fragment_column(k, l, i));
}

// False if the stage has to be raw.
bool look_up(const EncodePlan& plan, const StageRows& rows, StageCodes& stage) {
  for (int w = 0; w < kWarps; w++) {
    uint32_t* plane = stage.plane + w * (kWarpPlaneBytes / 4);
    stage.patches[w].ksteps = stage.patches[w].count = 0;
    uint32_t registers[kRegisters];
    if (plan.avx512) {
      uint32_t missing[kKSteps];
      look_up_warp_avx512(plan.window, rows.data + kWarpRows * w * rows.stride, rows.stride, plane, stage.code[w],
                          stage.bits[w], missing);
      for (int k = 0; k < kKSteps; k++)
        for (uint32_t lanes = missing[k]; lanes; lanes &= lanes - 1) {
          const int l = __builtin_ctz(lanes);
          load_lane(rows, w, k, l, registers);
          if (!look_up_lane(plan, registers, stage, w, k, l)) return false;
        }
      continue;
    }
    for (int k = 0; k < kKSteps; k++)
      for (int l = 0; l < kLanes; l++) {
        load_lane(rows, w, k, l, registers);
        if (!look_up_lane(plan, registers, stage, w, k, l)) return false;
        uint32_t* words = plane + (k / 2 * kLanes + l) * 4 + k % 2 * 2;
        words[0] = merge_signs_mantissas(registers[0], registers[1]);
        words[1] = merge_signs_mantissas(registers[2], registers[3]);
      }
  }
  return true;
}

// One segment of a block: its streams, and what is needed to lay out its stages once the streams are complete.
struct Segment {
  WordStreams streams[kWarps];  // those of even k-steps first
  std::unique_ptr<uint32_t[]> words[kWarps];
  std::unique_ptr<uint32_t[]> planes{new uint32_t[kMaxSegmentStages * kPlaneBytes / 4]};
  WarpPatches patches[kMaxSegmentStages][kWarps];
  uint32_t words_before[kMaxSegmentStages + 1][kWarps];
  bool raw[kMaxSegmentStages];

  Segment() {
    for (auto& w : words) w.reset(new uint32_t[kLanes * (4 + kMaxSegmentStages * kKSteps) + kLanes]);
  }
};

void append_stage(const EncodePlan& plan, Segment& segment, const StageCodes& stage) {
  for (int w = 0; w < kWarps; w++)
    for (int k = 0; k < kKSteps; k++) {
      const int first = k % 2 * kLanes;
      if (plan.avx512)
        append_avx512(segment.streams[w], first, kLanes / 16, stage.code[w][k], stage.bits[w][k]);
      else
        for (int l = 0; l < kLanes; l++) segment.streams[w].append(first + l, stage.code[w][k][l], stage.bits[w][k][l]);
    }
}

void write_stage(const Segment& segment, int s, const uint32_t (&kept)[kWarps], EncodedBlock& block) {
  uint8_t* const begin = block.end();
  std::memcpy(begin + kStageHeaderBytes, segment.planes.get() + s * (kPlaneBytes / 4), kPlaneBytes);
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
    for (int w = 0; w < kWarps; w++) segment.words_before[0][w] = 0;
    for (int s = 0; s < n; s++) {
      const StageRows source =
          stage_rows(rows, row_count, plan.in_features, first + s, Padding::kPairs, plan.padding_pair, edge);
      stage.plane = segment.planes.get() + s * (kPlaneBytes / 4);
      segment.raw[s] = !look_up(plan, source, stage);
      if (!segment.raw[s]) {
        if (!started)
          for (int w = 0; w < kWarps; w++) segment.streams[w].start(segment.words[w].get(), kLanes);
        started = true;
        append_stage(plan, segment, stage);
        for (int w = 0; w < kWarps; w++) segment.patches[s][w] = stage.patches[w];
      }
      for (int w = 0; w < kWarps; w++) segment.words_before[s + 1][w] = started ? segment.streams[w].count : 0;
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
