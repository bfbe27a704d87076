// linear, grouped_linear and linear_many on a GPU. Nothing waits for the device (but for experts' offsets with
// `exact`), so they can be captured into a graph: what only the device knows to be wrong shows as NaN in the result.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../cuda/linear/arguments.h"
#include "../cuda/linear/choice.h"
#include "../cuda/linear/linear.h"
#include "../cuda/results.h"
#include "../format/error.h"
#include "codec.h"
#include "configs.h"
#include "cuda_arguments.h"
#include "cuda_device.h"
#include "product.h"

namespace unweight {
namespace {

// Beside the configurations, which go by their tokens (configs.h).
constexpr int64_t kRuns = -1;  // runs of kInvariantTokens rows, each with the smallest
constexpr int64_t kMostTokens = cuda::kLinearConfigs[cuda::kLinearConfigCount - 1].tokens;

cuda::LinearConfig config_for(uint64_t rows) { return cuda::kLinearConfigs[cuda::smallest_config(rows)]; }

// x as the kernel reads it, with rows at multiples of 16 bytes: itself where it can be, else a copy.
struct AlignedRows {
  Tensor tensor;
  int64_t count, stride;
};

AlignedRows aligned_rows(const Tensor& x) {
  constexpr int64_t kMultiple = 8;  // elements in 16 bytes
  const int64_t count = row_count(x), in_features = x.size(x.dim() - 1);
  const int64_t padded = (in_features + kMultiple - 1) / kMultiple * kMultiple;
  const std::optional<int64_t> stride = row_stride(x);
  if (stride && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0) {
    if (count == 1) return {x, count, padded};
    if (*stride % kMultiple == 0) return {x, count, *stride};
  }
  const std::vector<int64_t> flat{count, in_features}, sizes{count, padded};
  Tensor copy = torch::stable::new_empty(x, sizes);
  Tensor rows = part(copy, 1, 0, in_features);
  torch::stable::copy_(rows, torch::stable::reshape(x, flat));
  return {copy, count, padded};
}

// A weight with what belongs to it, checked against x.
struct Operand {
  CudaPacked packed;
  OptionalTensor bias;
  int layout;
  int64_t in_features;

  Operand(const Tensor& x, const Tensor& packed_w, const OptionalTensor& given_bias, int64_t given_layout,
          bool stacked_allowed)
      : packed(packed_w, stacked_allowed), layout(static_cast<int>(given_layout)) {
    check_same_device("x", x, packed_w);
    if (given_bias) {
      const PackedArgument& a = packed.argument;
      const std::vector<int64_t> of_one{a.out_features}, of_each{a.matrices, a.out_features};
      check_same_device("bias", *given_bias, packed_w);
      check_bias(x, given_bias, a.stacked ? of_each : of_one);
      bias = dense(*given_bias);
    }
    if (layout != cuda::kAnyLayout) check_layout(layout);
    in_features = x.size(x.dim() - 1);
    if (in_features < 1) fail("x: no columns, expected the in_features of packed_w");
    packed.check_columns("x: in_features (its last dimension)", in_features);
  }

  int64_t out_features() const { return packed.argument.out_features; }

  // While there is a Device.
  cuda::PackedMatrices matrices() const {
    cuda::PackedMatrices matrices = packed.matrices(in_features);
    matrices.layout = layout;
    return matrices;
  }

