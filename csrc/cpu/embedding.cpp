#include "embedding.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cuda/decode/nibble.cuh"
#include "../format/error.h"
#include "huffman_stages.h"
#include "plain_stages.h"
#include "scratch.h"
#include "unpack_avx512.h"

namespace unweight {
namespace {

uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Where a row is in the stages of its block: four lanes, and two of their four registers.
struct RowPlace {
  uint64_t first_stage;
  int warp, row, first_lane, first_register;

  RowPlace(const MatrixView& matrix, int64_t id)
      : first_stage(id / kBlockRows * matrix.stages_per_block),
        warp(static_cast<int>(id % kBlockRows / kWarpRows)),
        row(static_cast<int>(id % kWarpRows)),
        first_lane(row % 8 * 4),
        first_register(row / 8) {}
};

// A row of a stage, kStageColumns / 2 registers in the order of its columns.
using StageRow = uint32_t[kStageColumns / 2];

int pair_of(int kstep, int lane, int reg) { return fragment_column(kstep, lane, reg) / 2; }

void read_raw_row(const StageView& stage, const RowPlace& place, StageRow& row) {
  const uint8_t* warp = stage.bytes + kStageHeaderBytes + place.warp * kWarpRawBytes;
  for (int k = 0; k < kKSteps; k++)
    for (int l = place.first_lane; l < place.first_lane + 4; l++)
      for (int i = place.first_register; i < kRegisters; i += 2)
        row[pair_of(k, l, i)] = load_word(warp + (k * kLanes + l) * 16 + 4 * i);
}

// False if the patches and the header don't go together.
bool read_nibble_row(const MatrixView& matrix, const StageView& stage, const RowPlace& place, const NibbleWarp& warp,
                     StageRow& row) {
  if (warp.zero_rows >> place.row & 1) {
    std::memset(row, 0, sizeof row);
    return true;
  }
  const uint8_t* plane = stage.bytes + kStageHeaderBytes + place.warp * kWarpPlaneBytes;
  const uint8_t* codes = stage.bytes + kHuffmanSections + place.warp * kWarpNibbleBytes;
  const uint32_t scale = nibble_scale(matrix);
  for (int k = 0; k < kKSteps; k++)
    for (int l = place.first_lane; l < place.first_lane + 4; l++) {
      const uint8_t* signs = plane + (k / 2 * kLanes + l) * 16 + k % 2 * 8;
      uint32_t registers[kRegisters];
      decode_nibbles(load_word(codes + (k / 2 * kLanes + l) * 8 + k % 2 * 4), load_word(signs), load_word(signs + 4),
                     registers);
      for (int i = place.first_register; i < kRegisters; i += 2) {
        const uint32_t first = ((registers[i] >> 7) - scale) & 255, second = ((registers[i] >> 23) - scale) & 255;
        row[pair_of(k, l, i)] = (registers[i] & ~kExponentBits) | first << 7 | second << 23;
      }
    }
  uint32_t ksteps = warp.header.patched_ksteps();
  for (uint32_t n = 0; n < warp.header.patches(); n++) {
    if (ksteps == 0) return false;
    const uint32_t patch = load_word(warp.patches + 4 * n);
    const int lane = patch_place(patch) / kRegisters, reg = patch_place(patch) % kRegisters;
    if (lane / 4 == place.first_lane / 4 && reg % 2 == place.first_register) {
      uint32_t& weights = row[pair_of(__builtin_ctz(ksteps), lane, reg)];
      weights = (weights & ~kExponentBits) | unscaled_exponent(patch >> 7 & 255, scale) << 7 |
                unscaled_exponent(patch >> 23 & 255, scale) << 23;
    }
    if (!(patch & kPatchContinues)) ksteps &= ksteps - 1;
  }
  return ksteps == 0;
}

// One row of a raw or nibble matrix: nothing else is decoded.
void read_row(const MatrixView& matrix, int64_t id, uint16_t* out) {
  const RowPlace place(matrix, id);
  for (uint64_t s = 0; s < matrix.stages_per_block; s++) {
    const auto check = [&](bool good, Flaw flaw) {
      if (!good) check_damage(matrix, {flaw, static_cast<uint8_t>(place.warp), place.first_stage + s});
    };
    const StageView stage = stage_view(matrix, place.first_stage + s);
    StageRow row;
    if (WarpHeader{load_word(stage.bytes)}.is_raw()) {
      check(stage.size >= kRawStageBytes, Flaw::kRawStage);
      read_raw_row(stage, place, row);
    } else {
      check(matrix.layout == Layout::kNibble, Flaw::kRawStage);
      const NibbleWarp warp = nibble_warp(matrix, stage, place.first_stage + s, place.warp);
      check(read_nibble_row(matrix, stage, place, warp, row), Flaw::kPatches);
    }
    const uint64_t first = s * kStageColumns;
    std::memcpy(out + first, row, 2 * std::min<uint64_t>(kStageColumns, matrix.in_features - first));
  }
}

// Of the rows of a warp of a huffman matrix, which start at `out`, those whose bits are set in `wanted`.
void read_huffman_rows(const MatrixView& matrix, int64_t first_row, uint32_t wanted, uint16_t* out) {
  const int64_t columns = matrix.in_features;
  const int warp = static_cast<int>(first_row % kBlockRows / kWarpRows);
  HuffmanStages stages(matrix, first_row / kBlockRows);
  uint16_t rows[kWarpRows * kStageColumns] = {0};
  for (int64_t first = 0; first < columns; first += kStageColumns) {
    stages.next(warp, warp + 1, wanted, rows);
    for (uint32_t left = wanted; left; left &= left - 1) {
      const int r = __builtin_ctz(left);
      std::copy_n(rows + r * kStageColumns, std::min<int64_t>(kStageColumns, columns - first),
                  out + r * columns + first);
    }
  }
}

// Ids that are decoded together: order[begin, end).
struct Group {
  int64_t begin, end;
};

}  // namespace

void embedding(const Packed& w, size_t size, const int64_t* ids, int64_t count, uint16_t* out,
               const Parallel& parallel) {
  const Header& h = w.header;
  const int64_t rows = h.out_features, columns = h.in_features;
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= rows)
      fail("ids: element ", i, " is ", ids[i], ", expected 0 to ", rows - 1, ", the rows of packed_w");
  if (count == 0) return;

