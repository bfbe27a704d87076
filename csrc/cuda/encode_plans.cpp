// Grids of the kernels that count, size and write stages.
#include <algorithm>

#include "../format/error.h"
#include "grid.h"
#include "transcode.h"

namespace unweight::cuda {
namespace {

LaunchPlan plan_segments(const char* kernel, const EncodeArgument& a) {
  const uint64_t segments = uint64_t{a.band.matrices} * a.band.blocks() * a.band.segments_per_block();
  return make_plan(kernel, grid_of(segments), kEncodeThreads, 0, a);
}

LaunchPlan plan_stages(const char* kernel, const EncodeArgument& a) {
  const uint64_t stages = uint64_t{a.band.matrices} * a.band.blocks() * a.band.stages_per_block;
  return make_plan(kernel, grid_of(stages), kEncodeThreads, 0, a);
}

}  // namespace

LaunchPlan plan_count(const CountArgument& a, int multiprocessors) {
  // The table fills a multiprocessor's shared memory more than half: one CTA each.
  const uint64_t rounds = ceil_div(a.row_count * ((a.in_features + 1) / 2), kCountRound);
  const auto ctas = static_cast<uint32_t>(std::min<uint64_t>(rounds, static_cast<uint64_t>(multiprocessors)));
  return make_plan("unweight_count_pairs", ctas, kCountThreads, kCountSharedBytes, a);
}

LaunchPlan plan_size_huffman(const EncodeArgument& a) { return plan_segments("unweight_size_huffman", a); }
LaunchPlan plan_size_nibble(const EncodeArgument& a) { return plan_stages("unweight_size_nibble", a); }

LaunchPlan plan_write(Layout layout, const EncodeArgument& a) {
  switch (layout) {
    case Layout::kRaw: return plan_stages("unweight_write_raw", a);
    case Layout::kHuffman: return plan_segments("unweight_write_huffman", a);
    case Layout::kNibble: return plan_stages("unweight_write_nibble", a);
    case Layout::kArchive: break;
  }
  fail("layout: ", layout_name(layout), " has no stages");
}

LaunchPlan plan_sum_blocks(SumArgument a, int multiprocessors) {
  const uint64_t blocks = uint64_t{a.matrices} * a.blocks;
  // Few blocks are shared by so many CTAs that all multiprocessors have some, but not by more than there are stages.
  constexpr uint64_t kCtasPerMultiprocessor = 8;
  const uint64_t wanted = ceil_div(kCtasPerMultiprocessor * static_cast<uint64_t>(multiprocessors), blocks);
  a.pieces = static_cast<uint32_t>(std::min<uint64_t>(wanted, a.stages_per_block));
  return make_plan("unweight_sum_blocks", grid_of(blocks * a.pieces), kSumThreads, 0, a);
}

}  // namespace unweight::cuda
