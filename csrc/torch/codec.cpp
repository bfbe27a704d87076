// _pack, _unpack, _transcode, unpack, _verify, _describe: between tensors and the codec.
#include "../cpu/codec.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "../format/code.h"
#include "../format/error.h"
#include "arguments.h"
#include "codec.h"
#include "parallel.h"

namespace unweight {
namespace {

// `shape` describes one matrix to whoever unpacks it: [N, …] with K weights a row.
void check_shape(const std::vector<int64_t>& shape, int64_t out_features, int64_t in_features) {
  if (shape.size() < 2 || shape.size() > kMaxRank)
    fail("shape: ", shape.size(), " dimensions, expected 2 to ", kMaxRank);
  int64_t row = 1;
  for (size_t i = 1; i < shape.size(); i++) {
    // Factors are checked before they are multiplied: a product that overflows could look right.
    if (shape[i] < 1 || shape[i] > in_features / row)
      fail("shape: dimension ", i, " is ", shape[i], ", expected a product of ", in_features, " after the first");
    row *= shape[i];
  }
  if (shape[0] != out_features || row != in_features)
    fail("shape: [", shape[0], ", product ", row, "], expected [", out_features, ", product ", in_features, "]");
}

// `like` is any tensor of the device.
Tensor pack_rows(const RowSource& source, int64_t layout, const std::vector<int64_t>& shape, bool stacked,
                 int64_t threads, const Tensor& like) {
  const Parallel parallel = torch_threads(threads);
  const Packer packer(source, check_layout(layout), shape, stacked, parallel);
  std::vector<int64_t> sizes{source.out_features, packer.row_bytes()};
  if (stacked) sizes.insert(sizes.begin(), source.matrices);
  Tensor packed = torch::stable::new_empty(like, sizes, ScalarType::Byte);
  packer.write(static_cast<uint8_t*>(packed.mutable_data_ptr()), parallel);
  return packed;
}

}  // namespace

Tensor pack_cpu(const Tensor& weight, int64_t layout, const std::vector<int64_t>& shape, int64_t threads) {
  check_cpu("weight", weight);
  check_dtype("weight", weight, ScalarType::BFloat16);
  const std::vector<int64_t> sizes = shape_of(weight);
  if (sizes.size() != 2 && sizes.size() != 3)
    fail("weight: ", sizes.size(), " dimensions, expected 2 ([N, K]) or 3 ([E, N, K])");
  if (weight.numel() == 0) fail("weight: has no elements, expected at least one");
  const bool stacked = sizes.size() == 3;
  const int64_t matrices = stacked ? sizes[0] : 1, out_features = sizes[sizes.size() - 2], in_features = sizes.back();
  check_shape(shape, out_features, in_features);
  const Tensor values = dense(weight);
  const auto source =
      weights_in_memory(static_cast<const uint16_t*>(values.const_data_ptr()), matrices, out_features, in_features);
  return pack_rows(*source, layout, shape, stacked, threads, weight);
}

Tensor transcode_cpu(const Tensor& packed_w, int64_t layout, int64_t threads) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  if (packed.matrices == 0) fail("packed_w: no matrices, expected at least one");
  const Header first = packed.open(0, "in_features", -1).header;
  for (int64_t m = 1; m < packed.matrices; m++) {
    const uint64_t in_features = packed.open(m, "in_features", -1).header.in_features;
    if (in_features != first.in_features)
      fail("packed_w: matrix ", m, " has in_features ", in_features, ", expected ", first.in_features,
           " as matrix 0 has");
  }
  const std::vector<int64_t> shape(first.shape, first.shape + first.rank);
  const auto source = packed_weights(packed.bytes, packed.matrix_bytes(), packed.matrices);
  return pack_rows(*source, layout, shape, packed.stacked, threads, packed_w);
}

std::vector<int64_t> resized_shape(const Tensor& packed_w, const PackedArgument& packed, int64_t row_bytes,
                                   const std::function<Header(int64_t)>& header) {
  const int64_t rows = packed.out_features, most = INT64_MAX / rows / std::max<int64_t>(1, packed.matrices);
  if (row_bytes < 1 || row_bytes > most) fail("row_bytes: ", row_bytes, ", expected 1 to ", most);
  const uint64_t bytes = static_cast<uint64_t>(rows * row_bytes);
  for (int64_t m = 0; m < packed.matrices; m++) {
    const uint64_t used = header(m).used_bytes;
    if (bytes < used) fail("row_bytes: ", row_bytes, ", expected at least ", (used + rows - 1) / rows);
  }
  if (packed.stacked && bytes % 128)
    fail("row_bytes: ", row_bytes, ", expected ", rows, " rows of it to be a multiple of 128 bytes");
  std::vector<int64_t> sizes = shape_of(packed_w);
  sizes.back() = row_bytes;
  return sizes;
}

