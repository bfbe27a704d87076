// What stands around the data: the header and its checksum, the code table's id, the index, gaps, end padding. And the
// end of every check: sums that other kernels have added up against those that the matrix says. Two small kernels
// instead of a last CTA that finds out that it is the last: launches are ordered, so no fence can be forgotten.
#include "checksum.cuh"
#include "matrix.cuh"

namespace unweight::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// Where its own checksum is, a header counts as zero.
constexpr uint32_t kOwnWord = 4;

static __device__ uint64_t header_checksum_part(const Matrix& m, uint32_t thread, uint32_t threads) {
  uint64_t sum = sum_bytes(m.bytes, 0, m.data_offset, thread, threads);
  if (thread == 0) {
    const auto* words = reinterpret_cast<const uint32_t*>(m.bytes) + kOwnWord;
    sum -= (kFirstWordWeight + kOwnWord) * words[0] + (kFirstWordWeight + kOwnWord + 1) * words[1];
  }
  return sum;
}

// For a whole warp.
static __device__ bool code_has_its_id(const Matrix& m, uint32_t lane) {
  const auto* table = reinterpret_cast<const uint16_t*>(m.bytes + kHeaderBytes);
  const uint32_t halves = m.code_symbols ? kCodeCountBytes / 2 + m.code_symbols : 0;
  PartialSum sum;
  for (uint32_t i = 2 * lane; i < halves; i += 2 * kLanes)
    sum.add(table[i] | (i + 1 < halves ? uint32_t{table[i + 1]} << 16 : 0), i / 2);
  return warp_sum(sum.at(0)) == reinterpret_cast<const Header*>(m.bytes)->code_id;
}

// Reports the first byte of [begin, end) that isn't zero.
static __device__ void check_zeros(const Matrix& m, uint64_t begin, uint64_t end, uint64_t thread, uint64_t threads,
                                   DeviceAddress status, uint32_t matrix) {
  for (uint64_t i = begin + thread; i < end; i += threads)
    if (m.bytes[i]) {
      report(status, Flaw::kGap, matrix, i);
      return;
    }
}

static __device__ void check_padding(const Matrix& m, uint64_t end, uint64_t thread, uint64_t threads,
                                     DeviceAddress status, uint32_t matrix) {
  const uint64_t quads = (end - m.used_bytes) / 16;  // used_bytes is a multiple of 16
  for (uint64_t i = thread; i < quads; i += threads) {
    const uint4 quad = ptx::load_once(m.bytes + m.used_bytes + 16 * i);
    if (quad.x | quad.y | quad.z | quad.w) {
      check_zeros(m, m.used_bytes + 16 * i, m.used_bytes + 16 * i + 16, 0, 1, status, matrix);
      break;
    }
  }
  check_zeros(m, m.used_bytes + 16 * quads, end, thread, threads, status, matrix);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    unweight_verify_header(const __grid_constant__ VerifyHeaderArgument a) {
  const uint32_t matrix = blockIdx.x / a.ctas_per_matrix, cta = blockIdx.x % a.ctas_per_matrix;
  Matrix m;
  const Flaw flaw = open_matrix(a.packed, matrix, m);
  if (flaw != Flaw::kNone) {
    if (threadIdx.x == 0) report(a.status, flaw, matrix, flaw_place(flaw, m));
    return;
  }
  const uint32_t thread = cta * kThreads + threadIdx.x, threads = a.ctas_per_matrix * kThreads;
  add_warp_sum(header_sum(a.packed, a.sums, matrix), header_checksum_part(m, thread, threads));
  for (uint32_t unit = thread; unit < m.units; unit += threads)
    if (!unit_of(m, unit).good) {
      report(a.status, Flaw::kIndex, matrix, unit);
      break;
    }
  check_padding(m, a.packed.matrix_bytes, thread, threads, a.status, matrix);
  if (cta) return;
  const uint64_t code_end = kHeaderBytes + (m.code_symbols ? kCodeCountBytes + 2 * m.code_symbols : 0);
  const auto offset = [&m](const void* at) { return static_cast<uint64_t>(static_cast<const uint8_t*>(at) - m.bytes); };
  check_zeros(m, code_end, offset(m.index), threadIdx.x, kThreads, a.status, matrix);
  check_zeros(m, offset(m.index + m.units + 1), offset(m.checksums), threadIdx.x, kThreads, a.status, matrix);
  check_zeros(m, offset(m.checksums + m.blocks), m.data_offset, threadIdx.x, kThreads, a.status, matrix);
  if (threadIdx.x < kLanes && !code_has_its_id(m, threadIdx.x)) report(a.status, Flaw::kCode, matrix, 0);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    unweight_compare_checksums(const __grid_constant__ CompareChecksumsArgument a) {
  const uint32_t matrix = blockIdx.x;
  Matrix m;
  if (open_matrix(a.packed, matrix, m) != Flaw::kNone) return;  // reported before
  const uint64_t* header = header_sum(a.packed, a.sums, matrix);
  if (threadIdx.x == 0 && *header != reinterpret_cast<const Header*>(m.bytes)->header_checksum)
    report(a.status, Flaw::kHeaderChecksum, matrix, 0);
  for (uint32_t block = threadIdx.x; block < m.blocks; block += kThreads)
    if (*block_sum(a.packed, a.sums, matrix, block) != m.checksums[block]) {
      report(a.status, Flaw::kBlockChecksum, matrix, block);
      break;
    }
}

}  // namespace unweight::cuda
