// Bounds, alignment, and bytes and registers that nobody wrote.
#include "seeded.cuh"

template <bool kBug>
__device__ void shared_out_of_bounds(const Arguments& a) {
  __shared__ uint32_t first[32];
  __shared__ uint32_t second[32];
  second[threadIdx.x] = 1;
  first[threadIdx.x + kBug] = threadIdx.x;  // reported: shared_out_of_bounds
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = first[31 - threadIdx.x] + second[31 - threadIdx.x];
}
SEEDED(shared_out_of_bounds)

template <bool kBug>
__device__ void global_out_of_bounds(const Arguments& a) {
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.count + kBug) {
    at<uint32_t>(a.output)[i] = at<const uint32_t>(a.input)[i];  // reported: global_out_of_bounds
  }
}
SEEDED(global_out_of_bounds)

template <bool kBug>
__device__ void misaligned_global(const Arguments& a) {
  const char* from = at<const char>(a.input) + 16 * threadIdx.x;
  at<uint4>(a.output)[threadIdx.x] = *reinterpret_cast<const uint4*>(from + 8 * kBug);  // reported: misaligned_global
}
SEEDED(misaligned_global)

template <bool kBug>
__device__ void misaligned_generic(const Arguments& a) {
  __shared__ alignas(16) char bytes[32 * 8 + 8];
  // The choice keeps the address generic.
  char* to = a.count ? bytes : at<char>(a.scratch);
  *reinterpret_cast<volatile uint64_t*>(to + 8 * threadIdx.x + 4 * kBug) = threadIdx.x;  // reported: misaligned_generic
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = *reinterpret_cast<uint32_t*>(bytes + 8 * (31 - threadIdx.x) + 4 * kBug);
}
SEEDED(misaligned_generic)

template <bool kBug>
__device__ void misaligned_matrix_row(const Arguments& a) {
  __shared__ alignas(16) uint32_t rows[8 * 4 + 4];
  rows[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 4) rows[32 + threadIdx.x] = 0;
  __syncwarp();
  uint32_t row = ptx::shared_address(rows) + 16 * (threadIdx.x % 8) + 4 * kBug;
  uint32_t value = load_matrix(row);  // reported: misaligned_matrix_row
  at<uint32_t>(a.output)[threadIdx.x] = value;
}
SEEDED(misaligned_matrix_row)

template <bool kBug>
__device__ void uninitialised_register(const Arguments& a) {
  uint32_t value = one_more(threadIdx.x, kBug ? 31 : 32);  // reported: uninitialised_register
  at<uint32_t>(a.output)[threadIdx.x] = value;
}
SEEDED(uninitialised_register)

template <bool kBug>
__device__ void uninitialised_shared(const Arguments& a) {
  __shared__ uint32_t table[64];
  for (uint32_t i = threadIdx.x; i < 64 - kBug; i += 32) table[i] = i;
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = table[63 - threadIdx.x];  // reported: uninitialised_shared
}
SEEDED(uninitialised_shared)

template <bool kBug>
__device__ void uninitialised_scratch(const Arguments& a) {
  uint32_t* scratch = at<uint32_t>(a.scratch);
  if (!kBug || threadIdx.x) scratch[threadIdx.x] = threadIdx.x;
  __syncwarp();
  at<uint32_t>(a.output)[threadIdx.x] = scratch[31 - threadIdx.x];  // reported: uninitialised_scratch
}
SEEDED(uninitialised_scratch)

template <bool kBug>
__device__ void write_to_input(const Arguments& a) {
  *at<uint32_t>(kBug ? a.input : a.output) = 1;  // reported: write_to_input
}
SEEDED(write_to_input)
