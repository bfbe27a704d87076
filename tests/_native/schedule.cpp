// How the fused product's work is dealt out.
#include "../../csrc/cuda/linear/schedule.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "module.h"

namespace unweight {
namespace {

struct Part {
  uint32_t weight, tile;
  cuda::GroupWork work;
};

// As a CTA goes about it: late groups last.
std::vector<Part> parts_of(uint32_t chunk, uint32_t chunks, const std::vector<cuda::WorkShape>& shapes,
                           uint32_t tiles) {
  std::vector<Part> parts;
  const auto costs = [&shapes](uint32_t w) { return shapes[w].cost(); };
  const cuda::WorkShare share = cuda::share_of(chunk, chunks, costs, static_cast<uint32_t>(shapes.size()), tiles);
  for (const bool late : {false, true}) {
    for (uint32_t job = share.first_job; job < share.jobs_end(late); job++) {
      const cuda::WorkShape& shape = shapes[job / tiles];
      uint32_t unit, end;
      share.units(job, shape, late, unit, end);
      while (unit < end) parts.push_back({job / tiles, job % tiles, cuda::take_group(shape, unit, end)});
    }
  }
  return parts;
}

// Job and unit with which a chunk begins, and with which it ends.
std::array<std::array<uint32_t, 2>, 2> borders_of(uint32_t chunk, uint32_t chunks,
                                                  const std::vector<cuda::WorkShape>& shapes, uint32_t tiles) {
  const auto costs = [&shapes](uint32_t w) { return shapes[w].cost(); };
  const cuda::WorkShare share = cuda::share_of(chunk, chunks, costs, static_cast<uint32_t>(shapes.size()), tiles);
  const auto unit = [&](uint32_t job, uint32_t stage) {
    return job / tiles < shapes.size() ? shapes[job / tiles].nearest_unit(stage) : 0;
  };
  return {{{share.first_job, unit(share.first_job, share.first_stage)},
           {share.end_job, unit(share.end_job, share.end_stage)}}};
}

}  // namespace

void bind_schedule(pybind11::module_& m) {
  namespace py = pybind11;
  using cuda::GroupWork;
  using cuda::WorkShape;
  py::class_<WorkShape>(m, "WorkShape")
      .def(py::init([](uint32_t blocks, uint32_t stages, uint32_t segment_stages, uint32_t warpgroups) {
        return WorkShape{blocks, stages, segment_stages, warpgroups};
      }))
      .def("cost", &WorkShape::cost)
      .def("segments", &WorkShape::segments)
      .def("stages_of", &WorkShape::stages_of);
  py::class_<Part>(m, "Part")
      .def_readonly("weight", &Part::weight)
      .def_readonly("tile", &Part::tile)
      .def_property_readonly("first_block", [](const Part& p) { return p.work.first_block; })
      .def_property_readonly("width", [](const Part& p) { return p.work.width; })
      .def_property_readonly("units", [](const Part& p) { return py::make_tuple(p.work.begin, p.work.end); })
      .def_property_readonly("rounds",
                             [](const Part& p) { return py::make_tuple(p.work.first_segment(), p.work.end_segment()); })
      .def("segments",
           [](const Part& p, uint32_t block) { return py::make_tuple(p.work.begin_of(block), p.work.end_of(block)); });
  m.def("linear_parts", &parts_of);
  m.def("linear_borders", &borders_of);
  m.def("tile_chunks", &cuda::tile_chunks);
  m.def("chunk_of", [](uint32_t cta, uint32_t ctas, uint32_t sheet, uint32_t chunks) -> std::optional<uint32_t> {
    const uint32_t chunk = cuda::chunk_of(cta, ctas, sheet, chunks);
    if (chunk == cuda::kNoChunk) return std::nullopt;
    return chunk;
  });
}

}  // namespace unweight
