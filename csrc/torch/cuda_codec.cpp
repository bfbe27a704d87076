// The codec's operators on a GPU: between tensors and the drivers of the kernels.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../cuda/head.h"
#include "../cuda/transcode.h"
#include "../format/error.h"
#include "codec.h"
#include "cuda_arguments.h"
#include "cuda_device.h"

namespace unweight {

Tensor to_cpu(const Tensor& tensor) {
  return torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

namespace {

// For operators that read back what they found.
std::unique_ptr<TorchDevice> waiting_device(const Tensor& packed_w, const char* name) {
  auto device = cuda_device(packed_w);
  if (device->captures())
    fail("packed_w: ", name,
         " waits for the GPU, which a stream that is being captured into a graph can't do: call it "
         "before the capture");
  return device;
}

cuda::Head head_of(Device& device, const CudaPacked& packed, int64_t m) {
  const size_t bytes = packed.argument.matrix_bytes();
  return {device, address_of(packed.tensor) + static_cast<size_t>(m) * bytes, bytes};
}

DeviceAddress fresh_status(Device& device) {
  const DeviceAddress status = device.allocate(sizeof(uint64_t), "status");
  device.clear(status, sizeof(uint64_t));
  return status;
}

// Packing is done once, where a model is made: on the CPU.
Tensor pack_cuda(const Tensor& weight, int64_t layout, const std::vector<int64_t>& shape, int64_t threads) {
  check_cuda("weight", weight);
  return torch::stable::to(pack_cpu(to_cpu(weight), layout, shape, threads), weight.device());
}

// `threads` are the CPU's, which is asked only for archives: GPUs read them, and write what they multiply with.
Tensor transcode_cuda(const Tensor& packed_w, int64_t layout, int64_t threads) {
  const Layout wanted = check_layout(layout);
  if (wanted == Layout::kArchive) {
    check_cuda("packed_w", packed_w);
    return torch::stable::to(transcode_cpu(to_cpu(packed_w), layout, threads), packed_w.device());
  }
  const CudaPacked packed(packed_w, /*stacked_allowed=*/true);
  if (packed.argument.matrices == 0) fail("packed_w: no matrices, expected at least one");
  const auto device = waiting_device(packed_w, "_transcode");
  const uint64_t in_features = head_of(*device, packed, 0).header().in_features;
  cuda::Transcoder transcoder(*device, packed.matrices(static_cast<int64_t>(in_features)), wanted,
                              packed.argument.stacked);
  std::vector<int64_t> sizes = shape_of(packed_w);
  sizes.back() = transcoder.row_bytes();
  const Tensor transcoded = torch::stable::new_empty(packed_w, sizes, ScalarType::Byte);
  transcoder.write(address_of(transcoded));
  return transcoded;
}

// `threads` are the CPU's.
Tensor unpack_with_cuda(const Tensor& packed_w, int64_t in_features, int64_t) {
  return unpack_cuda(packed_w, in_features, ScalarType::BFloat16, cuda::kAnyLayout);
}

Tensor unpack_any_cuda(const Tensor& packed_w, int64_t in_features, ScalarType dtype) {
  return unpack_cuda(packed_w, in_features, dtype, cuda::kAnyLayout);
}

void verify_cuda(const Tensor& packed_w) {
  const CudaPacked packed(packed_w, /*stacked_allowed=*/true);
  if (packed.argument.matrices == 0) return;
  const auto device = waiting_device(packed_w, "_verify");
  const uint64_t in_features = head_of(*device, packed, 0).header().in_features;
  const cuda::PackedMatrices matrices = packed.matrices(static_cast<int64_t>(in_features));
  const DeviceAddress status = fresh_status(*device);
  cuda::verify(*device, matrices, status);
  cuda::raise_damage(*device, matrices, status);
}

// A device copy, with zeros after it or its zeros cut off.
Tensor resize_cuda(const Tensor& packed_w, int64_t row_bytes) {
  const CudaPacked packed(packed_w, /*stacked_allowed=*/true);
  const auto device = waiting_device(packed_w, "_resize");
  const auto header = [&](int64_t m) {
    const cuda::Head head = head_of(*device, packed, m);
    packed.argument.check_out_features(head.header());
    return head.header();
  };
  const std::vector<int64_t> sizes = resized_shape(packed_w, packed.argument, row_bytes, header);
  const Tensor resized = torch::stable::new_empty(packed_w, sizes, ScalarType::Byte);
  const size_t old_bytes = packed.argument.matrix_bytes();
  const size_t bytes = static_cast<size_t>(packed.argument.out_features * row_bytes), kept = std::min(old_bytes, bytes);
  for (int64_t m = 0; m < packed.argument.matrices; m++) {
    const DeviceAddress out = address_of(resized) + static_cast<size_t>(m) * bytes;
    device->copy(out, address_of(packed.tensor) + static_cast<size_t>(m) * old_bytes, kept);
    device->clear(out + kept, bytes - kept);
  }
  return resized;
}

Tensor describe_cuda(const Tensor& packed_w) {
  const CudaPacked packed(packed_w, /*stacked_allowed=*/true);
  if (packed.argument.matrices == 0) fail("packed_w: no matrices, expected at least one");
  const auto device = waiting_device(packed_w, "_describe");
  const cuda::Head head = head_of(*device, packed, 0);
  packed.argument.check_out_features(head.header());
  return description_of(head.packed(), packed.argument.row_bytes);
}

}  // namespace

Tensor unpack_cuda(const Tensor& packed_w, int64_t in_features, ScalarType dtype, int layout) {
  check_unpacked_dtype(dtype);
  check_in_features(in_features);
  const CudaPacked packed(packed_w, /*stacked_allowed=*/true);
  const auto device = waiting_device(packed_w, "unpack");
  packed.check_columns("in_features", in_features);
  std::vector<int64_t> sizes = shape_of(packed_w);
  sizes.back() = in_features;
  const Tensor weight = torch::stable::new_empty(packed_w, sizes, ScalarType::BFloat16);
  if (packed.argument.matrices == 0) return weight;
  cuda::PackedMatrices matrices = packed.matrices(in_features);
  matrices.layout = layout;
  const DeviceAddress status = fresh_status(*device);
  cuda::unpack(*device, matrices, address_of(weight), status);
  cuda::raise_damage(*device, matrices, status);
  return weight;
}

STABLE_TORCH_LIBRARY_IMPL(unweight, CUDA, m) {
  m.impl("_pack", TORCH_BOX(&pack_cuda));
  m.impl("_transcode", TORCH_BOX(&transcode_cuda));
  m.impl("unpack", TORCH_BOX(&unpack_any_cuda));
  m.impl("_unpack", TORCH_BOX(&unpack_with_cuda));
  m.impl("_resize", TORCH_BOX(&resize_cuda));
  m.impl("_verify", TORCH_BOX(&verify_cuda));
  m.impl("_describe", TORCH_BOX(&describe_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(unweight, CompositeExplicitAutograd, m) {
  m.impl("_check_cuda", TORCH_BOX(&check_cuda_device));
  m.impl("_check_fused", TORCH_BOX(&check_fused_device));
}

}  // namespace unweight
