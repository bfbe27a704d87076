// A Device that a Python object implements, so that the drivers of the kernels run on the tests' PTX interpreter.
#pragma once
#include <pybind11/pybind11.h>

#include "../../csrc/cuda/device.h"
#include "../../csrc/format/error.h"

namespace unweight {

// The object's methods: multiprocessors() -> int; allocate(nbytes, name) and allocate_any(nbytes, name) -> address;
// clear(address, nbytes); upload(address, bytes); download(address, nbytes) -> bytes; launch(kernel, grid, block,
// shared_bytes, argument, programmatic).
class PythonDevice final : public Device {
 public:
  explicit PythonDevice(pybind11::object object) : object_(std::move(object)) {}

  int multiprocessors() const override { return object_.attr("multiprocessors")().cast<int>(); }

  DeviceAddress allocate(size_t bytes, const char* name) override {
    return object_.attr("allocate")(bytes, name).cast<DeviceAddress>();
  }

  DeviceAddress allocate_any(size_t bytes, const char* name) override {
    return object_.attr("allocate_any")(bytes, name).cast<DeviceAddress>();
  }

  void clear(DeviceAddress where, size_t bytes) override { object_.attr("clear")(where, bytes); }

  void upload(DeviceAddress to, const void* from, size_t bytes) override {
    object_.attr("upload")(to, pybind11::bytes(static_cast<const char*>(from), bytes));
  }

  void download(void* to, DeviceAddress from, size_t bytes) override {
    const auto got = object_.attr("download")(from, bytes).cast<pybind11::bytes>();
    const std::string_view view = got;
    if (view.size() != bytes) fail("download: got ", view.size(), " bytes, expected ", bytes);
    if (bytes) std::memcpy(to, view.data(), bytes);
  }

  void launch(const LaunchPlan& plan) override {
    const pybind11::bytes argument(reinterpret_cast<const char*>(plan.argument.data()), plan.argument.size());
    object_.attr("launch")(plan.kernel, plan.grid, plan.block, plan.shared_bytes, argument, plan.programmatic);
  }

 private:
  pybind11::object object_;
};

}  // namespace unweight
