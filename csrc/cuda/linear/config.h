// The instances of the fused product, and how each uses its threads and shared memory. Host and device.
//
// A CTA is `warpgroups` consumer warpgroups, each with its own block of 64 rows, and one warpgroup more that copies:
// its first warp the weights (one bulk copy a block and stage), the other three the activations.
#pragma once
#include <cstdint>

#include "../../format/tile.h"

namespace unweight::cuda {

// Which instance: `tokens` is N of its wgmma, the rows of x that it multiplies with at once.
struct LinearConfig {
  int tokens;
  int warpgroups;
};

// Up to 64 tokens all have the same number of warpgroups: the order of a sum depends on it, and has to be the same for
// every number of tokens.
constexpr LinearConfig kLinearConfigs[] = {{8, 3}, {16, 3}, {32, 3}, {64, 3}, {128, 2}, {256, 2}};
constexpr int kLinearConfigCount = sizeof kLinearConfigs / sizeof kLinearConfigs[0];
constexpr int linear_warpgroups(int tokens) {
  for (const LinearConfig& config : kLinearConfigs)
    if (config.tokens == tokens) return config.warpgroups;
  return 0;
}

// The first of them that takes so many tokens at once, else the last.
constexpr int smallest_config(uint64_t tokens) {
  int i = 0;
  while (i + 1 < kLinearConfigCount && static_cast<uint64_t>(kLinearConfigs[i].tokens) < tokens) i++;
  return i;
}

constexpr int kInvariantTokens = 64;  // up to here a row's result doesn't depend on the number of rows

constexpr int kLoaderWarps = 3;  // copy activations
constexpr uint32_t kWarpgroupThreads = kLanes * kWarps;
constexpr uint32_t kSharedLimit = 227 * 1024;  // of a CTA on Hopper

constexpr uint32_t kShareWords = 13, kPlaceWords = 9;

// Bytes of dynamic shared memory of an instance, in this order. A slot of the ring has its x and its stages.
struct LinearShared {
  uint32_t slots, x_bytes, stage_bytes;  // of a slot: x, and the stage of one block
  uint32_t x;                            // [slots]: two panels of 64 columns, rows of 128 bytes, swizzled. 1024-aligned
  uint32_t table;                        // huffman's, 128-aligned
  uint32_t stages;                       // [slots][warpgroups], 16-aligned
  uint32_t barriers;                     // full[slots], empty[slots]
  uint32_t lengths;                      // u32 [slots][warpgroups]: bytes of each stage
  uint32_t code;                         // u32 [3]: which code the table has
  uint32_t shares;                       // u32 [warps][13]: the part of the work that each is at
  uint32_t places;                       // u32 [warps that multiply][9]: where their sums go
  uint32_t total;
};

constexpr LinearShared linear_shared(int tokens, int warpgroups, bool raw_stages, bool table) {
  LinearShared s{};
  const uint32_t stages = static_cast<uint32_t>(warpgroups), table_bytes = table ? 256 * 4 * kLanes : 0;
  s.x_bytes = static_cast<uint32_t>(tokens) * 2 * kStageColumns;
  s.stage_bytes = raw_stages ? kRawStageBytes : kNibbleSections + 4 * kWarps * (kMaxWarpPatches + 1);
  s.stage_bytes = (s.stage_bytes + 15) / 16 * 16;
  const uint32_t slot_bytes = s.x_bytes + stages * s.stage_bytes + 16 + 4 * stages;
  const uint32_t share_bytes = 12 + 4 * kShareWords * kWarps * (stages + 1);
  const uint32_t others = table_bytes + share_bytes + 4 * kPlaceWords * kWarps * stages;
  s.slots = (kSharedLimit - others) / slot_bytes;
  if (s.slots > 8) s.slots = 8;
  s.table = s.slots * s.x_bytes;
  s.stages = s.table + table_bytes;
  s.barriers = s.stages + s.slots * stages * s.stage_bytes;
  s.lengths = s.barriers + 16 * s.slots;
  s.code = s.lengths + 4 * s.slots * stages;
  s.shares = s.code + 12;
  s.places = s.code + share_bytes;
  s.total = s.places + 4 * kPlaceWords * kWarps * stages;
  return s;
}

static_assert(linear_shared(256, 2, true, true).slots >= 2, "one stage is copied while another is multiplied");
static_assert(linear_shared(64, 3, true, true).slots >= 3, "two stages are in flight while one is multiplied");

}  // namespace unweight::cuda
