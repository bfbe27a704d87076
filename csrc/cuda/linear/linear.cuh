// The fused product: y = x · Wᵀ with W packed. A persistent CTA a multiprocessor; a warpgroup of it copies, the others
// decode to A registers and multiply (multiply.cuh: a stage; schedule.h: who does what; copy.cuh: the copies;
// gather.cuh: blocks that several CTAs had parts of).
#pragma once
#include "../code_table.cuh"
#include "../matrix.cuh"
#include "copy.cuh"
#include "gather.cuh"
#include "multiply.cuh"
#include "prefetch.cuh"

namespace unweight::cuda {

// One warpgroup among the consumers.
template <class I>
struct Consumer {
  const LinearArgument& a;
  Ring<I> ring;
  uint32_t block;  // of a group

  // `warp`: of the CTA, and the compiler knows that its lanes have the same.
  __device__ __forceinline__ Consumer(const LinearArgument& a, uint32_t shared, uint32_t warp)
      : a(a), ring(shared), block(warp / kWarps) {}

  // Anew where they are asked for: no register is spent on them.
  static __device__ __forceinline__ uint32_t warp() { return ptx::pinned(threadIdx.x) / kLanes; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ uint32_t table() const { return ring.shared + I::kShared.table; }

  __device__ __forceinline__ void consume(bool has_work) {
    walk<I::kN, I::kWarpgroups>(a, ring.work(), has_work, *this);
  }

  __device__ __forceinline__ void begin(const Job& job) {
    Matrix matrix;
    bool good = open_matrix(a.weights[job.weight].packed, job.tile.matrix, matrix) == Flaw::kNone;
    const Layout layout = static_cast<Layout>(ptx::uniform(static_cast<uint32_t>(matrix.layout)));
    good = ptx::uniform(good && layout != Layout::kArchive);
    // nibble's sums are scaled by 2^(112 - base). Of a damaged matrix nothing is read.
    const bool nibble = layout == Layout::kNibble;
    const float scale = nibble ? __uint_as_float((matrix.nibble_base + 127 - kNibbleScaledBase) << 23) : 1;
    if (lane() == 0) Place::park_job(place(), job.weight, job.tile, good ? scale : kNaN, good, layout);
    if (I::kHasTable && good && layout == Layout::kHuffman) fill_table(matrix.bytes);
  }

  __device__ __forceinline__ void work(const Job& job, const GroupWork& group) {
    park_group(job, group);
    float sums[I::kN / 2];
    uint32_t damaged;
    if constexpr (I::kLayout != I::kAny)
      damaged = multiply_group<static_cast<Layout>(I::kLayout)>(job, group, sums);
    else if (ptx::uniform(Place::layout(place()) == Layout::kNibble))
      damaged = multiply_group<Layout::kNibble>(job, group, sums);
    else  // huffman's stages may be raw: those of a raw matrix all are
      damaged = multiply_group<Layout::kHuffman>(job, group, sums);
    store(sums, damaged);
  }

 private:
  // All consumers come by here with the same matrix.
  __device__ __forceinline__ void fill_table(const uint8_t* matrix) {
    const uint64_t id = reinterpret_cast<const Header*>(matrix)->code_id;
    const uint32_t low = static_cast<uint32_t>(id), high = static_cast<uint32_t>(id >> 32);
    const uint32_t known = ring.shared + I::kShared.code;
    const bool same = ptx::load_shared(known) == low && ptx::load_shared(known + 4) == high;
    if (ptx::uniform(same && ptx::load_shared(known + 8))) return;
    ptx::named_barrier<1>(I::kConsumers);  // nobody looks up the code before
    if (threadIdx.x == 0) {
      ptx::store_shared(known, low);
      ptx::store_shared(known + 4, high);
      ptx::store_shared(known + 8, 1);
    }
    fill_banked_table(matrix, table(), threadIdx.x, I::kConsumers);
    ptx::named_barrier<1>(I::kConsumers);
  }

  // By its barrier; 0: none.
  __device__ __forceinline__ void give_back(uint32_t empty) const {
    __syncwarp();  // all lanes have read the slot
    if ((lane() == 0) & (empty != 0)) ptx::mbarrier_arrive(empty);
  }
  __device__ __forceinline__ void pass(uint32_t stages) {
#pragma unroll 1
    for (; stages; stages--, ring.next()) {
      ring.wait_full();
      give_back(ring.empty());
    }
  }

  // The warpgroup's block of a group: a chain of segments, added up in registers. Not 0: it is damaged.
  template <Layout kLayout>
  __device__ __forceinline__ uint32_t multiply_group(const Job& job, const GroupWork& group, float (&sums)[I::kN / 2]) {
    const uint32_t begin = group.begin_of(block);
    const uint32_t end = ptx::uniform(Place::is_good(place())) ? group.end_of(block) : 0;
    StageProduct<kLayout, I::kN> product(sums, table(), ptx::uniform(warp() % kWarps), ptx::pinned(lane()));
    product.start_chain();
    uint32_t before = 0;  // the barrier of a slot that isn't given back
#pragma unroll 1
    for (uint32_t segment = group.first_segment(); segment < group.end_segment(); segment++) {
      uint32_t stages = job.shape.stages_of(segment);
      if (begin <= segment && segment < end) {
        multiply_segment<kLayout>(product, stages, before);
        product.damaged |= stages;
      }
      if (stages == 0) continue;
      finish(product, before);
      pass(stages);
    }
    finish(product, before);
    return product.damaged;
  }
  template <Layout kLayout>
  __device__ __forceinline__ void finish(StageProduct<kLayout, I::kN>& product, uint32_t& before) const {
    product.finish();
    give_back(before);
    before = 0;
  }

  // Leaves in `stages` how many it didn't get to, since a copy is missing. The last products are still in flight.
  template <Layout kLayout>
  __device__ __forceinline__ void multiply_segment(StageProduct<kLayout, I::kN>& product, uint32_t& stages,
                                                   uint32_t& before) {
    product.start_segment();
#pragma unroll 1
    do {
      ring.wait_full();
      const uint32_t bytes = ptx::load_shared(ring.length(block));
      if (bytes == 0) break;
      product.stage(ring.stage(block), usable(bytes), ring.x_descriptor_low(), [&] { give_back(before); });
      before = ring.empty();
      ring.next();
    } while (--stages);
  }

  // A raw matrix has no code, and goes huffman's way where the layout isn't known: a stage of it that says to this warp
  // that it is coded is one without bytes.
  __device__ __forceinline__ uint32_t usable(uint32_t bytes) const {
    if (I::kLayout != I::kAny || Place::layout(place()) != Layout::kRaw) return bytes;
    return WarpHeader{ptx::load_shared(ring.stage(block) + 4 * (warp() % kWarps))}.is_raw() ? bytes : 0;
  }

  __device__ __forceinline__ uint32_t place() const {
    return ring.shared + I::kShared.places + 4 * kPlaceWords * warp();
  }
  __device__ __forceinline__ void park_group(const Job& job, const GroupWork& group) const {
    const uint32_t begin = group.begin_of(block), end = group.end_of(block), all = job.shape.segments();
    const Place::Kind kind = begin == end               ? Place::kNowhere
                             : begin == 0 && end == all ? Place::kOutput
                             : end == all               ? Place::kLastPiece
                                                        : Place::kPiece;
    if (lane() == 0) Place::park_group(place(), kind, group.first_block + block);
  }
  __device__ __forceinline__ void store(float (&sums)[I::kN / 2], uint32_t damaged) const {
    const Place p = Place::parked(place());
    if (p.kind == Place::kNowhere) return;
    const float scale = damaged ? kNaN : p.scale;
#pragma unroll
    for (float& sum : sums) sum *= scale;
    if (p.kind == Place::kPiece) {
      const Piece<I> piece(a, ring.work().get(SharedWork::kChunk), block, p.first_token, p.tokens);
      piece.store(sums);
      piece.publish();
      return;
    }
    if (p.kind == Place::kLastPiece) Gatherer<I>(a, ring.work(), p.block).add_to(sums, p.first_token, p.tokens);
    const BlockOutput out(a, p.weight, p.matrix, p.block, p.first_token, p.tokens);
#pragma unroll
    for (int q = 0; q < I::kN / 8; q++) out.store(q, sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
  }
};

template <int kLayout, int kTokens>
static __device__ __forceinline__ void linear(const LinearArgument& a) {
  using I = Instance<kLayout, kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::pinned(ptx::shared_address(memory));
  ptx::launch_dependents();
  // The same in all lanes, and the compiler knows it.
  const uint32_t warp = __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0);
  if (threadIdx.x == 0) Ring<I>(shared).make_barriers();
  if (threadIdx.x < 3) ptx::store_shared(shared + I::kShared.code + 4 * threadIdx.x, 0);  // none
  if (a.offsets) {
    if (warp == I::kConsumers / kLanes) prefetch_heads(a);
    ptx::wait_for_launches();  // one before this may be what writes offsets
  }
  if (warp == 0) Ring<I>(shared).work().template make<kTokens>(a);
  __syncthreads();
  const SharedWork work = Ring<I>(shared).work();
  const bool has_work = work.enter(a, 0);
  const void* read_first = nullptr;
  if (warp == I::kConsumers / kLanes && has_work) read_first = prefetch_own<I>(a, work);
  ptx::wait_for_launches();

  if (warp >= I::kConsumers / kLanes) {
    if constexpr (I::kMovesRegisters) ptx::release_registers<56>();
    if (warp == I::kConsumers / kLanes) {
      if (read_first) ptx::touch(read_first);
      WeightCopier<I>(a, Ring<I>(shared)).copy(has_work);
      prefetch_next<I>(a);
    } else {
      TokenCopier<I>(a, Ring<I>(shared), warp - I::kConsumers / kLanes - 1).copy(has_work);
    }
  } else {
    if constexpr (I::kMovesRegisters) ptx::acquire_registers<224>();
    Consumer<I>(a, shared, warp).consume(has_work);
  }
}

// A kernel of a file's kLayout. tools/native_build.py finds kernels by these lines, so the whole name stands in them.
#define UNWEIGHT_LINEAR_KERNEL(name, tokens)                                             \
  extern "C" __global__ void __launch_bounds__((Instance<kLayout, tokens>::kThreads), 1) \
      name(const __grid_constant__ LinearArgument a) {                                   \
    linear<kLayout, tokens>(a);                                                          \
  }

}  // namespace unweight::cuda
