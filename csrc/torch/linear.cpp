// linear: between tensors and the CPU kernels.
#include "../cpu/linear.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>

#include "../format/error.h"
#include "arguments.h"
#include "codec.h"
#include "parallel.h"

namespace unweight {
namespace {

// F.linear itself, so that results are the original model's to the last bit.
Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x as rows that lie `stride` elements apart: itself where it can be, else a copy.
struct Rows {
  Tensor tensor;
  int64_t count, stride;
};
Rows rows_of(const Tensor& x, int64_t in_features) {
  const int64_t count = x.numel() / in_features;
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  if (x.dim() == 2 && x.stride(1) == 1 && address % x.element_size() == 0) return {x, count, x.stride(0)};
  return {dense(x), count, in_features};
}

// Dtypes and shapes, which are the same on every device.
void check_product(const Tensor& x, const std::optional<Tensor>& bias, int64_t out_features) {
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
    fail("x: dtype ", dtype_name(dtype), ", expected torch.bfloat16 or torch.float32");
  if (x.dim() < 1) fail("x: 0 dimensions, expected at least 1");
  if (!bias) return;
  check_dtype("bias", *bias, dtype);
  if (bias->dim() != 1 || bias->size(0) != out_features)
    fail("bias: ", bias->dim(), " dimensions, ", bias->numel(), " elements, expected [", out_features, "]");
}

Tensor multiply_exactly(const Tensor& x, Tensor weight, const std::optional<Tensor>& bias) {
  if (x.scalar_type() != ScalarType::BFloat16) weight = torch::stable::to(weight, x.scalar_type());
  return torch_linear(x, weight, bias);
}

Tensor linear_cuda(const Tensor& x, const Tensor& packed_w, const std::optional<Tensor>& bias, int64_t layout,
                   bool exact) {
  const PackedArgument packed = check_packed_cuda(packed_w, /*stacked_allowed=*/false);
  check_same_device("x", x, packed_w);
  if (bias) check_same_device("bias", *bias, packed_w);
  check_product(x, bias, packed.out_features);
  if (layout != -1) check_layout(layout);
  if (!exact)
    fail(
        "exact: False, expected True: on CUDA devices this version multiplies with the unpacked weight only, as "
        "exact=True does");
  const Tensor weight = unpack_cuda(packed_w, x.size(x.dim() - 1), ScalarType::BFloat16, static_cast<int>(layout));
  return multiply_exactly(x, weight, bias);
}

Tensor linear_cpu(const Tensor& x, const Tensor& packed_w, const std::optional<Tensor>& bias, int64_t layout,
                  bool exact) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/false);
  check_cpu("x", x);
  if (bias) check_cpu("bias", *bias);
  check_product(x, bias, packed.out_features);
  const ScalarType dtype = x.scalar_type();
  std::vector<int64_t> sizes = shape_of(x);
  const int64_t in_features = sizes.back();
  const Packed w = packed.open(0, "x: in_features (its last dimension)", in_features);
  if (layout != -1 && check_layout(layout) != w.header.layout)
    fail("layout: ", layout, " (", layout_name(check_layout(layout)), "), expected -1 or that of packed_w, ",
         static_cast<int>(w.header.layout), " (", layout_name(w.header.layout), ")");
  if (exact) return multiply_exactly(x, unpack_cpu(packed_w, in_features, ScalarType::BFloat16), bias);

  sizes.back() = packed.out_features;
  Tensor y = torch::stable::new_empty(x, sizes);
  if (y.numel() == 0) return y;
  const Rows rows = rows_of(x, in_features);
  Tensor dense_bias = x;  // any, where there is none
  const void* bias_data = nullptr;
  if (bias) {
    dense_bias = dense(*bias);
    bias_data = dense_bias.const_data_ptr();
  }
  linear(w, packed.matrix_bytes(), rows.tensor.const_data_ptr(), rows.stride,
         dtype == ScalarType::BFloat16 ? XType::kBFloat16 : XType::kFloat32, rows.count, bias_data,
         y.mutable_data_ptr(), torch_threads());
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CPU, m) { m.impl("linear", TORCH_BOX(&linear_cpu)); }
STABLE_TORCH_LIBRARY_IMPL(unweight, CUDA, m) { m.impl("linear", TORCH_BOX(&linear_cuda)); }

}  // namespace unweight
