// docs/FORMAT.md section 3 by threads: each sums words of its own, integers wrap, so any split gives the same checksum.
#pragma once
#include "../format/checksum.h"
#include "arguments.h"
#include "ptx.cuh"

namespace unweight::cuda {

// Of words numbered from a common start: one 32 x 32 multiplication a word, the weight's upper part once at the end.
struct PartialSum {
  uint64_t words = 0, weighted = 0;  // sum of w[j], sum of (j + 1) * w[j]

  __device__ __forceinline__ void add(uint32_t word, uint32_t j) {
    words += word;
    weighted += uint64_t{word} * (j + 1);
  }
  __device__ __forceinline__ void add(uint4 quad, uint32_t j) {
    add(quad.x, j);
    add(quad.y, j + 1);
    add(quad.z, j + 2);
    add(quad.w, j + 3);
  }
  // `start`: where word 0 is in what the checksum is of.
  __device__ __forceinline__ uint64_t at(uint64_t start) const {
    return (kFirstWordWeight - 1 + start) * words + weighted;
  }
};

// Of bytes [begin, end) from `bytes`, all multiples of 16: the part of `thread` of `threads`.
static __device__ uint64_t sum_bytes(const uint8_t* bytes, uint64_t begin, uint64_t end, uint32_t thread,
                                     uint32_t threads) {
  constexpr uint64_t kPiece = uint64_t{1} << 30;  // word numbers within a piece fit 32 bits
  uint64_t sum = 0;
  for (uint64_t piece = begin; piece < end; piece += kPiece) {
    const uint64_t left = end - piece;
    const uint32_t quads = static_cast<uint32_t>((left < kPiece ? left : kPiece) / 16);
    PartialSum part;
#pragma unroll 4
    for (uint32_t i = thread; i < quads; i += threads)
      part.add(ptx::load_once(bytes + piece + 16 * uint64_t{i}), 4 * i);
    sum += part.at((piece - begin) / 4);
  }
  return sum;
}

// Over the lanes of a warp, for all of them.
static __device__ __forceinline__ uint64_t warp_sum(uint64_t part) {
  for (int other = kLanes / 2; other; other /= 2) part += __shfl_xor_sync(0xFFFFFFFFu, part, other);
  return part;
}

// Adds the parts of a warp's lanes to a sum in memory.
static __device__ __forceinline__ void add_warp_sum(uint64_t* to, uint64_t part) {
  const uint64_t sum = warp_sum(part);
  if (threadIdx.x % kLanes == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(sum));
}

static __device__ __forceinline__ uint64_t* header_sum(const PackedArgument& a, SumsArgument s, uint32_t matrix) {
  return reinterpret_cast<uint64_t*>(s.sums) + matrix * (uint64_t{a.blocks} + 1);
}
static __device__ __forceinline__ uint64_t* block_sum(const PackedArgument& a, SumsArgument s, uint32_t matrix,
                                                      uint32_t block) {
  return header_sum(a, s, matrix) + 1 + block;
}

}  // namespace unweight::cuda
