#include "arguments.h"

#include <sstream>
#include <string>

#include "../format/error.h"

namespace unweight {
const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Bool: return "torch.bool";
    default: return torch::headeronly::toString(dtype);
  }
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < shape.size(); i++) text << (i ? ", " : "") << shape[i];
  text << ']';
  return text.str();
}

void check_cpu(const char* name, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(name, ": is not on the CPU, expected it there as the other arguments are");
}

void check_dtype(const char* name, const Tensor& tensor, ScalarType expected) {
  if (tensor.scalar_type() != expected)
    fail(name, ": dtype ", dtype_name(tensor.scalar_type()), ", expected ", dtype_name(expected));
}

Tensor dense(const Tensor& tensor) {
  const Tensor contiguous = torch::stable::contiguous(tensor);
  const auto address = reinterpret_cast<uintptr_t>(contiguous.const_data_ptr());
  return address % static_cast<uintptr_t>(contiguous.element_size()) ? torch::stable::clone(contiguous) : contiguous;
}

void PackedArgument::check_out_features(const Header& header) const {
  if (header.out_features != static_cast<uint64_t>(out_features))
    fail("packed_w: its shape says ", out_features, " out_features, its header ", header.out_features);
}

Packed PackedArgument::open(int64_t m, const char* in_features_name, int64_t in_features) const {
  const Packed packed = open_packed(matrix(m), matrix_bytes());
  check_out_features(packed.header);
  if (in_features >= 0 && packed.header.in_features != static_cast<uint64_t>(in_features))
    fail(in_features_name, ": ", in_features, ", expected ", packed.header.in_features,
         ", the in_features of packed_w");
  return packed;
}

namespace {

PackedArgument packed_argument(const Tensor& packed_w, bool stacked_allowed) {
  check_dtype("packed_w", packed_w, ScalarType::Byte);
  const std::vector<int64_t> shape = shape_of(packed_w);
  if (shape.size() != 2 && !(stacked_allowed && shape.size() == 3))
    fail("packed_w: shape ", text_of(shape), ", expected [out_features, row_bytes]",
         stacked_allowed ? " or [E, out_features, row_bytes]" : "; of stacked matrices give one");
  if (!packed_w.is_contiguous()) fail("packed_w: is not contiguous, expected the tensor as pack made it");
  PackedArgument packed{static_cast<const uint8_t*>(packed_w.const_data_ptr()), 1, shape[shape.size() - 2],
                        shape.back(), shape.size() == 3};
  if (packed.stacked) packed.matrices = shape[0];
  if (packed.out_features == 0 || packed.row_bytes == 0) fail("packed_w: shape ", text_of(shape), " holds no matrix");
  return packed;
}

}  // namespace

PackedArgument check_packed(const Tensor& packed_w, bool stacked_allowed) {
  check_cpu("packed_w", packed_w);
  return packed_argument(packed_w, stacked_allowed);
}

PackedArgument check_packed_cuda(const Tensor& packed_w, bool stacked_allowed) {
  check_cuda("packed_w", packed_w);
  return packed_argument(packed_w, stacked_allowed);
}

void check_lookup(const Tensor& ids, int64_t embedding_dim) {
  const ScalarType dtype = ids.scalar_type();
  if (dtype != ScalarType::Long && dtype != ScalarType::Int)
    fail("ids: dtype ", dtype_name(dtype), ", expected torch.int64 or torch.int32");
  if (embedding_dim < 1) fail("embedding_dim: ", embedding_dim, ", expected at least 1");
}

Layout check_layout(int64_t layout) {
  if (layout < 0 || layout > static_cast<int64_t>(Layout::kArchive))
    fail("layout: ", layout, ", expected 0 (raw), 1 (huffman), 2 (nibble) or 3 (archive)");
  return static_cast<Layout>(layout);
}

}  // namespace unweight
