#include "linear.h"

#include <algorithm>
#include <atomic>
#include <random>

#include "../../format/error.h"
#include "../grid.h"
#include "arguments.h"
#include "schedule.h"

namespace unweight::cuda {
namespace {

// By layout (any, raw, huffman, nibble) and config.
constexpr const char* kKernels[4][kLinearConfigCount] = {
    {"unweight_linear_any_8", "unweight_linear_any_16", "unweight_linear_any_32", "unweight_linear_any_64",
     "unweight_linear_any_128", "unweight_linear_any_256"},
    {"unweight_linear_raw_8", "unweight_linear_raw_16", "unweight_linear_raw_32", "unweight_linear_raw_64",
     "unweight_linear_raw_128", "unweight_linear_raw_256"},
    {"unweight_linear_huffman_8", "unweight_linear_huffman_16", "unweight_linear_huffman_32",
     "unweight_linear_huffman_64", "unweight_linear_huffman_128", "unweight_linear_huffman_256"},
    {"unweight_linear_nibble_8", "unweight_linear_nibble_16", "unweight_linear_nibble_32", "unweight_linear_nibble_64",
     "unweight_linear_nibble_128", "unweight_linear_nibble_256"},
};

int config_index(const LinearConfig& config) {
  for (int i = 0; i < kLinearConfigCount; i++)
    if (kLinearConfigs[i].tokens == config.tokens && kLinearConfigs[i].warpgroups == config.warpgroups) return i;
  fail("config: ", config.tokens, " tokens with ", config.warpgroups,
       " warpgroups, allowed are 8, 16, 32 and 64 tokens with 3, 128 and 256 with 2");
}

// Of the kernel: what all weights have, or any.
int common_layout(const LinearCall& call) {
  const int layout = call.weights[0].packed.layout;
  const bool all = std::all_of(call.weights.begin(), call.weights.end(),
                               [&](const LinearWeight& w) { return w.packed.layout == layout; });
  return all ? layout : kAnyLayout;
}

void check(const LinearCall& call) {
  if (call.weights.empty() || call.weights.size() > kMostWeights)
    fail("weights: ", call.weights.size(), ", allowed are 1 to ", kMostWeights, " in one launch");
  const PackedMatrices& first = call.weights[0].packed;
  for (const LinearWeight& w : call.weights) {
    if (w.packed.in_features != first.in_features)
      fail("weights: in_features ", first.in_features, " and ", w.packed.in_features, ", expected equal ones");
    if (w.packed.matrices != first.matrices)
      fail("weights: stacks of ", first.matrices, " and ", w.packed.matrices, " matrices, expected equal ones");
    const uint64_t element = call.float_output ? 4 : 2;
    if (w.y % element)
      fail("y: lies ", w.y % element, " bytes behind a multiple of ", element, " in memory, expected 0");
    if (w.bias % 2) fail("bias: lies 1 byte behind a multiple of 2 in memory, expected 0");
  }
  if (!call.offsets && first.matrices != 1) fail("packed: ", first.matrices, " matrices without offsets, expected one");
  if (call.offsets % 4) fail("offsets: lies ", call.offsets % 4, " bytes behind a multiple of 4 in memory, expected 0");
  if (call.tokens > INT32_MAX) fail("x: ", call.tokens, " rows, allowed are 2^31 - 1 in one call");
  if (call.x % 16) fail("x: lies ", call.x % 16, " bytes behind a multiple of 16 in memory, expected 0");
  if (call.next % 16) fail("next: lies ", call.next % 16, " bytes behind a multiple of 16 in memory, expected 0");
  if (call.x_stride % 8) fail("x: rows ", call.x_stride, " elements apart, expected a multiple of 8");
}

PackedArgument tiled_argument(const PackedMatrices& packed) {
  const PackedArgument a = packed_argument(packed);
  if (a.layout == static_cast<int>(Layout::kArchive))
    fail("layout: archive, the fused product takes raw, huffman and nibble; unpack or transcode it first");
  return a;
}

// Another one for each launch, and nothing that memory is likely to hold: gather.cuh.
uint64_t next_nonce() {
  static std::atomic<uint64_t> count = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  for (;;) {  // splitmix64: no value comes twice
    uint64_t x = count.fetch_add(0x9E3779B97F4A7C15, std::memory_order_relaxed);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    x ^= x >> 31;
    if (x != 0) return x;
  }
}

}  // namespace

LinearCut cut_linear(const LinearCall& call, const LinearConfig& config, int multiprocessors) {
  uint64_t units = 0, cost = 0, least = kMostSegment;
  for (const LinearWeight& w : call.weights) {
    const uint64_t segment = segment_stages(w.packed.out_features, w.packed.in_features);
    const uint64_t blocks = ceil_div(w.packed.out_features, kBlockRows);
    const uint64_t stages = ceil_div(w.packed.in_features, kStageColumns);
    units += blocks * ceil_div(stages, segment);
    cost += blocks * stages;
    least = std::min(least, segment);
  }
  // Each expert with tokens has a tile that isn't full.
  const uint64_t tiles =
      call.offsets ? call.tokens / config.tokens + std::min<uint64_t>(call.tokens, call.weights[0].packed.matrices)
                   : ceil_div(call.tokens, config.tokens);
  const auto ctas = [&](uint64_t parts) {
    return static_cast<uint32_t>(std::min<uint64_t>(multiprocessors, std::max<uint64_t>(parts * tiles, 1)));
  };
  if (call.tokens > kInvariantTokens) return {ctas(units), ctas(units), false, static_cast<uint32_t>(multiprocessors)};
  const uint32_t chunks = tile_chunks(cost, static_cast<uint32_t>(least), static_cast<uint32_t>(multiprocessors));
  return {ctas(chunks), chunks, true, static_cast<uint32_t>(multiprocessors)};
}

uint64_t partial_bytes(const LinearCall& call, const LinearConfig& config, const LinearCut& cut) {
  const uint64_t rows = sheet_rows(cut.tile_sheets, call.tokens, static_cast<uint64_t>(config.tokens));
  return uint64_t{cut.chunks} * config.warpgroups * rows * kBlockRows * sizeof(float);
}

uint64_t flag_bytes(const LinearCall& call, const LinearConfig& config, const LinearCut& cut) {
  const uint64_t rows = sheet_rows(cut.tile_sheets, call.tokens, 1);
  return uint64_t{cut.chunks} * config.warpgroups * rows * kWarps * sizeof(uint64_t);
}

std::vector<LaunchPlan> plan_linear(const LinearCall& call, const LinearConfig& config, const LinearCut& cut,
                                    DeviceAddress partials, DeviceAddress flags) {
  check(call);
  const int index = config_index(config), layout = common_layout(call);
  LinearArgument a{};
  for (const LinearWeight& w : call.weights)
    a.weights[a.weight_count++] = {tiled_argument(w.packed), w.bias, w.y, w.y_stride};
  if (call.tokens == 0) return {};
  a.tokens = static_cast<uint32_t>(call.tokens);
  a.x = call.x;
  a.x_stride = call.x_stride;
  a.offsets = call.offsets;
  a.chunks = cut.chunks;
  a.tile_sheets = cut.tile_sheets;
  a.partials = partials;
  a.flags = flags;
  a.nonce = next_nonce();
  a.float_output = call.float_output;
  if (cut.tile_sheets) {  // with more tokens the memory isn't what a product waits for
    a.next = call.next;
    a.next_bytes = call.next_bytes;
  }
  a.multiprocessors = cut.multiprocessors;
  const bool raw_stages = layout != static_cast<int>(Layout::kNibble);
  const bool table = layout == kAnyLayout || layout == static_cast<int>(Layout::kHuffman);
  const uint32_t threads = kWarpgroupThreads * static_cast<uint32_t>(config.warpgroups + 1);
  const uint32_t shared = linear_shared(config.tokens, config.warpgroups, raw_stages, table).total;
  return {make_plan(kKernels[layout + 1][index], cut.ctas, threads, shared, a, true)};
}

void linear(Device& device, const LinearCall& call, const LinearConfig& config) {
  check(call);
  if (call.tokens == 0) return;
  const LinearCut cut = cut_linear(call, config, device.multiprocessors());
  const DeviceAddress partials = device.allocate(partial_bytes(call, config, cut), "partial sums");
  const DeviceAddress flags = device.allocate_any(flag_bytes(call, config, cut), "flags");
  for (const LaunchPlan& plan : plan_linear(call, config, cut, partials, flags)) device.launch(plan);
}

}  // namespace unweight::cuda
