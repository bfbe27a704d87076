#include "support.h"

#include <ostream>

#include "../format/error.h"

namespace unweight::cuda {
namespace {

constexpr int kLeastMajor = 8, kHopperMajor = 9, kHopperMinor = 0;

// "12.4"
struct Version {
  int number;
};
std::ostream& operator<<(std::ostream& out, Version v) { return out << v.number / 1000 << '.' << v.number % 1000 / 10; }

}  // namespace

static std::ostream& operator<<(std::ostream& out, Gpu gpu) {
  return out << "device: cuda:" << gpu.index << " has compute capability " << gpu.major << '.' << gpu.minor;
}

void check_driver(Versions v) {
  if (v.driver == 0)
    fail("CUDA: no NVIDIA driver is installed, expected one for a GPU of compute capability ", kLeastMajor,
         ".0 or newer: install it, or keep the tensors on the CPU");
  if (v.driver / 1000 < v.build / 1000)
    fail("CUDA: the driver is for CUDA ", Version{v.driver}, ", this build of unweight-ext needs one for CUDA ",
         Version{v.build / 1000 * 1000}, ": install a newer driver, or build it with an older nvcc (from 12.4 on)");
}

void check_gpu(Gpu gpu, Versions v) {
  if (gpu.major < kLeastMajor)
    fail(gpu, ", expected ", kLeastMajor,
         ".0 or newer (A100, RTX 30 and what came after them): unpack on the CPU and move the result, "
         "unpack(packed.cpu()).to(device)");
  // The driver compiles PTX of its own version and of older ones; code for a GPU's own architecture isn't so strict.
  if (gpu.major > kHopperMajor && v.driver < v.build)
    fail(gpu, ", for which the driver compiles the kernels, and it is for CUDA ", Version{v.driver}, ", expected ",
         Version{v.build},
         " or newer, of which this build of unweight-ext is: install a newer driver, or build it "
         "with an older nvcc (from 12.4 on)");
}

void check_fused_gpu(Gpu gpu, Versions v) {
  check_gpu(gpu, v);
  if (gpu.major != kHopperMajor || gpu.minor != kHopperMinor)
    fail(gpu, ", expected ", kHopperMajor, '.', kHopperMinor,
         " (Hopper: H100, H200, GH200) for products that decode as they multiply: use exact=True, which unpacks the "
         "weight and calls F.linear");
}

}  // namespace unweight::cuda
