// embedding: between tensors and the CPU kernels.
#include "../cpu/embedding.h"

#include <torch/csrc/stable/library.h>

#include "../format/error.h"
#include "arguments.h"
#include "parallel.h"

namespace unweight {
namespace {

Tensor embedding_cpu(const Tensor& ids, const Tensor& packed_w, int64_t embedding_dim) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/false);
  check_cpu("ids", ids);
  const ScalarType dtype = ids.scalar_type();
  if (dtype != ScalarType::Long && dtype != ScalarType::Int)
    fail("ids: dtype ", dtype_name(dtype), ", expected torch.int64 or torch.int32");
  if (embedding_dim < 1) fail("embedding_dim: ", embedding_dim, ", expected at least 1");
  const Packed w = packed.open(0, "embedding_dim", embedding_dim);
  std::vector<int64_t> sizes = shape_of(ids);
  sizes.push_back(embedding_dim);
  Tensor rows = torch::stable::new_empty(packed_w, sizes, ScalarType::BFloat16);
  if (rows.numel() == 0) return rows;
  const Tensor wide = dense(dtype == ScalarType::Int ? torch::stable::to(ids, ScalarType::Long) : ids);
  embedding(w, packed.matrix_bytes(), static_cast<const int64_t*>(wide.const_data_ptr()), wide.numel(),
            static_cast<uint16_t*>(rows.mutable_data_ptr()), torch_threads());
  return rows;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CPU, m) { m.impl("embedding", TORCH_BOX(&embedding_cpu)); }
// Until there are kernels for it: the function says what is wrong better than the dispatcher.
STABLE_TORCH_LIBRARY_IMPL(unweight, CUDA, m) { m.impl("embedding", TORCH_BOX(&embedding_cpu)); }

}  // namespace unweight
