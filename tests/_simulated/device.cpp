// In place of csrc/torch/cuda_device.cpp and cuda_place.cpp: a GPU whose memory and kernels are Python's
// (tests/simulated_gpu.py), for tensors on the CPU. So the operators for CUDA tensors run where there is no GPU.
#include <algorithm>
#include <random>
#include <vector>

#include "../../csrc/cuda/support.h"
#include "../../csrc/format/error.h"
#include "../../csrc/torch/cuda_arguments.h"
#include "../../csrc/torch/cuda_device.h"

namespace unweight {
namespace {

struct Callbacks {
  const char* (*error)();  // of the call before, or null
  int (*captures)();
  int (*multiprocessors)();
  int (*capability)();  // 86: 8.6
  uint64_t (*allocate)(uint64_t bytes, const char* name);
  void (*clear)(uint64_t where, uint64_t bytes);
  void (*upload)(uint64_t to, const void* from, uint64_t bytes);
  void (*download)(void* to, uint64_t from, uint64_t bytes);
  void (*copy)(uint64_t to, uint64_t from, uint64_t bytes);
  void (*launch)(const char* kernel, uint32_t grid, uint32_t block, uint32_t shared_bytes, const void* argument,
                 uint64_t argument_bytes, int programmatic);
  uint64_t (*tensor)(void* data, uint64_t bytes);  // a copy on the device
  void (*finish)();                                // copies of tensors go back to the host, and are forgotten
};
Callbacks python{};
std::vector<Tensor> copied;  // kept until their copies went back

void check() {
  if (const char* error = python.error()) fail(error);
}

constexpr cuda::Versions kVersions{13000, 13000};

cuda::Gpu gpu() {
  const int capability = python.capability();
  return {0, capability / 10, capability % 10};
}

template <class Result>
Result checked(Result result) {
  check();
  return result;
}

class SimulatedDevice final : public TorchDevice {
 public:
  ~SimulatedDevice() override {
    python.finish();
    copied.clear();
  }
  std::string name() const override { return "Simulated GPU"; }
  void release() override {}
  bool captures() const override { return python.captures(); }
  int multiprocessors() const override { return python.multiprocessors(); }
  DeviceAddress allocate(size_t bytes, const char* name) override { return checked(python.allocate(bytes, name)); }
  DeviceAddress allocate_any(size_t bytes, const char* name) override {
    const DeviceAddress address = allocate(bytes, name);
    std::vector<uint32_t> noise(bytes / 4 + 1);
    std::generate(noise.begin(), noise.end(), std::mt19937(static_cast<uint32_t>(bytes)));
    upload(address, noise.data(), bytes);
    return address;
  }
  void clear(DeviceAddress where, size_t bytes) override {
    python.clear(where, bytes);
    check();
  }
  void upload(DeviceAddress to, const void* from, size_t bytes) override {
    python.upload(to, from, bytes);
    check();
  }
  void download(void* to, DeviceAddress from, size_t bytes) override {
    python.download(to, from, bytes);
    check();
  }
  void copy(DeviceAddress to, DeviceAddress from, size_t bytes) override {
    python.copy(to, from, bytes);
    check();
  }
  void launch(const LaunchPlan& plan) override {
    python.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, plan.argument.data(), plan.argument.size(),
                  plan.programmatic);
    check();
  }
};

}  // namespace

void check_cuda_device(int64_t) {
  if (!python.launch) fail("CUDA: unweight_simulate wasn't called");
  cuda::check_gpu(gpu(), kVersions);
}

void check_fused_device(int64_t) { cuda::check_fused_gpu(gpu(), kVersions); }

std::unique_ptr<TorchDevice> cuda_device(const Tensor&) {
  check_cuda_device(0);
  return std::make_unique<SimulatedDevice>();
}

void check_cuda(const char*, const Tensor&) {}
void check_same_device(const char*, const Tensor&, const Tensor&) {}

DeviceAddress address_of(const Tensor& tensor) {
  copied.push_back(tensor);
  int64_t elements = 1;  // from the first to the last, with gaps
  for (int64_t d = 0; d < tensor.dim(); d++) elements += (tensor.size(d) - 1) * tensor.stride(d);
  const auto bytes = tensor.numel() ? static_cast<uint64_t>(elements) * tensor.element_size() : 0;
  return checked(python.tensor(const_cast<void*>(tensor.const_data_ptr()), bytes));
}

}  // namespace unweight

extern "C" __attribute__((visibility("default"))) void unweight_simulate(const void* callbacks);
void unweight_simulate(const void* callbacks) {
  unweight::python = *static_cast<const unweight::Callbacks*>(callbacks);
}
