// What the drivers of the kernels need of a GPU. The CUDA runtime is one implementation, the PTX interpreter of the
// tests another: both run the same drivers and the same plans. Torch-free, CUDA-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "arguments.h"

namespace unweight {

// One launch. Kernels are extern "C" and take exactly one struct by value (__grid_constant__).
struct LaunchPlan {
  const char* kernel;
  uint32_t grid, block;           // along x; nothing here needs y and z
  uint32_t shared_bytes;          // dynamic shared memory
  std::vector<uint8_t> argument;  // the struct's bytes
  // May start before the launch in front of it has ended: before the kernel says `griddepcontrol.wait`, it reads memory
  // at most to find out what to prefetch, and writes nothing.
  bool programmatic = false;
};

template <class Argument>
LaunchPlan make_plan(const char* kernel, uint32_t grid, uint32_t block, uint32_t shared_bytes, const Argument& argument,
                     bool programmatic = false) {
  static_assert(std::is_trivially_copyable<Argument>::value, "the device gets these very bytes");
  std::vector<uint8_t> bytes(sizeof argument);
  std::memcpy(bytes.data(), &argument, sizeof argument);
  return {kernel, grid, block, shared_bytes, bytes, programmatic};
}

// All operations are ordered, as on one stream. Failures throw Error.
class Device {
 public:
  virtual ~Device() = default;
  virtual int multiprocessors() const = 0;
  // Scratch of at least 256-byte alignment and unknown content. Lives as long as the Device; `name` is for reports.
  virtual DeviceAddress allocate(size_t bytes, const char* name) = 0;
  // The same, for who reads it before writing it. (The tests' devices keep an eye on other scratch.)
  virtual DeviceAddress allocate_any(size_t bytes, const char* name) { return allocate(bytes, name); }
  virtual void clear(DeviceAddress where, size_t bytes) = 0;                  // to zero
  virtual void upload(DeviceAddress to, const void* from, size_t bytes) = 0;  // `from` is the caller's again
  virtual void download(void* to, DeviceAddress from, size_t bytes) = 0;      // waits for everything before it
  virtual void launch(const LaunchPlan& plan) = 0;
};

}  // namespace unweight
