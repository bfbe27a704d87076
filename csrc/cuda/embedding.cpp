#include <algorithm>

#include "../format/error.h"
#include "embedding_shared.h"
#include "plan.h"

namespace unweight::cuda {

std::vector<LaunchPlan> plan_embedding(const PackedMatrices& packed, DeviceAddress ids, bool wide_ids, uint64_t count,
                                       DeviceAddress out, DeviceAddress status, int multiprocessors) {
  if (packed.matrices != 1) fail("packed: ", packed.matrices, " matrices, expected one");
  if (out % 16) fail("out: lies ", out % 16, " bytes behind a multiple of 16 in memory, expected 0");
  if (count == 0) return {};
  EmbeddingArgument a{};
  a.packed = packed_argument(packed);
  a.status = status;
  a.ids = ids;
  a.out = out;
  a.count = count;
  a.wide_ids = wide_ids;
  // Of tiles, CTAs take one id after the other, so that the code table is made once. An archive's row takes so long
  // that this doesn't matter.
  if (count > INT32_MAX) fail("ids: ", count, " elements, allowed are 2^31 - 1 in one call");
  const uint64_t resident = uint64_t{kEmbeddingCtas} * multiprocessors;
  const LaunchPlan tiles = make_plan("unweight_embedding_tiles", static_cast<uint32_t>(std::min(count, resident)),
                                     kEmbeddingThreads, kEmbeddingShared, a);
  const LaunchPlan archive = make_plan("unweight_embedding_archive", static_cast<uint32_t>(count),
                                       kArchiveEmbeddingThreads, kArchiveShared, a);
  if (a.packed.layout == static_cast<int>(Layout::kArchive)) return {archive};
  if (a.packed.layout != kAnyLayout) return {tiles};
  return {tiles, archive};
}

void embedding(Device& device, const PackedMatrices& packed, DeviceAddress ids, bool wide_ids, uint64_t count,
               DeviceAddress out, DeviceAddress status) {
  for (const LaunchPlan& plan : plan_embedding(packed, ids, wide_ids, count, out, status, device.multiprocessors()))
    device.launch(plan);
}

}  // namespace unweight::cuda
