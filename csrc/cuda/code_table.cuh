// docs/FORMAT.md section 4: the canonical code of a matrix, looked up by prefix.
#pragma once
#include "decode/huffman.cuh"
#include "matrix.cuh"
#include "ptx.cuh"

namespace unweight::cuda {

// The entry for codes that start with the `longest` bits of `prefix`. open_matrix has checked the counts.
static __device__ __forceinline__ uint32_t code_entry(const uint8_t* matrix, uint32_t longest, uint32_t prefix) {
  const uint16_t *counts = code_counts(matrix), *pairs = code_pairs(matrix);
  uint32_t rank = prefix, first = 0;  // prefixes behind the shorter codes, and how many those are
#pragma unroll 1
  for (uint32_t length = 1; length <= longest; length++) {
    const uint32_t count = counts[length], prefixes = count << (longest - length);
    if (rank < prefixes) return make_code_entry(pairs[first + (rank >> (longest - length))], length);
    rank -= prefixes;
    first += count;
  }
  return make_code_entry(0, 1);
}

// 256 rows of 32 copies: each lane looks up in a bank of its own. A row is 8 stores of 16 bytes; lanes begin at
// different ones, so that rows that lie in the same banks are written without conflicts.
static __device__ void fill_banked_table(const uint8_t* matrix, uint32_t table, uint32_t thread, uint32_t threads) {
  for (uint32_t prefix = thread; prefix < 256; prefix += threads) {
    const uint32_t e = code_entry(matrix, 8, prefix);
    for (uint32_t i = 0; i < 8; i++)
      ptx::store_shared_quad(table + prefix * 4 * kLanes + 16 * ((i + thread) % 8), make_uint4(e, e, e, e));
  }
}

// One copy of each of 2^longest entries.
static __device__ void fill_table(const uint8_t* matrix, uint32_t longest, uint32_t table, uint32_t thread,
                                  uint32_t threads) {
  for (uint32_t prefix = thread; prefix < 1u << longest; prefix += threads)
    ptx::store_shared(table + 4 * prefix, code_entry(matrix, longest, prefix));
}

}  // namespace unweight::cuda
