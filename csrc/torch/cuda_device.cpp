#include "cuda_device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <mutex>
#include <vector>

#include "../cuda/support.h"
#include "../format/error.h"
#include "cuda_kernels.h"

namespace unweight {
namespace {

constexpr uint32_t kSharedBytesWithoutAsking = 49152;  // more has to be allowed per kernel

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail("CUDA: ", what, ": ", cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, index), "a device attribute");
  return value;
}

cuda::Versions versions() {
  cuda::Versions found{0, CUDART_VERSION};
  check(cudaDriverGetVersion(&found.driver), "the driver's version");
  return found;
}

cuda::Gpu find_gpu(int64_t index) {
  cuda::check_driver(versions());
  int count = 0;
  check(cudaGetDeviceCount(&count), "the number of GPUs");
  if (index < 0 || index >= count) fail("device: cuda:", index, ", expected one of ", count, " GPUs");
  const int device = static_cast<int>(index);
  return {index, attribute(cudaDevAttrComputeCapabilityMajor, device),
          attribute(cudaDevAttrComputeCapabilityMinor, device)};
}

using CurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

// In libtorch_cuda.so alone, which a CPU-only torch lacks: looked up when it is there, never linked.
CurrentStream find_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* function = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (!function) fail("CUDA: this torch was built without CUDA, expected one that has libtorch_cuda.so");
  return reinterpret_cast<CurrentStream>(function);
}

cudaStream_t current_stream(int index) {
  static const CurrentStream current = find_current_stream();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(current(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Before it, a driver's graphs can't hold a launch that starts while the one in front of it is still running.
constexpr int kGraphsWithEarlyStarts = 12030;

class CudaDevice final : public TorchDevice {
 public:
  explicit CudaDevice(const Tensor& like)
      : like_(like), index_(like.get_device_index()), guard_(index_), stream_(current_stream(index_)) {}

  bool captures() const override {
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream_, &status), "the stream's state");
    return status != cudaStreamCaptureStatusNone;
  }

  std::string name() const override {
    static std::mutex lock;
    static std::map<int, std::string> names;  // of devices, which keep theirs; asking takes long
    const std::lock_guard<std::mutex> guard(lock);
    std::string& known = names[index_];
    if (known.empty()) {
      cudaDeviceProp properties;
      check(cudaGetDeviceProperties(&properties, index_), "the device's name");
      known = properties.name;
    }
    return known;
  }

  int multiprocessors() const override { return attribute(cudaDevAttrMultiProcessorCount, index_); }

  DeviceAddress allocate(size_t bytes, const char*) override {
    const std::vector<int64_t> sizes{static_cast<int64_t>(bytes)};
    // Freed when the work on them is queued: the allocator hands them out again on this stream alone.
    scratch_.push_back(torch::stable::new_empty(like_, sizes, ScalarType::Byte));
    return reinterpret_cast<DeviceAddress>(scratch_.back().mutable_data_ptr());
  }

  void release() override { scratch_.clear(); }

  void clear(DeviceAddress where, size_t bytes) override {
    if (bytes) check(cudaMemsetAsync(pointer(where), 0, bytes, stream_), "clearing memory");
  }

  void upload(DeviceAddress to, const void* from, size_t bytes) override {
    // A graph would read `from` again when it is replayed.
    if (captures()) fail("CUDA: data can't be copied to the device while its stream is captured into a graph");
    if (bytes)
      check(cudaMemcpyAsync(pointer(to), from, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
    // Where the GPU reads the host's page tables (GH200), nothing is staged: it may not have read `from` yet.
    check(cudaStreamSynchronize(stream_), "waiting for the device");
  }

  void download(void* to, DeviceAddress from, size_t bytes) override {
    if (captures()) fail("CUDA: data can't be read back while the stream is captured into a graph");
    if (bytes)
      check(cudaMemcpyAsync(to, pointer(from), bytes, cudaMemcpyDeviceToHost, stream_), "copying from the device");
    check(cudaStreamSynchronize(stream_), "waiting for the device");
  }

  void copy(DeviceAddress to, DeviceAddress from, size_t bytes) override {
    if (bytes)
      check(cudaMemcpyAsync(pointer(to), pointer(from), bytes, cudaMemcpyDeviceToDevice, stream_),
            "copying on the device");
  }

  void launch(const LaunchPlan& plan) override {
    Kernel& kernel = find_kernel(plan.kernel);
    if (plan.shared_bytes > kSharedBytesWithoutAsking) allow_shared(kernel, plan.shared_bytes);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.grid);
    config.blockDim = dim3(plan.block);
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream_;
    config.attrs = &early;
    static const int driver = versions().driver;
    config.numAttrs = plan.programmatic && (driver >= kGraphsWithEarlyStarts || !captures()) ? 1 : 0;
    void* arguments[] = {const_cast<uint8_t*>(plan.argument.data())};
    check(cudaLaunchKernelExC(&config, kernel.function, arguments), plan.kernel);
  }

 private:
  // Remembered per device, since asking takes as long as a launch. Threads that come here together ask twice.
  void allow_shared(Kernel& kernel, uint32_t bytes) const {
    std::atomic<uint32_t>* allowed = index_ < kRememberedDevices ? &kernel.allowed_shared[index_] : nullptr;
    if (allowed && allowed->load(std::memory_order_relaxed) >= bytes) return;
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          kernel.name);
    if (allowed) allowed->store(bytes, std::memory_order_relaxed);
  }

  static void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }

  const Tensor like_;
  const int index_;
  const torch::stable::accelerator::DeviceGuard guard_;
  const cudaStream_t stream_;
  std::vector<Tensor> scratch_;
};

}  // namespace

void check_cuda_device(int64_t index) { cuda::check_gpu(find_gpu(index), versions()); }

void check_fused_device(int64_t index) { cuda::check_fused_gpu(find_gpu(index), versions()); }

std::unique_ptr<TorchDevice> cuda_device(const Tensor& like) {
  check_cuda_device(like.get_device_index());
  return std::make_unique<CudaDevice>(like);
}

}  // namespace unweight