  // Archives have no tiles to multiply with, and what is too large for tiles is one.
  bool tiled() const {
    cuda::PackedMatrices shape{0, 0, static_cast<uint64_t>(out_features()), static_cast<uint64_t>(in_features)};
    shape.layout = layout;
    return cuda::packed_argument(shape).layout != static_cast<int>(Layout::kArchive);
  }
};
using Operands = std::vector<Operand>;

// Tells a kernel which weight comes next. Views into files may lie where it can't prefetch from.
void set_next(cuda::LinearCall& call, const OptionalTensor& next_w) {
  if (!next_w || address_of(*next_w) % 16) return;
  call.next = address_of(*next_w);
  call.next_bytes = static_cast<uint64_t>(next_w->numel());
}

// The fused kernel's results on x [..., K], from one launch. `offs`: ends of experts' rows. `tokens`: of the
// configuration, or kRuns for the smallest that takes each run of kInvariantTokens rows: then a row's result is the
// same in every company.
std::vector<Tensor> multiply_fused(TorchDevice& device, const Tensor& x, const Operands& weights,
                                   const OptionalTensor& offs, const OptionalTensor& next_w, ScalarType out,
                                   int64_t tokens) {
  const AlignedRows rows = aligned_rows(x);
  OptionalTensor ends;
  if (offs) ends = dense(*offs);
  std::vector<Tensor> results;
  cuda::LinearCall call;
  call.tokens = static_cast<uint64_t>(rows.count);
  call.x = address_of(rows.tensor);
  call.x_stride = static_cast<uint64_t>(rows.stride);
  call.offsets = ends ? address_of(*ends) : 0;
  call.float_output = out == ScalarType::Float;
  for (const Operand& w : weights) {
    results.push_back(new_result(x, w.out_features(), out));
    call.weights.push_back({w.matrices(), w.bias ? address_of(*w.bias) : 0, address_of(results.back()),
                            static_cast<uint64_t>(w.out_features())});
  }
  const uint64_t element = results[0].element_size();
  if (tokens != kRuns) {
    set_next(call, next_w);
    cuda::linear(device, call, config_for(static_cast<uint64_t>(tokens)));
    return results;
  }
  for (int64_t first = 0; first < rows.count; first += cuda::kInvariantTokens) {
    call.tokens = static_cast<uint64_t>(std::min<int64_t>(cuda::kInvariantTokens, rows.count - first));
    cuda::linear(device, call, config_for(call.tokens));
    device.release();
    call.x += cuda::kInvariantTokens * call.x_stride * x.element_size();
    for (cuda::LinearWeight& w : call.weights) w.y += cuda::kInvariantTokens * w.y_stride * element;
  }
  return results;
}

// Decodes the weight to memory and multiplies with that, without waiting: NaN if it turns out to be damaged.
Tensor multiply_in_scratch(const Tensor& x, const Operand& w, ScalarType out) {
  const std::vector<int64_t> one{1}, sizes{w.out_features(), w.in_features};
  const Tensor status = torch::stable::new_empty(w.packed.tensor, one, ScalarType::Long);
  const Tensor weight = torch::stable::new_empty(w.packed.tensor, sizes, ScalarType::BFloat16);
  {
    const auto device = cuda_device(w.packed.tensor);
    const DeviceAddress word = address_of(status);
    device->clear(word, sizeof(uint64_t));
    cuda::unpack(*device, w.matrices(), address_of(weight), word);
  }
  const Tensor y = torch::stable::contiguous(multiply_exactly(x, weight, w.bias, out));
  const auto device = cuda_device(w.packed.tensor);
  cuda::poison(*device, address_of(status), address_of(y), static_cast<uint64_t>(y.numel()) * y.element_size());
  return y;
}

int64_t tokens_of(const cuda::Choice& choice) { return choice.scratch ? kScratch : choice.config.tokens; }

// Tokens of the configuration that suits, kScratch, or kRuns where a row's result has to be the same in any company.
int64_t choose(const Tensor& x, const Operands& weights, const TorchDevice& device) {
  const auto tiled = [](const Operand& w) { return w.tiled(); };
  if (x.scalar_type() != ScalarType::BFloat16 || !std::all_of(weights.begin(), weights.end(), tiled)) return kScratch;
  const int64_t rows = row_count(x);
  if (batch_invariant() && rows > cuda::kInvariantTokens) return kRuns;
  uint64_t out_features = 0;
  int layout = weights[0].layout;
  for (const Operand& w : weights) {
    out_features += static_cast<uint64_t>(w.out_features());
    if (w.layout != layout) layout = cuda::kAnyLayout;
  }
  return tokens_of(cuda::choose(layout, out_features, static_cast<uint64_t>(weights[0].in_features),
                                static_cast<uint64_t>(rows), device.multiprocessors(), device.name()));
}

// x has rows.
std::vector<Tensor> multiply(const Tensor& x, const Operands& weights, const OptionalTensor& next_w, ScalarType out) {
  check_fused_device(x.get_device_index());  // for any number of rows: not only where a model meets few
  {
    const auto device = cuda_device(x);
    const int64_t tokens = choose(x, weights, *device);
    if (tokens != kScratch) return multiply_fused(*device, x, weights, {}, next_w, out, tokens);
  }
  std::vector<Tensor> results;
  for (const Operand& w : weights) results.push_back(multiply_in_scratch(x, w, out));
  return results;
}

Tensor linear_cuda(const Tensor& x, const Tensor& packed_w, const OptionalTensor& bias, const OptionalTensor& next_w,
                   int64_t layout, bool exact, OptionalType out_dtype) {
  check_cuda("packed_w", packed_w);
  check_next(x, next_w);
  const ScalarType out = check_x(x, out_dtype);
  const Operand w(x, packed_w, bias, layout, /*stacked_allowed=*/false);
  if (row_count(x) == 0) return new_result(x, w.out_features(), out);
  return exact ? multiply_in_scratch(x, w, out) : multiply(x, {w}, next_w, out)[0];
}

// With the configuration of so many tokens, or kScratch: see supported_configs.
Tensor linear_config_cuda(const Tensor& x, const Tensor& packed_w, const OptionalTensor& bias, int64_t layout,
                          int64_t tokens, OptionalType out_dtype) {
  check_cuda("packed_w", packed_w);
  const ScalarType out = check_x(x, out_dtype);
  const Operand w(x, packed_w, bias, layout, /*stacked_allowed=*/false);
  const std::vector<int64_t> supported = supported_configs(w.tiled() ? layout : static_cast<int64_t>(Layout::kArchive));
  if (std::find(supported.begin(), supported.end(), tokens) == supported.end())
    fail("tokens: ", tokens, ", expected one of ", text_of(supported), ", as supported_configs gives them");
  if (row_count(x) == 0) return new_result(x, w.out_features(), out);
  if (tokens == kScratch) return multiply_in_scratch(x, w, out);
  check_dtype("x", x, ScalarType::BFloat16);
  check_fused_device(x.get_device_index());
  const auto device = cuda_device(packed_w);
  return multiply_fused(*device, x, {w}, {}, {}, out, tokens)[0];
}

// How many rows each expert has is known to the device alone: as many as fall to each, if they are shared evenly,
// decide.
int64_t choose_for_groups(const Tensor& x, const Operand& w, const TorchDevice& device) {
  const int64_t experts = w.packed.argument.matrices, rows = (x.size(0) + experts - 1) / experts;
  const cuda::Choice choice =
      cuda::choose(w.layout, static_cast<uint64_t>(w.out_features()), static_cast<uint64_t>(w.in_features),
                   static_cast<uint64_t>(rows), device.multiprocessors(), device.name());
  return choice.scratch ? kMostTokens : tokens_of(choice);
}

Tensor grouped_linear_cuda(const Tensor& x, const Tensor& packed_w, const Tensor& offs, const OptionalTensor& bias,
                           const OptionalTensor& next_w, int64_t layout, bool exact, OptionalType out_dtype) {
  check_cuda("packed_w", packed_w);
  check_next(x, next_w);
  const ScalarType out = check_x(x, out_dtype);
  check_groups(x, offs, check_packed_cuda(packed_w, /*stacked_allowed=*/true));
  check_same_device("offs", offs, packed_w);
  const Operand w(x, packed_w, bias, layout, /*stacked_allowed=*/true);
  if (exact) {
    const Tensor weight = unpack_cuda(packed_w, w.in_features, ScalarType::BFloat16, w.layout);
    return multiply_groups_exactly(x, weight, checked_ends(to_cpu(offs), x.size(0)), bias, out);
  }
  const char* instead = "; exact=True takes any";
  if (x.scalar_type() != ScalarType::BFloat16)
    fail("x: dtype ", dtype_name(x.scalar_type()), ", expected torch.bfloat16 on a GPU", instead);
  if (!w.tiled()) fail("layout: archive, expected raw, huffman or nibble (see transcode)", instead);
  if (batch_invariant() && x.size(0) > cuda::kInvariantTokens)
    fail("x: ", x.size(0), " rows, under batch_invariant(True) grouped_linear takes up to ", cuda::kInvariantTokens,
         ": call linear for each expert");
  if (x.size(0) == 0 || offs.numel() == 0) {
    const std::vector<int64_t> sizes{x.size(0), w.out_features()};
    return torch::stable::new_zeros(x, sizes, out);
  }
  check_fused_device(x.get_device_index());
  const auto device = cuda_device(packed_w);
  return multiply_fused(*device, x, {w}, offs, next_w, out, choose_for_groups(x, w, *device))[0];
}

std::vector<Tensor> linear_many_cuda(const Tensor& x, const std::vector<Tensor>& packed_w,
                                     const std::vector<OptionalTensor>& bias, const OptionalTensor& next_w,
                                     const std::vector<int64_t>& layouts, OptionalType out_dtype) {
  check_counts(packed_w.size(), bias.size(), layouts.size());
  check_next(x, next_w);
  const ScalarType out = check_x(x, out_dtype);
  Operands weights;
  for_each_weight(packed_w.size(), [&](size_t i) {
    check_cuda("packed_w", packed_w[i]);
    check_same_device("packed_w", packed_w[i], packed_w[0]);
    weights.emplace_back(x, packed_w[i], bias[i], layouts.empty() ? cuda::kAnyLayout : layouts[i],
                         /*stacked_allowed=*/false);
  });
  std::vector<Tensor> results;
  if (row_count(x) == 0) {
    for (const Operand& w : weights) results.push_back(new_result(x, w.out_features(), out));
    return results;
  }
  for (size_t first = 0; first < weights.size(); first += cuda::kMostWeights) {
    const size_t count = std::min<size_t>(cuda::kMostWeights, weights.size() - first);
    const Operands some(weights.begin() + first, weights.begin() + first + count);
    const OptionalTensor next = first + count < packed_w.size() ? packed_w[first + count] : next_w;
    for (Tensor& y : multiply(x, some, next, out)) results.push_back(std::move(y));
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(unweight, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear_cuda));
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear_cuda));
  m.impl("linear_many", TORCH_BOX(&linear_many_cuda));
  m.impl("_linear_config", TORCH_BOX(&linear_config_cuda));
}

}  // namespace unweight
