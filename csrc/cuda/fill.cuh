// Memory that several threads set together.
#pragma once
#include <cstdint>

#include "arguments.h"

namespace unweight::cuda {

// Thread `thread` of `threads`, 14 or more, which all call it, of [begin, end), multiples of 2: all become `halves`.
static __device__ __forceinline__ void fill(DeviceAddress begin, DeviceAddress end, uint32_t halves, uint64_t thread,
                                            uint64_t threads) {
  if (begin >= end) return;
  const DeviceAddress first = (begin + 15) / 16 * 16, last = end / 16 * 16;  // of what is written 16 bytes at a time
  const uint4 four = make_uint4(halves, halves, halves, halves);
  for (DeviceAddress p = first + 16 * thread; p < last; p += 16 * threads) *reinterpret_cast<uint4*>(p) = four;
  // At most 7 halves at each end.
  const DeviceAddress front = first < end ? first : end, back = last > front ? last : front;
  const DeviceAddress head = begin + 2 * thread, tail = back + 2 * thread;
  if (head < front) *reinterpret_cast<uint16_t*>(head) = static_cast<uint16_t>(halves);
  if (tail < end) *reinterpret_cast<uint16_t*>(tail) = static_cast<uint16_t>(halves);
}

}  // namespace unweight::cuda
