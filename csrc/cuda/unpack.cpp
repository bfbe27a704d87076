#include <algorithm>

#include "../format/error.h"
#include "grid.h"
#include "plan.h"
#include "unpack_shared.h"

namespace unweight::cuda {
namespace {

void check_rows(const PackedMatrices& packed, RowRange rows) {
  const uint64_t n = packed.out_features, group = group_rows(packed);
  const bool inside = rows.first <= n && rows.count <= n - rows.first;
  if (!inside || rows.first % group || (rows.count % group && rows.first + rows.count != n))
    fail("rows: ", rows.count, " from row ", rows.first, ", expected whole groups of ", group, " rows of ", n);
}

LaunchPlan plan_tiles(const char* kernel, const UnpackArgument& a, bool table) {
  const uint64_t blocks = ceil_div(a.rows, kBlockRows), runs = ceil_div(a.packed.stages_per_block, a.run_stages);
  const uint32_t shared = table ? kUnpackSharedWithTable : kUnpackShared;
  return make_plan(kernel, grid_of(a.packed.matrices * blocks * runs), kUnpackThreads, shared, a);
}

LaunchPlan plan_chunks(const UnpackArgument& a) {
  const uint64_t chunks = ceil_div(a.rows, a.packed.chunk_rows);
  return make_plan("unweight_unpack_archive", grid_of(a.packed.matrices * chunks), kArchiveThreads, kArchiveShared, a);
}

}  // namespace

std::vector<LaunchPlan> plan_unpack(const PackedMatrices& packed, RowRange rows, DeviceAddress out, DeviceAddress sums,
                                    DeviceAddress status) {
  if (out % 16) fail("out: lies ", out % 16, " bytes behind a multiple of 16 in memory, expected 0");
  check_rows(packed, rows);
  if (rows.count == 0) return {};
  UnpackArgument a{};
  a.packed = packed_argument(packed);
  a.sums = {sums};
  a.status = status;
  a.out = out;
  a.first_row = rows.first;
  a.rows = rows.count;
  a.run_stages = segment_stages(packed.out_features, packed.in_features);
  switch (a.packed.layout) {
    case static_cast<int>(Layout::kRaw): return {plan_tiles("unweight_unpack_raw", a, false)};
    case static_cast<int>(Layout::kHuffman): return {plan_tiles("unweight_unpack_huffman", a, true)};
    case static_cast<int>(Layout::kNibble): return {plan_tiles("unweight_unpack_nibble", a, false)};
    case static_cast<int>(Layout::kArchive): return {plan_chunks(a)};
    default: return {plan_tiles("unweight_unpack_tiles", a, true), plan_chunks(a)};
  }
}

void unpack_rows(Device& device, const PackedMatrices& packed, RowRange rows, DeviceAddress out, DeviceAddress sums,
                 DeviceAddress status) {
  for (const LaunchPlan& plan : plan_unpack(packed, rows, out, sums, status)) device.launch(plan);
}

void unpack(Device& device, const PackedMatrices& packed, DeviceAddress out, DeviceAddress status) {
  const DeviceAddress sums = device.allocate(sums_bytes(packed), "checksums");
  device.clear(sums, sums_bytes(packed));
  verify_headers(device, packed, sums, status);
  unpack_rows(device, packed, {0, packed.out_features}, out, sums, status);
  compare_checksums(device, packed, sums, status);
}

void verify(Device& device, const PackedMatrices& packed, DeviceAddress status) {
  unpack(device, packed, /*out=*/0, status);
}

}  // namespace unweight::cuda
