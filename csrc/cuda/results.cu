// Results that have to be other than what a product wrote: NaN for damaged weights, zeros for rows of no expert.
#include "results.h"

namespace unweight::cuda {
namespace {

// All threads of the grid together write [begin, end), multiples of 2.
__device__ __forceinline__ void fill(DeviceAddress begin, DeviceAddress end, uint32_t halves) {
  if (begin >= end) return;
  const uint64_t thread = uint64_t{blockIdx.x} * kResultThreads + threadIdx.x, threads = kResultCtas * kResultThreads;
  const DeviceAddress first = (begin + 15) / 16 * 16, last = end / 16 * 16;  // of what is written 16 bytes at a time
  const uint4 four = make_uint4(halves, halves, halves, halves);
  for (DeviceAddress p = first + 16 * thread; p < last; p += 16 * threads) *reinterpret_cast<uint4*>(p) = four;
  // At most 7 halves at each end.
  const DeviceAddress front = first < end ? first : end, back = last > front ? last : front;
  const DeviceAddress head = begin + 2 * thread, tail = back + 2 * thread;
  if (head < front) *reinterpret_cast<uint16_t*>(head) = static_cast<uint16_t>(halves);
  if (tail < end) *reinterpret_cast<uint16_t*>(tail) = static_cast<uint16_t>(halves);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kResultThreads) unweight_poison(const __grid_constant__ PoisonArgument a) {
  if (*reinterpret_cast<const uint64_t*>(a.status) != 0) fill(a.y, a.y + a.bytes, kNaNs);
}

extern "C" __global__ void __launch_bounds__(kResultThreads)
    unweight_clear_rest(const __grid_constant__ ClearRestArgument a) {
  __shared__ uint32_t covered;  // rows
  if (threadIdx.x == 0) covered = 0;
  __syncthreads();
  const uint32_t rows = static_cast<uint32_t>(a.rows);
  for (uint32_t e = threadIdx.x; e < a.experts; e += kResultThreads) {
    const int32_t end = reinterpret_cast<const int32_t*>(a.offsets)[e];
    if (end > 0) atomicMax(&covered, min(static_cast<uint32_t>(end), rows));
  }
  __syncthreads();
  fill(a.y + covered * a.row_bytes, a.y + a.rows * a.row_bytes, 0);
}

}  // namespace unweight::cuda
