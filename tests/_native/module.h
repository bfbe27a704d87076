#pragma once
#include <pybind11/pybind11.h>

namespace unweight {

void bind_choice(pybind11::module_& m);
void bind_decode(pybind11::module_& m);
void bind_drivers(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_schedule(pybind11::module_& m);
void bind_transcode(pybind11::module_& m);

}  // namespace unweight
