// Counts of exponent pairs, of which the code table or nibble's base is made.
//
// hot loop: unweight_count_pairs 8 LDG.E.128
// budget: unweight_count_pairs 7.0
#include "encode.h"

namespace unweight::cuda {
namespace {

constexpr int kRowWords = 128;  // of one second exponent: 256 counters of 16 bits

// Pairs in use are a few columns of a few rows of the table: rows permuted by their number spread over the banks.
__device__ __forceinline__ uint32_t counter_word(uint32_t first, uint32_t second) {
  return second * kRowWords + (first / 2 ^ second % kLanes);
}

__device__ __forceinline__ uint32_t first_exponent(uint32_t weights) { return weights >> 7 & 255; }
__device__ __forceinline__ uint32_t second_exponent(uint32_t weights) { return weights >> 23 & 255; }

__device__ __forceinline__ void count_pair(uint32_t* counters, uint32_t weights) {
  const uint32_t first = first_exponent(weights), second = min(second_exponent(weights), kCountSeconds);
  atomicAdd(counters + counter_word(first, second), first & 1 ? 1u << 16 : 1u);
}

__device__ __forceinline__ void add_count(const CountArgument& a, uint32_t first, uint32_t second, uint32_t count) {
  if (count) atomicAdd(reinterpret_cast<unsigned long long*>(a.counts) + (first | second << 8), count);
}

// Adds the CTA's table to the counts in memory and clears it. Says whether there are pairs without a counter.
__device__ __forceinline__ bool empty_table(const CountArgument& a, uint4* counters) {
  bool rare = false;
  for (uint32_t i = threadIdx.x; i < kCountSharedBytes / sizeof(uint4); i += kCountThreads) {
    const uint4 four = counters[i];
    if (!(four.x | four.y | four.z | four.w)) continue;
    counters[i] = make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w}, second = 4 * i / kRowWords;
    if (second == kCountSeconds) {
      rare = true;
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t first = 2 * ((4 * i + j) % kRowWords ^ second % kLanes);
      add_count(a, first, second, words[j] & 0xFFFF);
      add_count(a, first + 1, second, words[j] >> 16);
    }
  }
  return rare;
}

// Rows of odd length: pairs start anew in each, and the last one lacks a weight.
__device__ __forceinline__ uint32_t pair_of_odd_row(const CountArgument& a, uint64_t pair) {
  const uint64_t pairs_per_row = (a.in_features + 1) / 2, row = pair / pairs_per_row;
  const uint64_t column = 2 * (pair - row * pairs_per_row);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(a.rows) + row * a.in_features + column;
  const uint32_t first = p[0];
  if (column + 1 < a.in_features) return first | uint32_t{p[1]} << 16;
  const uint32_t exponent = first & 0x7F80;
  return first | (a.complete_halves && exponent != 0x7F80 ? exponent << 16 : 0);
}

// Calls `each` with the weights of each pair of [first, end), in all threads of the CTA together.
template <class Each>
__device__ __forceinline__ void for_pairs(const CountArgument& a, uint64_t first, uint64_t end, Each each) {
  if (a.in_features % 2 == 0) {
    const auto* words = reinterpret_cast<const uint32_t*>(a.rows);
    uint64_t i = first + 4 * threadIdx.x;
    for (; i + 4 <= end; i += 4 * kCountThreads) {
      const uint4 four = *reinterpret_cast<const uint4*>(words + i);
      each(four.x);
      each(four.y);
      each(four.z);
      each(four.w);
    }
    for (; i < end; i++) each(words[i]);
  } else {
    for (uint64_t i = first + threadIdx.x; i < end; i += kCountThreads) each(pair_of_odd_row(a, i));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kCountThreads)
    unweight_count_pairs(const __grid_constant__ CountArgument a) {
  extern __shared__ uint4 table[];  // u16 (kCountSeconds + 1, 256 first)
  auto* counters = reinterpret_cast<uint32_t*>(table);
  for (uint32_t i = threadIdx.x; i < kCountSharedBytes / sizeof(uint4); i += kCountThreads)
    table[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const uint64_t pairs = a.row_count * ((a.in_features + 1) / 2), step = uint64_t{gridDim.x} * kCountRound;
  for (uint64_t first = uint64_t{blockIdx.x} * kCountRound; first < pairs; first += step) {
    const uint64_t end = first + kCountRound < pairs ? first + kCountRound : pairs;
    for_pairs(a, first, end, [counters](uint32_t weights) { count_pair(counters, weights); });
    __syncthreads();
    if (__syncthreads_or(empty_table(a, table)))
      for_pairs(a, first, end, [&a](uint32_t weights) {
        if (second_exponent(weights) >= kCountSeconds)
          add_count(a, first_exponent(weights), second_exponent(weights), 1);
      });
  }
}

}  // namespace unweight::cuda
