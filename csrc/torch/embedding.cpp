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
  check_lookup(ids, embedding_dim);
  const Packed w = packed.open(0, "embedding_dim", embedding_dim);
  std::vector<int64_t> sizes = shape_of(ids);
  sizes.push_back(embedding_dim);
  Tensor rows = torch::stable::new_empty(packed_w, sizes, ScalarType::BFloat16);
  if (rows.numel() == 0) return rows;
  const Tensor wide = dense(ids.scalar_type() == ScalarType::Int ? torch::stable::to(ids, ScalarType::Long) : ids);
  embedding(w, packed.matrix_bytes(), static_cast<const int64_t*>(wide.const_data_ptr()), wide.numel(),
            static_cast<uint16_t*>(rows.mutable_data_ptr()), torch_threads());
  return rows;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CPU, m) { m.impl("embedding", TORCH_BOX(&embedding_cpu)); }

}  // namespace unweight
