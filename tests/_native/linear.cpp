// The driver of the fused product, on a device that Python implements.
#include "../../csrc/cuda/linear/linear.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "module.h"
#include "python_device.h"

namespace unweight {

void bind_linear(pybind11::module_& m) {
  namespace py = pybind11;
  using cuda::LinearCall;
  using cuda::LinearConfig;
  using cuda::LinearWeight;
  m.attr("invariant_tokens") = cuda::kInvariantTokens;
  py::class_<LinearConfig>(m, "LinearConfig")
      .def(py::init([](int tokens, int warpgroups) { return LinearConfig{tokens, warpgroups}; }))
      .def_readonly("tokens", &LinearConfig::tokens)
      .def_readonly("warpgroups", &LinearConfig::warpgroups);
  py::class_<LinearWeight>(m, "LinearWeight")
      .def(py::init([](const cuda::PackedMatrices& packed, DeviceAddress bias, DeviceAddress y, uint64_t y_stride) {
        return LinearWeight{packed, bias, y, y_stride};
      }));
  py::class_<LinearCall>(m, "LinearCall")
      .def(py::init([](std::vector<LinearWeight> weights, uint64_t tokens, DeviceAddress x, uint64_t x_stride,
                       DeviceAddress offsets, bool float_output, DeviceAddress next, uint64_t next_bytes) {
             return LinearCall{std::move(weights), tokens, x, x_stride, offsets, float_output, next, next_bytes};
           }),
           py::arg("weights"), py::arg("tokens"), py::arg("x"), py::arg("x_stride"), py::arg("offsets"),
           py::arg("float_output"), py::arg("next") = 0, py::arg("next_bytes") = 0);
  m.def("linear", [](py::object object, const LinearCall& call, const LinearConfig& config) {
    PythonDevice device(std::move(object));
    cuda::linear(device, call, config);
  });
  py::class_<cuda::LinearCut>(m, "LinearCut")
      .def_readonly("ctas", &cuda::LinearCut::ctas)
      .def_readonly("chunks", &cuda::LinearCut::chunks)
      .def_readonly("tile_sheets", &cuda::LinearCut::tile_sheets);
  m.def("cut_linear", &cuda::cut_linear);
  m.def("partial_bytes", &cuda::partial_bytes);
  m.def("flag_bytes", &cuda::flag_bytes);
  m.def("plan_linear", &cuda::plan_linear);
  // Of a layout's ring.
  m.def("linear_slots", [](int layout, int tokens, int warpgroups) {
    const bool nibble = layout == static_cast<int>(Layout::kNibble),
               table = layout == static_cast<int>(Layout::kHuffman);
    return cuda::linear_shared(tokens, warpgroups, !nibble, table).slots;
  });
}

}  // namespace unweight
