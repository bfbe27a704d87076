// The fused product: y = x · Wᵀ with W packed. A persistent CTA a multiprocessor; a warpgroup of it copies, the others
// decode to A registers and multiply (multiply.cuh: a stage; schedule.h: who does what; copy.cuh: the copies).
#pragma once
#include "../code_table.cuh"
#include "copy.cuh"
#include "multiply.cuh"
#include "store.cuh"

namespace unweight::cuda {

// One warpgroup among the consumers.
template <class I>
struct Consumer {
  const LinearArgument& a;
  Ring<I> ring;
  uint32_t block, warp, lane;  // of a group, of the warpgroup
  uint64_t code_id = 0;        // of the code in the table
  bool has_code = false;

  __device__ __forceinline__ Consumer(const LinearArgument& a, uint32_t shared)
      : a(a),
        ring(shared),
        block(threadIdx.x / kWarpgroupThreads),
        warp(threadIdx.x / kLanes % kWarps),
        lane(threadIdx.x % kLanes) {}

  __device__ __forceinline__ uint32_t table() const { return ring.shared + I::kShared.table; }

  __device__ __forceinline__ void consume() {
    walk<I::kN, I::kWarpgroups>(a, [&](const Job& job, const GroupWork& group, bool first) {
      if constexpr (I::kLayout != I::kAny)
        multiply_group<static_cast<Layout>(I::kLayout)>(job, group, first);
      else if (job.matrix.layout == Layout::kHuffman)
        multiply_group<Layout::kHuffman>(job, group, first);
      else if (job.matrix.layout == Layout::kNibble)
        multiply_group<Layout::kNibble>(job, group, first);
      else
        multiply_group<Layout::kRaw>(job, group, first);
    });
  }

 private:
  // All consumers come by here with the same matrix.
  __device__ __forceinline__ void fill_table(const Matrix& m) {
    const uint64_t id = reinterpret_cast<const Header*>(m.bytes)->code_id;
    if (has_code && id == code_id) return;
    code_id = id;
    has_code = true;
    ptx::named_barrier<1>(I::kConsumers);  // nobody looks up the code before
    fill_banked_table(m.bytes, table(), threadIdx.x, I::kConsumers);
    ptx::named_barrier<1>(I::kConsumers);
  }

  __device__ __forceinline__ void give_back(const Ring<I>& slot) const {
    __syncwarp();  // all lanes have read it
    if (lane == 0) ptx::mbarrier_arrive(slot.empty());
  }
  __device__ __forceinline__ void pass(uint32_t stages) {
#pragma unroll 1
    for (; stages; stages--, ring.next()) {
      ring.wait_full();
      give_back(ring);
    }
  }

  // The warpgroup's block of a group: a chain of segments, added up in registers.
  template <Layout kLayout>
  __device__ __forceinline__ void multiply_group(const Job& job, const GroupWork& group, bool first) {
    if (kLayout == Layout::kHuffman && job.good) fill_table(job.matrix);
    const uint32_t begin = group.begin_of(block), end = group.end_of(block);
    StageProduct<kLayout, I::kN> product;
    product.start_chain();
#pragma unroll 1
    for (uint32_t segment = group.first_segment(); segment < group.end_segment(); segment++) {
      uint32_t stages = job.shape.stages_of(segment);
      if (begin <= segment && segment < end) multiply_segment<kLayout>(product, stages);
      pass(stages);
    }
    if (begin < end) store<kLayout>(product, job, group, first);
  }

  // Leaves in `stages` how many it didn't get to, since a copy is missing.
  template <Layout kLayout>
  __device__ __forceinline__ void multiply_segment(StageProduct<kLayout, I::kN>& product, uint32_t& stages) {
    Ring<I> before = ring;
    bool pending = false;  // the slot before isn't given back
    product.start_segment();
#pragma unroll 1
    do {
      ring.wait_full();
      const uint32_t bytes = ptx::load_shared(ring.length(block));
      if (bytes == 0) {
        product.damaged = 1;
        break;
      }
      product.stage(ring.stage(block), bytes, ring.x(), table(), warp, lane, [&] {
        if (pending) give_back(before);
      });
      pending = true;
      before = ring;
      ring.next();
    } while (--stages);
    product.finish();
    if (pending) give_back(before);
  }

  template <Layout kLayout>
  __device__ __forceinline__ void store(const StageProduct<kLayout, I::kN>& product, const Job& job,
                                        const GroupWork& group, bool first) const {
    // nibble's sums are scaled by 2^(112 - base).
    const float scale =
        kLayout == Layout::kNibble ? __uint_as_float((job.matrix.nibble_base + 127 - kNibbleScaledBase) << 23) : 1;
    const auto sum = [&](int i) { return product.damaged ? kNaN : product.sums[i] * scale; };
    if (group.begin_of(block) == 0 && group.end_of(block) == job.shape.segments()) {
      const BlockOutput out(a, job.weight, job.tile.matrix, group.group * I::kWarpgroups + block, job.tile.first_token,
                            job.tile.tokens);
#pragma unroll
      for (int q = 0; q < I::kN / 8; q++) out.store(q, sum(4 * q), sum(4 * q + 1), sum(4 * q + 2), sum(4 * q + 3));
      return;
    }
    float* to = piece_sums(a, blockIdx.x, !first, I::kWarpgroups, block, I::kN);
#pragma unroll
    for (int i = 0; i < I::kN / 2; i++) to[kWarpgroupThreads * i] = sum(i);
  }
};

template <int kLayout, int kTokens>
static __device__ __forceinline__ void linear(const LinearArgument& a) {
  using I = Instance<kLayout, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::pinned(ptx::shared_address(memory));
  ptx::launch_dependents();
  if (threadIdx.x == 0) Ring<I>(shared).make_barriers();
  __syncthreads();
  ptx::wait_for_launches();

  // The same in all lanes, and the compiler knows it.
  const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
  if (warp >= I::kConsumers / kLanes) {
    if constexpr (I::kMovesRegisters) ptx::release_registers<40>();
    if (warp == I::kConsumers / kLanes)
      copy_weights<I>(a, Ring<I>(shared));
    else
      copy_tokens<I>(a, warp - I::kConsumers / kLanes - 1, Ring<I>(shared));
  } else {
    if constexpr (I::kMovesRegisters) ptx::acquire_registers<232>();
    Consumer<I>(a, shared).consume();
  }
}

}  // namespace unweight::cuda
