// Which instance of the fused product a call runs, and the configurations that there are.
#include "../../csrc/cuda/linear/choice.h"

#include <pybind11/stl.h>

#include <tuple>

#include "module.h"

namespace unweight {
namespace {

namespace py = pybind11;

// (layout, out_features, in_features, bucket, config or -1)
using Entry = std::tuple<int, uint64_t, uint64_t, uint64_t, int>;

void set_tuned(const std::string& gpu, const std::vector<Entry>& entries) {
  std::vector<cuda::TunedEntry> table;
  for (const auto& [layout, n, k, tokens, config] : entries) table.push_back({layout, n, k, tokens, config});
  cuda::set_tuned(gpu, table);
}

std::vector<Entry> tuned(const std::string& gpu) {
  std::vector<Entry> entries;
  for (const cuda::TunedEntry& e : cuda::tuned(gpu))
    entries.emplace_back(e.layout, e.out_features, e.in_features, e.tokens, e.config_index);
  return entries;
}

}  // namespace

void bind_choice(py::module_& m) {
  // The instance's number, -1 for scratch.
  m.def(
      "choose",
      [](int layout, uint64_t n, uint64_t k, uint64_t tokens, int multiprocessors, const std::string& gpu) {
        return cuda::choose(layout, n, k, tokens, multiprocessors, gpu).config_index;
      },
      py::arg("layout"), py::arg("out_features"), py::arg("in_features"), py::arg("tokens"),
      py::arg("multiprocessors") = 132, py::arg("gpu") = "");
  m.def("token_bucket", &cuda::token_bucket);
  m.def("set_tuned", &set_tuned);
  m.def("tuned", &tuned);
  // (tokens, warpgroups) of each instance.
  m.def("linear_configs", [] {
    std::vector<std::pair<int, int>> all;
    for (const cuda::LinearConfig& config : cuda::kLinearConfigs) all.emplace_back(config.tokens, config.warpgroups);
    return all;
  });
}

}  // namespace unweight
