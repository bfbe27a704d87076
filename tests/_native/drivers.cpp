// The drivers of the kernels, on a device that Python implements.
#include <cstdint>
#include <string>
#include <vector>

#include "module.h"
#include "python_device.h"

namespace unweight {
namespace {

namespace py = pybind11;

struct ProbeArgument {
  DeviceAddress where;
  uint32_t count;
};

// Every operation of a Device once, for the tests of PythonDevice: returns what lies in fresh memory after all of them.
py::bytes probe_device(py::object object, const std::string& kernel, const py::bytes& data) {
  PythonDevice device(std::move(object));
  const std::string_view bytes = data;
  const DeviceAddress where = device.allocate(2 * bytes.size(), "probe");
  device.clear(where, 2 * bytes.size());
  device.upload(where, bytes.data(), bytes.size());
  const auto grid = static_cast<uint32_t>(device.multiprocessors());
  device.launch(make_plan(kernel.c_str(), grid, 32, 1024, ProbeArgument{where, static_cast<uint32_t>(bytes.size())}));
  std::string result(2 * bytes.size(), '?');
  device.download(result.data(), where, result.size());
  return result;
}

}  // namespace

void bind_drivers(py::module_& m) { m.def("probe_device", &probe_device); }

}  // namespace unweight