  if (h.layout == Layout::kRaw || h.layout == Layout::kNibble) {
    const MatrixView matrix = matrix_view(w, size);
    constexpr int64_t kRun = 16;
    parallel((count + kRun - 1) / kRun, [&](int64_t task) {
      for (int64_t i = task * kRun; i < std::min(count, (task + 1) * kRun); i++)
        read_row(matrix, ids[i], out + i * columns);
    });
    return;
  }

  // Each warp or chunk is decoded once, whatever the order of the ids.
  const bool archive = h.layout == Layout::kArchive, avx512 = capability() == Capability::kAvx512;
  const int64_t group_rows = archive ? h.chunk_rows() : kWarpRows;
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  std::vector<Group> groups;
  for (int64_t i = 0; i < count; i++) {
    if (i == 0 || ids[order[i]] / group_rows != ids[order[i - 1]] / group_rows) groups.push_back({i, i});
    groups.back().end = i + 1;
  }
  MatrixView matrix{};
  if (!archive) matrix = matrix_view(w, size);
  parallel(static_cast<int64_t>(groups.size()), [&](int64_t g) {
    const int64_t group = ids[order[groups[g].begin]] / group_rows, first = group * group_rows;
    Scratch& scratch = thread_scratch();
    auto* decoded = reinterpret_cast<uint16_t*>(scratch.reserve(2 * std::min(group_rows, rows - first) * columns));
    uint32_t wanted = 0;
    for (int64_t i = groups[g].begin; i < groups[g].end && !archive; i++) wanted |= 1u << (ids[order[i]] - first);
    if (archive)
      unpack_block(w, size, group, decoded);
    else if (avx512)
      check_damage(matrix, unpack_warp_avx512(matrix, group / kWarps, static_cast<int>(group % kWarps), decoded));
    else
      read_huffman_rows(matrix, first, wanted, decoded);
    for (int64_t i = groups[g].begin; i < groups[g].end; i++)
      std::copy_n(decoded + (ids[order[i]] - first) * columns, columns, out + order[i] * columns);
    scratch.trim();
  });
}

}  // namespace unweight
