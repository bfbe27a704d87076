// The drivers of the kernels, on a device that Python implements.
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "../../csrc/cuda/head.h"
#include "../../csrc/cuda/plan.h"
#include "../../csrc/cuda/results.h"
#include "../../csrc/cuda/status.h"
#include "../../csrc/cuda/support.h"
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

// Drivers get the device as the object it is in Python: `run(device, …)`.
template <class... Arguments>
auto on_python(void (*driver)(Device&, Arguments...)) {
  return [driver](py::object object, Arguments... arguments) {
    PythonDevice device(std::move(object));
    driver(device, arguments...);
  };
}

void bind_types(py::module_& m) {
  using cuda::PackedMatrices;
  py::class_<LaunchPlan>(m, "LaunchPlan")
      .def_property_readonly("kernel", [](const LaunchPlan& plan) { return plan.kernel; })
      .def_readonly("grid", &LaunchPlan::grid)
      .def_readonly("block", &LaunchPlan::block)
      .def_readonly("shared_bytes", &LaunchPlan::shared_bytes)
      .def_readonly("programmatic", &LaunchPlan::programmatic)
      .def_property_readonly("argument", [](const LaunchPlan& plan) {
        return py::bytes(reinterpret_cast<const char*>(plan.argument.data()), plan.argument.size());
      });
  py::class_<PackedMatrices>(m, "PackedMatrices")
      .def(py::init([](DeviceAddress address, uint64_t matrix_bytes, uint64_t out_features, uint64_t in_features,
                       uint32_t matrices, int layout) {
             return PackedMatrices{address, matrix_bytes, out_features, in_features, matrices, layout};
           }),
           py::arg("address"), py::arg("matrix_bytes"), py::arg("out_features"), py::arg("in_features"),
           py::arg("matrices") = 1, py::arg("layout") = cuda::kAnyLayout)
      .def_readonly("address", &PackedMatrices::address)
      .def_readonly("matrix_bytes", &PackedMatrices::matrix_bytes)
      .def_readonly("matrices", &PackedMatrices::matrices)
      .def("matrix", &PackedMatrices::matrix);
  py::class_<cuda::RowRange>(m, "RowRange").def(py::init([](uint64_t first, uint64_t count) {
    return cuda::RowRange{first, count};
  }));
}

}  // namespace

void bind_drivers(py::module_& m) {
  bind_types(m);
  m.def("probe_device", &probe_device);
  m.def("unpack", on_python(&cuda::unpack));
  m.def("verify", on_python(&cuda::verify));
  m.def("embedding", on_python(&cuda::embedding));
  m.def("verify_headers", on_python(&cuda::verify_headers));
  m.def("unpack_rows", on_python(&cuda::unpack_rows));
  m.def("compare_checksums", on_python(&cuda::compare_checksums));
  m.def("raise_damage", on_python(&cuda::raise_damage));
  m.def("group_rows", &cuda::group_rows);
  m.def("sums_bytes", &cuda::sums_bytes);
  m.def("plan_unpack", &cuda::plan_unpack);
  m.def("plan_verify_headers", &cuda::plan_verify_headers);
  m.def("plan_compare_checksums", &cuda::plan_compare_checksums);
  m.def("plan_embedding", &cuda::plan_embedding);
  m.def("poison", on_python(&cuda::poison));
  m.def("check_driver", [](int driver, int build) { cuda::check_driver({driver, build}); });
  m.def("check_gpu", [](int index, int major, int minor, int driver, int build) {
    cuda::check_gpu({index, major, minor}, {driver, build});
  });
  m.def("check_fused_gpu", [](int index, int major, int minor, int driver, int build) {
    cuda::check_fused_gpu({index, major, minor}, {driver, build});
  });
  // (layout, in_features, used_bytes) of a matrix's header.
  m.def("read_head", [](py::object object, DeviceAddress matrix, uint64_t size) {
    PythonDevice device(std::move(object));
    const cuda::Head head(device, matrix, size);
    const Header& h = head.header();
    return py::make_tuple(static_cast<int>(h.layout), h.in_features, h.used_bytes);
  });
  // (flaw, matrix, place) of a status word; flaw counts the lines of the enum.
  m.def("read_status", [](uint64_t word) {
    const cuda::Damage damage = cuda::read_status(word);
    return py::make_tuple(static_cast<uint32_t>(damage.flaw), damage.matrix, damage.place);
  });
}

}  // namespace unweight
