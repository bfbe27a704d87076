// The drivers of the kernels that read packed matrices, and the launches they are made of. Torch-free, CUDA-free: the
// operators and the tests' interpreter run the same ones.
#pragma once
#include <cstdint>
#include <vector>

#include "device.h"

namespace unweight::cuda {

constexpr int kAnyLayout = -1;

// Packed matrices of one shape as the host knows them; nothing here is read from the device.
struct PackedMatrices {
  DeviceAddress address;  // of the first, a multiple of 16
  uint64_t matrix_bytes;  // from one to the next, a multiple of 128 if there are several
  uint64_t out_features, in_features;
  uint32_t matrices = 1;
  int layout = kAnyLayout;  // if the caller knows it: kernels stop when the header says another

  // Matrix `m` alone.
  PackedMatrices matrix(uint32_t m) const;
};

// Rows of every matrix of a stack. `first` is a multiple of group_rows, and so is `count` unless the matrix ends there.
struct RowRange {
  uint64_t first, count;
};

// Rows that are decoded together: a block, or a chunk where the matrix is or may be an archive.
uint64_t group_rows(const PackedMatrices& packed);

// What kernels report goes to one u64 on the device, the status (status.h): 0 is fine. It is cleared by who allocates
// it. None of these waits for the device.

// Decodes every matrix to `out`, BF16 [matrices, out_features, in_features] (a multiple of 16), and checks all that
// `verify` checks. Nothing may be made of `out` before the status was read.
void unpack(Device& device, const PackedMatrices& packed, DeviceAddress out, DeviceAddress status);

// Checks everything that unpack checks: headers, indexes, gaps, padding, checksums, and that all of it decodes.
void verify(Device& device, const PackedMatrices& packed, DeviceAddress status);

// Row ids[i] to out[i, in_features], as BF16. Ids are i64, or i32 unless `wide_ids`. A row is NaN (0x7FFF) if its id is
// outside [0, out_features) or if its bytes are damaged, and the status says so. Checksums aren't checked. One matrix.
void embedding(Device& device, const PackedMatrices& packed, DeviceAddress ids, bool wide_ids, uint64_t count,
               DeviceAddress out, DeviceAddress status);

// The parts of unpack, for who decodes band by band. Sums: u64 [matrices, blocks + 1], zero at first; each row is
// summed once, by one call of unpack_rows that gets them (0: it doesn't look at checksums).
uint64_t sums_bytes(const PackedMatrices& packed);
void verify_headers(Device& device, const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status);
void unpack_rows(Device& device, const PackedMatrices& packed, RowRange rows, DeviceAddress out, DeviceAddress sums,
                 DeviceAddress status);
void compare_checksums(Device& device, const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status);

// Reads the status and throws Error, in the CPU's words, unless it is 0.
void raise_damage(Device& device, const PackedMatrices& packed, DeviceAddress status);

// The launches. Where the layout is known there is one, else one for tiles and one for archives.
std::vector<LaunchPlan> plan_unpack(const PackedMatrices& packed, RowRange rows, DeviceAddress out, DeviceAddress sums,
                                    DeviceAddress status);
LaunchPlan plan_verify_headers(const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status);
LaunchPlan plan_compare_checksums(const PackedMatrices& packed, DeviceAddress sums, DeviceAddress status);
std::vector<LaunchPlan> plan_embedding(const PackedMatrices& packed, DeviceAddress ids, bool wide_ids, uint64_t count,
                                       DeviceAddress out, DeviceAddress status, int multiprocessors);

// Checks what the host knows and fills in what follows from it. Throws Error naming the argument.
PackedArgument packed_argument(const PackedMatrices& packed);

}  // namespace unweight::cuda
