#include "cuda_arguments.h"

#include "../format/error.h"

namespace unweight {
namespace {

// Bulk copies move 16 bytes at a time. torch's own tensors start at multiples of 512, views into files may not.
Tensor aligned(const Tensor& packed_w) {
  const bool fits = reinterpret_cast<uintptr_t>(packed_w.const_data_ptr()) % 16 == 0;
  return fits ? packed_w : torch::stable::clone(packed_w);
}

}  // namespace

CudaPacked::CudaPacked(const Tensor& packed_w, bool stacked_allowed)
    : tensor((check_packed_cuda(packed_w, stacked_allowed), aligned(packed_w))),
      argument(check_packed_cuda(tensor, stacked_allowed)) {
  if (argument.matrices > UINT32_MAX) fail("packed_w: ", argument.matrices, " matrices, allowed are 2^32 - 1");
}

void CudaPacked::check_columns(const char* name, int64_t columns) const {
  // Signs and mantissas alone take a byte a weight.
  if (columns > argument.row_bytes)
    fail(name, ": ", columns, ", expected that of packed_w, whose rows of ", argument.row_bytes,
         " bytes can't hold so many");
}

cuda::PackedMatrices CudaPacked::matrices(int64_t in_features) const {
  return {address_of(tensor), argument.matrix_bytes(), static_cast<uint64_t>(argument.out_features),
          static_cast<uint64_t>(in_features), static_cast<uint32_t>(argument.matrices)};
}

}  // namespace unweight