// What unweight_ext/packed.py names, in its order.
Tensor description_of(const Packed& packed, int64_t row_bytes) {
  const Header& h = packed.header;
  int64_t symbols = 0;
  if (h.longest_code > 0) {
    const size_t available = static_cast<size_t>(h.index_offset) - kHeaderBytes;
    symbols = static_cast<int64_t>(read_code(packed.bytes + kHeaderBytes, available, h.longest_code).pairs.size());
  }
  std::vector<int64_t> numbers{static_cast<int64_t>(h.layout),
                               static_cast<int64_t>(h.out_features),
                               static_cast<int64_t>(h.in_features),
                               static_cast<int64_t>(h.used_bytes),
                               row_bytes,
                               static_cast<int64_t>(h.patches),
                               symbols,
                               h.nibble_base,
                               h.segment_stages,
                               static_cast<int64_t>(h.data_offset),
                               h.rank};
  numbers.insert(numbers.end(), h.shape, h.shape + kMaxRank);
  const std::vector<int64_t> sizes{static_cast<int64_t>(numbers.size())};
  Tensor description = torch::stable::empty(sizes, ScalarType::Long);
  std::copy(numbers.begin(), numbers.end(), static_cast<int64_t*>(description.mutable_data_ptr()));
  return description;
}

void check_in_features(int64_t in_features) {
  if (in_features < 1) fail("in_features: ", in_features, ", expected at least 1");
}

void check_unpacked_dtype(ScalarType dtype) {
  if (dtype != ScalarType::BFloat16) fail("dtype: ", dtype_name(dtype), ", expected torch.bfloat16");
}

namespace {

Tensor resize_cpu(const Tensor& packed_w, int64_t row_bytes) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  const std::vector<int64_t> sizes = resized_shape(
      packed_w, packed, row_bytes, [&packed](int64_t m) { return packed.open(m, "in_features", -1).header; });
  const uint64_t bytes = static_cast<uint64_t>(packed.out_features * row_bytes);
  Tensor resized = torch::stable::new_empty(packed_w, sizes, ScalarType::Byte);
  auto* out = static_cast<uint8_t*>(resized.mutable_data_ptr());
  const Parallel parallel = torch_threads();
  for (int64_t m = 0; m < packed.matrices; m++)
    resize(packed.matrix(m), std::min<size_t>(packed.matrix_bytes(), bytes), out + m * bytes, bytes, parallel);
  return resized;
}

void verify_cpu(const Tensor& packed_w) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  const Parallel parallel = torch_threads();
  for (int64_t m = 0; m < packed.matrices; m++) {
    packed.open(m, "in_features", -1);
    verify(packed.matrix(m), packed.matrix_bytes(), parallel);
  }
}

// Of the first matrix if there are several.
Tensor describe_cpu(const Tensor& packed_w) {
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  if (packed.matrices == 0) fail("packed_w: no matrices, expected at least one");
  return description_of(packed.open(0, "in_features", -1), packed.row_bytes);
}

int64_t least_bytes_of(int64_t layout, int64_t out_features, int64_t in_features) {
  if (out_features < 1 || in_features < 1)
    fail("out_features, in_features: ", out_features, ", ", in_features, ", expected at least 1");
  const uint64_t bytes = least_bytes(check_layout(layout), out_features, in_features);
  return bytes > INT64_MAX ? INT64_MAX : static_cast<int64_t>(bytes);
}

int64_t cpu_capability(int64_t level) {
  if (level < -1 || level > static_cast<int64_t>(Capability::kAvx512))
    fail("level: ", level, ", expected -1 (asks), 0 (portable) or 1 (AVX-512)");
  if (level >= 0) set_capability(static_cast<Capability>(level));
  return static_cast<int64_t>(capability());
}

Tensor unpack_with(const Tensor& packed_w, int64_t in_features, int64_t threads) {
  check_in_features(in_features);
  const PackedArgument packed = check_packed(packed_w, /*stacked_allowed=*/true);
  // Before anything of their size is allocated.
  for (int64_t m = 0; m < packed.matrices; m++) packed.open(m, "in_features", in_features);

  std::vector<int64_t> sizes = shape_of(packed_w);
  sizes.back() = in_features;
  Tensor weight = torch::stable::new_empty(packed_w, sizes, ScalarType::BFloat16);
  auto* out = static_cast<uint16_t*>(weight.mutable_data_ptr());
  const Parallel parallel = torch_threads(threads);
  for (int64_t m = 0; m < packed.matrices; m++)
    unpack(packed.matrix(m), packed.matrix_bytes(), out + m * packed.out_features * in_features, parallel);
  return weight;
}

}  // namespace

Tensor unpack_cpu(const Tensor& packed_w, int64_t in_features, ScalarType dtype) {
  check_unpacked_dtype(dtype);
  return unpack_with(packed_w, in_features, 0);
}

STABLE_TORCH_LIBRARY_IMPL(unweight, CPU, m) {
  m.impl("_pack", TORCH_BOX(&pack_cpu));
  m.impl("_transcode", TORCH_BOX(&transcode_cpu));
  m.impl("unpack", TORCH_BOX(&unpack_cpu));
  m.impl("_unpack", TORCH_BOX(&unpack_with));
  m.impl("_resize", TORCH_BOX(&resize_cpu));
  m.impl("_verify", TORCH_BOX(&verify_cpu));
  m.impl("_describe", TORCH_BOX(&describe_cpu));
}

// They have no tensor to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(unweight, CompositeExplicitAutograd, m) {
  m.impl("_cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("_least_bytes", TORCH_BOX(&least_bytes_of));
}

}  // namespace unweight
