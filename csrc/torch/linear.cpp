// linear, grouped_linear and linear_many on the CPU: between tensors and the kernels.
#include "../cpu/linear.h"

#include <torch/csrc/stable/library.h>

#include "../format/error.h"
#include "codec.h"
#include "parallel.h"
#include "product.h"

namespace unweight {
namespace {

Packed open_checked(const PackedArgument& packed, int64_t m, int64_t in_features, int64_t layout) {
  const Packed w = packed.open(m, "x: in_features (its last dimension)", in_features);
  if (layout != -1 && check_layout(layout) != w.header.layout)
    fail("layout: ", layout, " (", layout_name(check_layout(layout)), "), expected -1 or that of packed_w, ",
         static_cast<int>(w.header.layout), " (", layout_name(w.header.layout), ")");
  return w;
}

// y [rows, N], contiguous, in the type of x and bias.
void multiply_rows(const Packed& w, size_t size, const Tensor& x, const OptionalTensor& bias, Tensor& y) {
  const std::optional<int64_t> stride = row_stride(x);
  const bool readable = stride && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % x.element_size() == 0;
  const Tensor rows = readable ? x : dense(x);
  OptionalTensor dense_bias;
  if (bias) dense_bias = dense(*bias);
  linear(w, size, rows.const_data_ptr(), readable ? *stride : x.size(x.dim() - 1),
         x.scalar_type() == ScalarType::BFloat16 ? XType::kBFloat16 : XType::kFloat32, row_count(x),
         bias ? dense_bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), torch_threads());
}

// The kernels' arguments all have one type: sums of BF16 that aren't rounded are those of the same values in FP32.
Tensor in_type(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

OptionalTensor in_type(const OptionalTensor& tensor, ScalarType dtype) {
  if (!tensor) return tensor;
  return in_type(*tensor, dtype);
}

Tensor linear_cpu(const Tensor& x, const Tensor& packed_w, const OptionalTensor& bias, const OptionalTensor& next_w,
                  int64_t layout, bool exact, OptionalType out_dtype) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/false);
  check_cpu("x", x);
  if (bias) check_cpu("bias", *bias);
  check_next(x, next_w);
  const ScalarType out = check_x(x, out_dtype);
  check_bias(x, bias, {packed.out_features});
  const int64_t in_features = x.size(x.dim() - 1);
  const Packed w = open_checked(packed, 0, in_features, layout);
  if (exact) return multiply_exactly(x, unpack_cpu(packed_w, in_features, ScalarType::BFloat16), bias, out);

  Tensor y = new_result(x, packed.out_features, out);
  if (y.numel()) multiply_rows(w, packed.matrix_bytes(), in_type(x, out), in_type(bias, out), y);
  return y;
}

Tensor grouped_linear_cpu(const Tensor& x, const Tensor& packed_w, const Tensor& offs, const OptionalTensor& bias,
                          const OptionalTensor& next_w, int64_t layout, bool exact, OptionalType out_dtype) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  check_cpu("x", x);
  check_cpu("offs", offs);
  if (bias) check_cpu("bias", *bias);
  check_next(x, next_w);
  const ScalarType out = check_x(x, out_dtype);
  check_groups(x, offs, packed);
  check_bias(x, bias, {packed.matrices, packed.out_features});
  const int64_t in_features = x.size(1);
  for (int64_t m = 0; m < packed.matrices; m++) open_checked(packed, m, in_features, layout);
  const std::vector<int64_t> ends = checked_ends(offs, x.size(0));
  if (exact)
    return multiply_groups_exactly(x, unpack_cpu(packed_w, in_features, ScalarType::BFloat16), ends, bias, out);

  const std::vector<int64_t> sizes{x.size(0), packed.out_features};
  Tensor y = torch::stable::new_zeros(x, sizes, out), same_x = in_type(x, out);
  const OptionalTensor same_bias = in_type(bias, out);
  int64_t begin = 0;
  for (size_t e = 0; e < ends.size(); begin = ends[e++]) {
    if (ends[e] == begin) continue;
    Tensor place = part(y, 0, begin, ends[e] - begin);
    OptionalTensor its_bias;
    if (bias) its_bias = torch::stable::select(*same_bias, 0, e);
    multiply_rows(packed.open(e, "in_features", in_features), packed.matrix_bytes(),
                  part(same_x, 0, begin, ends[e] - begin), its_bias, place);
  }
  return y;
}

std::vector<Tensor> linear_many_cpu(const Tensor& x, const std::vector<Tensor>& packed_w,
                                    const std::vector<OptionalTensor>& bias, const OptionalTensor& next_w,
                                    const std::vector<int64_t>& layouts, OptionalType out_dtype) {
  check_counts(packed_w.size(), bias.size(), layouts.size());
  std::vector<Tensor> results;
  for_each_weight(packed_w.size(), [&](size_t i) {
    results.push_back(linear_cpu(x, packed_w[i], bias[i], next_w, layouts.empty() ? -1 : layouts[i], false, out_dtype));
  });
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_cpu));
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear_cpu));
  m.impl("linear_many", TORCH_BOX(&linear_many_cpu));
}

}  // namespace unweight
