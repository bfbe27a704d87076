#include "product.h"

#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>

#include "../format/error.h"

namespace unweight {
namespace {

Tensor torch_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor as(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

std::atomic<bool> invariant{false};

// 1 or 0 sets it, -1 only asks; says what it was.
int64_t set_batch_invariant(int64_t value) {
  if (value < -1 || value > 1) fail("value: ", value, ", expected -1 (asks), 0 or 1");
  return value == -1 ? invariant.load() : invariant.exchange(value);
}

}  // namespace

bool batch_invariant() { return invariant.load(); }

ScalarType check_x(const Tensor& x, OptionalType out_dtype) {
  const ScalarType dtype = x.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
    fail("x: dtype ", dtype_name(dtype), ", expected torch.bfloat16 or torch.float32");
  if (x.dim() < 1) fail("x: 0 dimensions, expected at least 1");
  const ScalarType out = out_dtype.value_or(dtype);
  if (out != dtype && out != ScalarType::Float)
    fail("out_dtype: ", dtype_name(out), ", expected None, torch.float32 or that of x, ", dtype_name(dtype));
  return out;
}

void check_bias(const Tensor& x, const OptionalTensor& bias, const std::vector<int64_t>& shape) {
  if (!bias) return;
  check_dtype("bias", *bias, x.scalar_type());
  if (shape_of(*bias) != shape) fail("bias: shape ", text_of(shape_of(*bias)), ", expected ", text_of(shape));
}

void check_next(const Tensor& x, const OptionalTensor& next_w) {
  if (!next_w) return;
  check_dtype("next_w", *next_w, ScalarType::Byte);
  if (next_w->dim() != 2)
    fail("next_w: shape ", text_of(shape_of(*next_w)), ", expected [out_features, row_bytes]; of experts give none");
  if (!next_w->is_contiguous()) fail("next_w: is not contiguous, expected the tensor as pack made it");
  if (x.is_cpu())
    check_cpu("next_w", *next_w);
  else
    check_same_device("next_w", *next_w, x);
}

void check_groups(const Tensor& x, const Tensor& offs, const PackedArgument& packed) {
  if (!packed.stacked)
    fail("packed_w: 2 dimensions, expected 3, [E, out_features, row_bytes]: of a single matrix use linear");
  if (x.dim() != 2) fail("x: ", x.dim(), " dimensions, expected 2, [rows, in_features]");
  check_dtype("offs", offs, ScalarType::Int);
  if (shape_of(offs) != std::vector<int64_t>{packed.matrices})
    fail("offs: shape ", text_of(shape_of(offs)), ", expected [", packed.matrices, "], an end for each matrix");
}

std::vector<int64_t> checked_ends(const Tensor& offs, int64_t rows) {
  const Tensor values = dense(offs);
  const auto* first = static_cast<const int32_t*>(values.const_data_ptr());
  const std::vector<int64_t> ends(first, first + offs.numel());
  int64_t begin = 0;
  for (size_t e = 0; e < ends.size(); begin = ends[e++])
    if (ends[e] < begin || ends[e] > rows)
      fail("offs: element ", e, " is ", ends[e], ", expected ", begin, " to ", rows);
  return ends;
}

void check_counts(size_t weights, size_t biases, size_t layouts) {
  if (biases != weights) fail("bias: ", biases, " of them, expected ", weights, ", one (or None) for each packed_w");
  if (layouts && layouts != weights)
    fail("layouts: ", layouts, " of them, expected ", weights, ", one for each packed_w, or none");
}

int64_t row_count(const Tensor& x) {
  int64_t count = 1;
  for (int64_t d = 0; d < x.dim() - 1; d++) count *= x.size(d);
  return count;
}

std::optional<int64_t> row_stride(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) return {};
  std::optional<int64_t> stride;
  int64_t rows = 1;  // of the dimensions from d on
  for (int64_t d = last - 1; d >= 0; d--) {
    if (x.size(d) == 1) continue;
    if (stride && x.stride(d) != *stride * rows) return {};
    if (!stride) stride = x.stride(d);
    rows *= x.size(d);
  }
  return stride.value_or(x.size(last));
}

// (torch::stable::narrow needs a function that isn't one of the stable ABI's.)
Tensor part(const Tensor& tensor, int64_t dim, int64_t first, int64_t count) {
  std::array<StableIValue, 4> stack{torch::stable::detail::from(tensor), torch::stable::detail::from(dim),
                                    torch::stable::detail::from(first), torch::stable::detail::from(count)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::narrow", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor new_result(const Tensor& x, int64_t out_features, ScalarType dtype) {
  std::vector<int64_t> sizes = shape_of(x);
  sizes.back() = out_features;
  return torch::stable::new_empty(x, sizes, dtype);
}

Tensor multiply_exactly(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, ScalarType out_dtype) {
  return torch_linear(as(x, out_dtype), as(weight, out_dtype), bias ? OptionalTensor(as(*bias, out_dtype)) : bias);
}

Tensor multiply_groups_exactly(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& ends,
                               const OptionalTensor& bias, ScalarType out_dtype) {
  const std::vector<int64_t> sizes{x.size(0), weight.size(1)};
  Tensor y = torch::stable::new_zeros(x, sizes, out_dtype);
  int64_t begin = 0;
  for (size_t e = 0; e < ends.size(); begin = ends[e++]) {
    const int64_t count = ends[e] - begin;
    if (count == 0) continue;
    OptionalTensor its_bias = bias;
    if (bias) its_bias = torch::stable::select(*bias, 0, e);
    Tensor place = part(y, 0, begin, count);
    torch::stable::copy_(
        place, multiply_exactly(part(x, 0, begin, count), torch::stable::select(weight, 0, e), its_bias, out_dtype));
  }
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(unweight, CompositeExplicitAutograd, m) {
  m.impl("_batch_invariant", TORCH_BOX(&set_batch_invariant));
}

}  // namespace unweight
