// What the operators check of their tensors before the torch-free code sees a pointer. Every check names the argument,
// what it got and what is expected.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../format/header.h"

namespace unweight {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "torch.bfloat16"
const char* dtype_name(ScalarType dtype);
std::vector<int64_t> shape_of(const Tensor& tensor);
// "[3, 4]"
std::string text_of(const std::vector<int64_t>& shape);

void check_cpu(const char* name, const Tensor& tensor);
// On any GPU, or on the very one of `packed_w`.
void check_cuda(const char* name, const Tensor& tensor);
void check_same_device(const char* name, const Tensor& tensor, const Tensor& packed_w);
void check_dtype(const char* name, const Tensor& tensor, ScalarType expected);

// The tensor itself, or a copy where it is strided or (from a file) misaligned for its elements.
Tensor dense(const Tensor& tensor);

// A packed tensor, [N, row_bytes] or [E, N, row_bytes], as matrices one behind the other. Whoever asks checks where it
// is: only bytes on the CPU can be opened.
struct PackedArgument {
  const uint8_t* bytes;
  int64_t matrices, out_features, row_bytes;
  bool stacked;

  size_t matrix_bytes() const { return static_cast<size_t>(out_features) * static_cast<size_t>(row_bytes); }
  const uint8_t* matrix(int64_t m) const { return bytes + static_cast<size_t>(m) * matrix_bytes(); }
  // Opens matrix m, whose header must say N = out_features and, unless it is -1, K = in_features.
  Packed open(int64_t m, const char* in_features_name, int64_t in_features) const;
  void check_out_features(const Header& header) const;
};
PackedArgument check_packed(const Tensor& packed_w, bool stacked_allowed);       // on the CPU
PackedArgument check_packed_cuda(const Tensor& packed_w, bool stacked_allowed);  // on a GPU

// What `embedding` asks of its other arguments on every device.
void check_lookup(const Tensor& ids, int64_t embedding_dim);

Layout check_layout(int64_t layout);

}  // namespace unweight
