// Cuts a product into tasks, one a block and run of tokens, and hands them to the kernel of the instruction set.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "linear_block.h"
#include "scratch.h"

namespace unweight {
namespace {

// The columns of a last stage that isn't whole, followed by zeros: kernels multiply whole stages only.
std::vector<uint8_t> pad_last_stage(const void* x, int64_t x_row_stride, int64_t element, int64_t tokens,
                                    int64_t in_features) {
  const int64_t first = in_features / kStageColumns * kStageColumns;
  if (first == in_features) return {};
  std::vector<uint8_t> tail(tokens * kStageColumns * element);
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(tail.data() + t * kStageColumns * element,
                static_cast<const uint8_t*>(x) + (t * x_row_stride + first) * element, (in_features - first) * element);
  return tail;
}

// Threads take tasks one by one, 0, 1, 2 … Dealt out like this, those that a thread takes follow each other in memory:
// what it asks for at the end of a block is then what it needs itself. Only speed depends on the number of threads.
int64_t deal(int64_t task, int64_t tasks) {
  static const int64_t threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const int64_t each = tasks / threads;
  return task < each * threads ? task % threads * each + task / threads : task;
}

struct Kernel {
  size_t (*scratch)(int64_t tokens);
  Damage (*multiply)(const LinearJob& job, const LinearBlock& block, uint8_t* scratch);
};

Kernel kernel() {
#ifndef UNWEIGHT_PORTABLE_ONLY
  if (capability() == Capability::kAvx512) return {linear_scratch_avx512, linear_block_avx512};
#endif
  return {linear_scratch_portable, linear_block_portable};
}

}  // namespace

void linear(const Packed& w, size_t size, const void* x, int64_t x_row_stride, XType type, int64_t tokens,
            const void* bias, void* y, const Parallel& parallel) {
  if (tokens == 0) return;
  const Header& h = w.header;
  const bool float32 = type == XType::kFloat32;
  const int64_t out_features = h.out_features, in_features = h.in_features;
  const MatrixView matrix = matrix_view(w, size);
  const std::vector<uint8_t> tail = pad_last_stage(x, x_row_stride, float32 ? 4 : 2, tokens, in_features);
  const LinearJob job{&matrix, x, x_row_stride, tail.data(), float32, bias, y};
  const Kernel k = kernel();

  const int64_t token_runs = (tokens + kMaxBlockTokens - 1) / kMaxBlockTokens;
  const int64_t run = (tokens + token_runs - 1) / token_runs;
  const int64_t blocks = h.blocks(), scratch_bytes = k.scratch(run);

  if (h.tiled()) {
    parallel(blocks * token_runs, [&](int64_t task) {
      const int64_t first = task / blocks * run;
      Scratch& scratch = thread_scratch();
      const Damage damage = k.multiply(
          job, {static_cast<uint64_t>(deal(task % blocks, blocks)), nullptr, first, std::min(run, tokens - first)},
          scratch.reserve(scratch_bytes));
      scratch.trim();
      check_damage(matrix, damage);
    });
    return;
  }
  // A chunk of an archive has no tiles: its rows are decoded first.
  const int64_t chunk_rows = h.chunk_rows();
  parallel(blocks, [&](int64_t chunk) {
    const int64_t rows = std::min(chunk_rows, out_features - chunk * chunk_rows);
    Scratch& scratch = thread_scratch();
    uint8_t* memory = scratch.reserve(scratch_bytes + 2 * rows * in_features);
    uint16_t* weights = reinterpret_cast<uint16_t*>(memory + scratch_bytes);
    unpack_block(w, size, chunk, weights);
    for (int64_t row = 0; row < rows; row += kBlockRows)
      for (int64_t first = 0; first < tokens; first += run)
        k.multiply(job,
                   {static_cast<uint64_t>((chunk * chunk_rows + row) / kBlockRows), weights + row * in_features, first,
                    std::min(run, tokens - first)},
                   memory);
    scratch.trim();
  });
}

}  // namespace unweight
