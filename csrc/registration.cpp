// The operators' schemas and the module's entry point, nothing else. Implementations: csrc/torch/.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(unweight, m) {
  m.def(
      "linear(Tensor x, Tensor packed_w, Tensor? bias=None, Tensor? next_w=None, *, int layout=-1, bool exact=False, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "grouped_linear(Tensor x, Tensor packed_w, Tensor offs, Tensor? bias=None, Tensor? next_w=None, *, int "
      "layout=-1, "
      "bool exact=False, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "linear_many(Tensor x, Tensor[] packed_w, Tensor?[] bias, Tensor? next_w=None, *, int[] layouts=[], "
      "ScalarType? out_dtype=None) -> Tensor[]");
  m.def(
      "_linear_config(Tensor x, Tensor packed_w, Tensor? bias=None, *, int layout=-1, int tokens, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def("supported_configs(int layout=-1) -> int[]");
  m.def("_set_tuned(str gpu, int[] entries) -> ()");
  m.def("_tuned(str gpu) -> int[]");
  m.def("_grouped_grad(Tensor grad, Tensor packed_w, Tensor offs, int in_features) -> Tensor");
  m.def("_batch_invariant(int value) -> int");
  m.def("unpack(Tensor packed_w, int in_features, ScalarType dtype) -> Tensor");
  m.def("embedding(Tensor ids, Tensor packed_w, int embedding_dim) -> Tensor");
  m.def("_pack(Tensor weight, int layout, int[] shape, int threads) -> Tensor");
  m.def("_unpack(Tensor packed_w, int in_features, int threads) -> Tensor");
  m.def("_transcode(Tensor packed_w, int layout, int threads) -> Tensor");
  m.def("_resize(Tensor packed_w, int row_bytes) -> Tensor");
  m.def("_verify(Tensor packed_w) -> ()");
  m.def("_describe(Tensor packed_w) -> Tensor");
  m.def("_cpu_capability(int level) -> int");
  m.def("_check_cuda(int index) -> ()");
  m.def("_check_fused(int index) -> ()");
  m.def("_least_bytes(int layout, int out_features, int in_features) -> int");
}

// Importing the module loads this library, whose static initialisers register the operators.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C();
PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
