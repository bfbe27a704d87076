// The transcoder, on a device that Python implements.
#include "../../csrc/cuda/transcode.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "../../csrc/format/error.h"
#include "module.h"
#include "python_device.h"

namespace unweight {
namespace {

namespace py = pybind11;

// Returns the layout, the row_bytes and the address of the result, which is allocated from the device.
std::tuple<int, int64_t, DeviceAddress> transcode(py::object object, DeviceAddress packed, uint64_t matrix_bytes,
                                                  uint32_t matrices, uint64_t out_features, uint64_t in_features,
                                                  int wanted, bool stacked, uint64_t scratch_bytes) {
  PythonDevice device(std::move(object));
  const cuda::PackedMatrices from{packed, matrix_bytes, out_features, in_features, matrices};
  cuda::Transcoder transcoder(device, from, static_cast<Layout>(wanted), stacked, scratch_bytes);
  const int64_t row_bytes = transcoder.row_bytes();
  const DeviceAddress out = device.allocate(matrices * out_features * row_bytes, "transcoded");
  transcoder.write(out);
  return {static_cast<int>(transcoder.layout()), row_bytes, out};
}

std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>> cut_bands(uint32_t matrices, uint64_t out_features,
                                                                          uint64_t in_features, uint64_t group,
                                                                          uint64_t most) {
  std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint64_t>> bands;
  for (const cuda::BandRows& b : cuda::cut_bands(matrices, out_features, in_features, group, most))
    bands.emplace_back(b.matrix, b.matrices, b.rows.first, b.rows.count);
  return bands;
}

// Counts at [first + 256 * second] of the pairs in [rows, in_features] weights on the device.
std::vector<uint64_t> count_pairs(py::object object, DeviceAddress weights, uint64_t rows, uint64_t in_features,
                                  bool complete_halves) {
  PythonDevice device(std::move(object));
  std::vector<uint64_t> counts(65536);
  const DeviceAddress on_device = device.allocate(8 * counts.size(), "counts");
  device.clear(on_device, 8 * counts.size());
  const cuda::CountArgument argument{weights, rows, in_features, on_device, complete_halves};
  device.launch(cuda::plan_count(argument, device.multiprocessors()));
  device.download(counts.data(), on_device, 8 * counts.size());
  return counts;
}

}  // namespace

void bind_transcode(py::module_& m) {
  m.def("transcode", &transcode);
  m.def("cut_bands", &cut_bands);
  m.def("count_pairs", &count_pairs);
}

}  // namespace unweight
