// The one argument of each reading kernel: plain data, filled in by the drivers (plan.h), read by the kernels. Host
// code and nvcc both compile this.
#pragma once
#include <cstdint>

#include "../format/header.h"

namespace unweight {

// A pointer of the device, as a number: the host never follows it.
using DeviceAddress = uint64_t;

namespace cuda {

// Bytes of shared memory of a CTA, on the smallest multiprocessors from compute capability 8.0 on (8.6, 8.9, 12.0).
// Kernels that run on all of them take no more.
constexpr uint32_t kLeastSharedLimit = 99 << 10;

// Packed matrices one behind the other, as the host knows them without their headers, and what follows from that.
struct PackedArgument {
  DeviceAddress packed;   // a multiple of 16
  uint64_t matrix_bytes;  // of each: nothing behind them is read
  uint64_t out_features, in_features;
  uint64_t chunk_rows;        // rows of an archive chunk
  uint32_t matrices, blocks;  // blocks of 64 rows, of one matrix
  uint32_t chunks;            // of one matrix, if it is an archive
  uint32_t stages_per_block;
  int32_t layout;  // what the header has to say, or -1 for any
};

// Partial checksums of one matrix: its header's, then those of its blocks or chunks, each u64. Kernels add to them.
struct SumsArgument {
  DeviceAddress sums;  // [matrices, blocks + 1], or 0: checksums are not looked at
};

struct VerifyHeaderArgument {
  PackedArgument packed;
  SumsArgument sums;
  DeviceAddress status;
  uint32_t ctas_per_matrix;
};

struct CompareChecksumsArgument {
  PackedArgument packed;
  SumsArgument sums;
  DeviceAddress status;
};

// Rows [first_row, first_row + rows) of every matrix. first_row starts a block (a chunk, in an archive), and the rows
// end with one or with the matrix.
struct UnpackArgument {
  PackedArgument packed;
  SumsArgument sums;
  DeviceAddress status;
  DeviceAddress out;  // BF16 [matrices, rows, in_features], a multiple of 16; or 0: decoded and checked, not stored
  uint64_t first_row, rows;
  uint32_t run_stages;  // stages of a block that one CTA decodes
};

struct EmbeddingArgument {
  PackedArgument packed;  // one matrix
  DeviceAddress status;
  DeviceAddress ids;  // i64 or i32 [count]
  DeviceAddress out;  // BF16 [count, in_features], a multiple of 16
  uint64_t count;
  uint32_t wide_ids;  // 1: i64
};

}  // namespace cuda
}  // namespace unweight
