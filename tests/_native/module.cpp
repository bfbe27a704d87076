// Torch-free code for the tests, as a Python module: what the host compiler makes of the decode headers, and the
// drivers of the kernels. Built by tests/native_module.py.
#include "module.h"

#include "../../csrc/format/error.h"

PYBIND11_MODULE(_native, m) {
  pybind11::register_exception<unweight::Error>(m, "Error", PyExc_RuntimeError);
  unweight::bind_choice(m);
  unweight::bind_decode(m);
  unweight::bind_drivers(m);
  unweight::bind_linear(m);
  unweight::bind_schedule(m);
  unweight::bind_transcode(m);
}
