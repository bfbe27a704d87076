#include <algorithm>

#include "grid.h"
#include "plan.h"

namespace unweight::cuda {
namespace {

constexpr uint32_t kThreads = 256;
// Of one matrix: few bytes a CTA, but not thousands of CTAs for a stack of experts.
constexpr uint64_t kBytesPerCta = 32 << 10, kMostCtas = 64;

}  // namespace

LaunchPlan plan_verify_headers(const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status) {
  VerifyHeaderArgument a{};
  a.packed = packed_argument(packed);
  a.sums = {sums};
  a.status = status;
  const uint64_t index = 4 * uint64_t{a.packed.blocks} * a.packed.stages_per_block;
  a.ctas_per_matrix = static_cast<uint32_t>(std::min(index / kBytesPerCta + 1, kMostCtas));
  return make_plan("unweight_verify_header", grid_of(uint64_t{a.packed.matrices} * a.ctas_per_matrix), kThreads, 0, a);
}

void verify_headers(Device& device, const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status) {
  device.launch(plan_verify_headers(packed, sums, status));
}

LaunchPlan plan_compare_checksums(const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status) {
  CompareChecksumsArgument a{};
  a.packed = packed_argument(packed);
  a.sums = {sums};
  a.status = status;
  return make_plan("unweight_compare_checksums", grid_of(a.packed.matrices), kThreads, 0, a);
}

void compare_checksums(Device& device, const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status) {
  device.launch(plan_compare_checksums(packed, sums, status));
}

}  // namespace unweight::cuda
