// embedding on a GPU. It never waits for the device, so it can be captured into a graph.
#include <torch/csrc/stable/library.h>

#include "cuda_arguments.h"
#include "cuda_device.h"

namespace unweight {
namespace {

Tensor embedding_cuda(const Tensor& ids, const Tensor& packed_w, int64_t embedding_dim) {
  const CudaPacked packed(packed_w, /*stacked_allowed=*/false);
  check_same_device("ids", ids, packed_w);
  check_lookup(ids, embedding_dim);
  packed.check_columns("embedding_dim", embedding_dim);
  const auto device = cuda_device(packed_w);
  std::vector<int64_t> sizes = shape_of(ids);
  sizes.push_back(embedding_dim);
  const Tensor rows = torch::stable::new_empty(packed_w, sizes, ScalarType::BFloat16);
  if (rows.numel() == 0) return rows;
  const Tensor values = dense(ids);
  const DeviceAddress status = device->allocate(sizeof(uint64_t), "status");
  device->clear(status, sizeof(uint64_t));
  // Nobody reads the status: what is wrong shows as NaN in its row.
  cuda::embedding(*device, packed.matrices(embedding_dim), address_of(values), ids.scalar_type() == ScalarType::Long,
                  static_cast<uint64_t>(ids.numel()), address_of(rows), status);
  return rows;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CUDA, m) { m.impl("embedding", TORCH_BOX(&embedding_cuda)); }

}  // namespace unweight
