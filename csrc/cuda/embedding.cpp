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
  const auto launch = [&](const char* kernel, uint32_t threads, uint32_t ctas_per_multiprocessor, uint32_t shared) {
    const uint64_t most = uint64_t{ctas_per_multiprocessor} * multiprocessors;
    return make_plan(kernel, static_cast<uint32_t>(std::min(count, most)), threads, shared, a);
  };
  const LaunchPlan tiles = launch("unweight_embedding_tiles", kEmbeddingThreads, 8, kEmbeddingShared);
  const LaunchPlan archive = launch("unweight_embedding_archive", kArchiveEmbeddingThreads, 8, kArchiveShared);
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
