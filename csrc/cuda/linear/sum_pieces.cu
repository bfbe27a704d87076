// Behind the fused product: blocks that several CTAs had segments of. Their sums are added in the order of the
// segments, so the result doesn't depend on who was faster.
#include "store.cuh"

namespace unweight::cuda {

constexpr uint32_t kQuads = kSumTokens / 8;  // of sums, of a lane

// A CTA a record, block and 64 tokens. Whoever has a block's first segments finds the others' in the CTAs behind: each
// of them had it at the beginning of its part, in its first record.
extern "C" __global__ void __launch_bounds__(kWarpgroupThreads)
    unweight_sum_pieces(const __grid_constant__ SumPiecesArgument argument) {
  const LinearArgument& a = argument.linear;
  ptx::launch_dependents();
  ptx::wait_for_launches();
  const uint32_t parts = (argument.config_tokens + kSumTokens - 1) / kSumTokens, part = blockIdx.x % parts;
  const uint32_t block = blockIdx.x / parts % argument.warpgroups, piece = blockIdx.x / parts / argument.warpgroups;
  const uint32_t cta = piece / 2, first_quad = kQuads * part;
  const auto* records = reinterpret_cast<const PieceRecord*>(a.records);
  const PieceRecord& first = records[piece];
  const uint32_t tokens = first.tokens;
  if (8 * first_quad >= tokens) return;
  const uint32_t segments = first.segments, end = first.end[block];
  if (first.begin[block] != 0 || end == 0 || end == segments) return;  // another's, nobody's, or stored already

  float sums[kQuads][4] = {};
  const auto add = [&](uint32_t of_cta, uint32_t record) {
    const float* from = piece_sums(a, of_cta, record, argument.warpgroups, block, argument.config_tokens);
#pragma unroll
    for (uint32_t q = 0; q < kQuads; q++)
      if (8 * (first_quad + q) < tokens)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) sums[q][i] += from[kWarpgroupThreads * (4 * (first_quad + q) + i)];
  };
  add(cta, piece % 2);
  uint32_t done = end;
  for (uint32_t next = cta + 1; next < argument.ctas && done < segments; next++) {
    const PieceRecord& r = records[2 * next];
    if (r.tokens == 0 || r.begin[block] == r.end[block]) continue;  // it had nothing at all, or other blocks
    add(next, 0);
    done = r.end[block];
  }
  const BlockOutput out(a, first.weight, first.matrix, first.group * argument.warpgroups + block, first.first_token,
                        tokens);
#pragma unroll
  for (uint32_t q = 0; q < kQuads; q++) out.store(first_quad + q, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
}

}  // namespace unweight::cuda
