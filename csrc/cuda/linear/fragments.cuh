// One warp's part of a stage in shared memory -> its lanes' A registers, four k-steps at a time (docs/FORMAT.md
// sections 5 to 7). Nothing is read outside the stage, whatever its bytes are.
#pragma once
#include "../tiles.cuh"

namespace unweight::cuda {

constexpr int kBatchKSteps = 4;  // k-steps that are decoded and then multiplied together
constexpr int kBatches = kKSteps / kBatchKSteps, kBatchPairs = kBatchKSteps / 2;

// A lane's A registers of a batch.
using Batch = uint32_t[kBatchKSteps][kRegisters];

static __device__ __forceinline__ void clear(Batch& a) {
  ptx::rare();
#pragma unroll
  for (int k = 0; k < kBatchKSteps; k++)
#pragma unroll
    for (int i = 0; i < kRegisters; i++) a[k][i] = 0;
}

// Where one lane of one warp finds what: offsets in a stage, and in the code table. They are the same all along, and
// opaque, since the compiler would rather work them out anew in every stage.
template <Layout kLayout>
struct LanePlaces {
  uint32_t header, plane;            // plane: the signs with mantissas, of a raw matrix the registers
  uint32_t codes, column;            // of nibble; of huffman's table
  uint32_t lane4, before;            // 4 · lane, and the lanes before it as a mask
  uint32_t places[kRegisters], top;  // of huffman: of the lane's registers in patches; dot4's factor

  __device__ __forceinline__ LanePlaces(uint32_t table, uint32_t warp, uint32_t lane) {
    header = ptx::opaque(4 * warp);
    plane = kLayout == Layout::kRaw ? raw_registers(4 * warp, 4 * lane)
                                    : kStageHeaderBytes + kWarpPlaneBytes * warp + 16 * lane;
    plane = ptx::opaque(plane);
    lane4 = ptx::opaque(4 * lane);
    if constexpr (kLayout == Layout::kNibble)
      codes = ptx::opaque(kHuffmanSections + kWarpNibbleBytes * warp + 8 * lane);
    if constexpr (kLayout == Layout::kHuffman) {
      column = ptx::opaque(table + 4 * lane);
      before = ptx::opaque(ptx::lanes_before());
      top = ptx::opaque(0x80000000u | table >> 24);  // no address is that large
#pragma unroll
      for (uint32_t i = 0; i < kRegisters; i++) places[i] = ptx::opaque(kRegisters * lane + i);
    }
  }

  static __device__ __forceinline__ uint32_t raw_registers(uint32_t warp4, uint32_t lane4) {
    return kStageHeaderBytes + kWarpRawBytes / 4 * warp4 + 4 * lane4;
  }
  // The registers of a raw stage among others: rare, and no register is spent on it.
  __device__ __forceinline__ uint32_t raw_registers() const { return raw_registers(header, lane4); }
};

// A stage in shared memory.
struct Stage {
  uint32_t address, bytes;

  template <Layout kLayout>
  __device__ __forceinline__ WarpHeader header(const LanePlaces<kLayout>& lane) const {
    return {ptx::load_shared(address + lane.header)};
  }
};

// `from`: the lane's registers of the first k-step.
static __device__ __forceinline__ void load_raw(uint32_t from, int batch, Batch& a) {
#pragma unroll
  for (int k = 0; k < kBatchKSteps; k++) {
    const uint4 r = ptx::load_shared_quad(from + 16 * kLanes * (kBatchKSteps * batch + k));
    a[k][0] = r.x, a[k][1] = r.y, a[k][2] = r.z, a[k][3] = r.w;
  }
}

// The patches of a warp's stage, in the order of k-steps.
struct PatchList {
  uint32_t next, end;  // in shared memory
  uint32_t header;     // bit 16 + k: k-step k has some
  uint32_t patch = 0;  // the last one that was applied

  // Those of one k-step, if it has some. Nothing behind the end is read. In PTX, jumps around single instructions
  // included: what the compiler makes of the same in C++ copies and selects A registers.
  __device__ __forceinline__ void apply(int kstep, uint32_t lane4, uint32_t (&a)[kRegisters]) {
    asm volatile(
        "{\n.reg .pred p, inside, is0, is1, is2, is3;\n.reg .b32 t, here;\n"
        "and.b32 t, %7, %8;\n"
        "setp.eq.u32 p, t, 0;\n"
        "@p bra DONE;\n"
        "AGAIN:\n"
        "setp.lt.u32 inside, %4, %6;\n"
        "@inside ld.shared.u32 %5, [%4];\n"
        "add.u32 %4, %4, 4;\n"
        // 4 · lane has no low bits: this is the register where the lane is meant, and more than 3 elsewhere.
        "lop3.b32 t, %5, 127, %9, 0x6A;\n"  // (patch & 127) ^ 4 · lane
        "shl.b32 here, 1, t;\n"             // 0 from 32 on
        "and.b32 t, here, 1;\nsetp.ne.u32 is0, t, 0;\n"
        "and.b32 t, here, 2;\nsetp.ne.u32 is1, t, 0;\n"
        "and.b32 t, here, 4;\nsetp.ne.u32 is2, t, 0;\n"
        "and.b32 t, here, 8;\nsetp.ne.u32 is3, t, 0;\n"
        "@!is0 bra NOT0;\nlop3.b32 %0, %10, %5, %0, 0xCA;\nNOT0:\n"
        "@!is1 bra NOT1;\nlop3.b32 %1, %10, %5, %1, 0xCA;\nNOT1:\n"
        "@!is2 bra NOT2;\nlop3.b32 %2, %10, %5, %2, 0xCA;\nNOT2:\n"
        "@!is3 bra NOT3;\nlop3.b32 %3, %10, %5, %3, 0xCA;\nNOT3:\n"
        "setp.lt.and.s32 p, %5, 0, inside;\n"  // the k-step has another
        "@p bra AGAIN;\n"
        "DONE:\n}"
        : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(next), "+r"(patch)
        : "r"(end), "r"(header), "r"(0x10000u << kstep), "r"(lane4), "r"(kExponentBits)
        : "memory");
  }
  // 0 if all were applied.
  __device__ __forceinline__ uint32_t left() const { return next ^ end; }
};

// Patches of a warp's stage that fit its lanes, as nearly all do: lane l has the lth from the list's end. However many
// are asked for, nothing is read that isn't there, and a patch is 10 instructions instead of 14.
struct FewPatches {
  static constexpr uint32_t kTooMany = 0xE0000000u;  // bits of a header
  int32_t left;                                      // less than 0: more were asked for than there are
  uint32_t own;                                      // 4 behind where it is, then itself

  // A word behind the list and 31 before its end can be read.
  __device__ __forceinline__ void load() { own = ptx::load_shared(own - 4); }

  // Those of one k-step, if the header says that it has some. Half of the registers are passed over in one jump.
  __device__ __forceinline__ void apply(int kstep, uint32_t header, const uint32_t (&places)[kRegisters],
                                        uint32_t (&a)[kRegisters]) {
#define UNWEIGHT_PATCH(i, place)     \
  "lop3.b32 t, patch, " place        \
  ", 127, 0x28;\n"                   \
  "setp.ne.u32 elsewhere, t, 0;\n"   \
  "@elsewhere bra NOT" i             \
  ";\n"                              \
  "lop3.b32 %" i ", %11, patch, %" i \
  ", 0xCA;\n"                        \
  "NOT" i ":\n"
#define UNWEIGHT_NEXT_PATCH                                                \
  "add.s32 %4, %4, -1;\n"                                                  \
  "lop3.b32 t, %4, patch, 0x80000000, 0x08;\nsetp.ne.u32 another, t, 0;\n" \
  "@another bra AGAIN;\n"
    asm volatile(
        "{\n.reg .pred none, upper, elsewhere, another;\n.reg .b32 t, patch;\n"
        "and.b32 t, %6, %12;\nsetp.eq.u32 none, t, 0;\n"
        "@none bra DONE;\n"
        "AGAIN:\n"
        "shfl.sync.idx.b32 patch, %5, %4, 31, 0xffffffff;\n"
        "and.b32 t, patch, 2;\nsetp.ne.u32 upper, t, 0;\n"
        "@upper bra UPPER;\n"  //
        UNWEIGHT_PATCH("0", "%7") UNWEIGHT_PATCH("1", "%8") UNWEIGHT_NEXT_PATCH
        "bra DONE;\n"
        "UPPER:\n"  //
        UNWEIGHT_PATCH("2", "%9") UNWEIGHT_PATCH("3", "%10") UNWEIGHT_NEXT_PATCH "DONE:\n}"
        : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(left)
        : "r"(own), "r"(header), "r"(places[0]), "r"(places[1]), "r"(places[2]), "r"(places[3]), "r"(kExponentBits),
          "r"(0x10000u << kstep)
        : "memory");
#undef UNWEIGHT_NEXT_PATCH
#undef UNWEIGHT_PATCH
  }
};

// The words of a warp's stage in shared memory, as its lanes take them: tiles.cuh's Words in as few instructions as
// there are. (Of a branch or a choice the compiler makes two selects.)
struct FastWords {
  uint32_t behind, end, before;  // 4 behind the next word; behind the last; LanePlaces'

  template <class Lookup>
  __device__ __forceinline__ void decode(BitStream& stream, Lookup lookup, uint32_t (&entries)[kRegisters]) {
    const uint32_t position = stream.position;
    decode_four_codes(stream, lookup, entries);
    asm volatile(
        "{\n.reg .pred takes;\n.reg .b32 t, takers, from;\n"
        "lop3.b32 t, %3, %4, 32, 0x28;\n"  // (before ^ after) & 32
        "setp.ne.u32 takes, t, 0;\n"
        "vote.sync.ballot.b32 takers, takes, 0xffffffff;\n"
        "and.b32 from, takers, %5;\n"
        "popc.b32 from, from;\n"
        "mad.lo.u32 from, from, 4, %2;\n"
        "min.u32 from, from, %6;\n"
        "@takes mov.b32 %0, %1;\n"
        "@takes ld.shared.u32 %1, [from + -4];\n"
        "popc.b32 takers, takers;\n"
        "mad.lo.u32 %2, takers, 4, %2;\n}"
        : "+r"(stream.w0), "+r"(stream.w1), "+r"(behind)
        : "r"(position), "r"(stream.position), "r"(before), "r"(end)
        : "memory");
  }
  __device__ __forceinline__ void start(LaneStreams& streams, uint32_t lane) {
    Words words{behind - 4, end - 4};
    words.start(streams, lane);
    behind = words.next + 4;
  }
};

// The A registers of a stage: batches in order, all lanes alike. A warp's part that can't be read is zeros, and
// damaged.
template <Layout kLayout>
struct Fragments;

template <>
struct Fragments<Layout::kRaw> {
  const LanePlaces<Layout::kRaw>& lane;
  Stage stage;
  bool good;

  __device__ __forceinline__ Fragments(const Stage& stage, const LanePlaces<Layout::kRaw>& lane, uint32_t&,
                                       LaneStreams&)
      : lane(lane), stage(stage), good(stage.bytes >= kRawStageBytes && stage.header(lane).is_raw()) {}

  __device__ __forceinline__ void decode(int batch, Batch& a) {
    if (good)
      load_raw(stage.address + lane.plane, batch, a);
    else
      clear(a);
  }
  __device__ __forceinline__ uint32_t damaged() const { return !good; }
};

template <>
struct Fragments<Layout::kNibble> {
  const LanePlaces<Layout::kNibble>& lane;
  uint32_t signs, codes;
  uint32_t zeros = 0;  // a bit for each row of the warp that is zero
  PatchList patches;

  __device__ __forceinline__ Fragments(const Stage& stage, const LanePlaces<Layout::kNibble>& lane, uint32_t&,
                                       LaneStreams&)
      : lane(lane), signs(stage.address + lane.plane), codes(stage.address + lane.codes) {
    const uint32_t header = stage.header(lane).bits;
    // With the bits of raw stages and zero rows, a section would start far behind every stage.
    const uint32_t section = ptx::pinned(header & 0xFFFF), end = section + (header >> 24),
                   stage_end = stage.address + stage.bytes;
    patches = {stage.address + 4 * section, stage.address + 4 * end, header};
    if (static_cast<int32_t>((section - kNibbleSections / 4) | (stage_end - patches.end)) < 0) start_rare(stage);
  }

  __device__ __forceinline__ void decode(int batch, Batch& a) {
#pragma unroll
    for (int pair = 0; pair < kBatchPairs; pair++) {
      const uint4 s = ptx::load_shared_quad(signs + kSignsStep * (kBatchPairs * batch + pair));
      const uint2 n = ptx::load_shared_pair(codes + kNibblesStep * (kBatchPairs * batch + pair));
      decode_nibbles(n.x, s.x, s.y, a[2 * pair]);
      decode_nibbles(n.y, s.z, s.w, a[2 * pair + 1]);
    }
    const uint32_t patched = patches.header & (0x10000u << kBatchKSteps) - 0x10000u << kBatchKSteps * batch;
    if (patched | zeros) correct(batch, a);
  }
  __device__ __forceinline__ uint32_t damaged() const { return patches.left(); }

 private:
  // Of a warp with zero rows, or one that can't be read: all its rows are zero then, whatever is decoded, and one patch
  // stays left.
  __device__ __forceinline__ void start_rare(const Stage& stage) {
    ptx::rare();
    const WarpHeader header{patches.header};
    const uint32_t section = header.bits & 0x1FFF, begin = section + header.has_zero_rows();
    const uint32_t end = begin + header.patches();
    patches = {stage.address + 4 * begin, stage.address + 4 * end, header.bits};
    constexpr uint32_t kKinds = 0xE000, kZeroRows = 0x2000;  // the highest bit is nobody's
    if (section >= kNibbleSections / 4 && 4 * end <= stage.bytes && (header.bits & kKinds) == kZeroRows) {
      zeros = ptx::load_shared(stage.address + 4 * section);
    } else {
      zeros = (1u << kBlockRows / kWarps) - 1;
      patches = {0, 4, 0};
      codes -= kWarps * kWarpNibbleBytes;  // a stage has signs, at least
    }
  }
  // Rare: all of it behind one branch.
  __device__ __forceinline__ void correct(int batch, Batch& a) {
    ptx::rare();
    // Registers 0 and 2 lie in one row, 1 and 3 eight rows below.
    const uint32_t rows = zeros >> lane.lane4 / 16;
#pragma unroll
    for (int k = 0; k < kBatchKSteps; k++) {
#pragma unroll
      for (int i = 0; i < kRegisters; i++)
        if (rows >> 8 * (i & 1) & 1) a[k][i] = 0;
      patches.apply(kBatchKSteps * batch + k, lane.lane4, a[k]);
    }
  }
};

template <>
struct Fragments<Layout::kHuffman> {
  const LanePlaces<Layout::kHuffman>& lane;
  Stage stage;
  bool usual;  // it isn't raw, damaged or full of patches
  uint32_t header, signs;
  uint32_t& start;  // not 0: the streams start in the next stage that has codes
  LaneStreams& streams;
  FewPatches patches;
  FastWords words;

  __device__ __forceinline__ Fragments(const Stage& stage, const LanePlaces<Layout::kHuffman>& lane, uint32_t& start,
                                       LaneStreams& streams)
      : lane(lane), stage(stage), signs(stage.address + lane.plane), start(start), streams(streams) {
    header = stage.header(lane).bits;
    // With the bits of raw stages and zero rows, a section would start far behind every stage.
    const uint32_t section = header & 0xFFFF, count = header >> 24;
    words = {stage.address + 4 * ptx::pinned(section + count + 1), stage.address + stage.bytes, lane.before};
    patches = {static_cast<int32_t>(count), words.behind - lane.lane4};
    const uint32_t outside = (section - kHuffmanSections / 4) | (words.end - words.behind);
    const uint32_t unusual = (outside | header) & FewPatches::kTooMany;
    usual = unusual == 0;
    if (unusual < start) start_streams();  // it is usual, and they start
  }

  __device__ __forceinline__ void decode(int batch, Batch& a) {
    if (usual) {
      if (batch == 0) patches.load();
      decode_codes(batch, a);
#pragma unroll
      for (int k = 0; k < kBatchKSteps; k++) patches.apply(kBatchKSteps * batch + k, header, lane.places, a[k]);
    } else {
      decode_rare(batch, a);
    }
  }
  __device__ __forceinline__ uint32_t damaged() const { return patches.left; }

 private:
  // Where its words begin, if it has codes and its section lies in it; else 0.
  __device__ __forceinline__ uint32_t good_words() const {
    ptx::rare();
    const uint32_t bits = ptx::pinned(header), section = bits & 0xFFFF, words = 4 * (section + (bits >> 24));
    return section >= kHuffmanSections / 4 && words <= stage.bytes ? stage.address + words : 0;
  }
  __device__ __forceinline__ void start_streams() {
    ptx::rare();
    words.start(streams, lane.lane4 / 4);
    start = 0;
  }
  __device__ __forceinline__ void decode_rare(int batch, Batch& a) {
    if (const uint32_t end = good_words()) {
      if (start) start_streams();
      decode_codes(batch, a);
      PatchList list{end - 4 * patches.left, end, header};
#pragma unroll
      for (int k = 0; k < kBatchKSteps; k++) list.apply(kBatchKSteps * batch + k, lane.lane4, a[k]);
      patches.left = static_cast<int32_t>(end - list.next) / 4;
    } else if (WarpHeader{header}.is_raw() && stage.bytes >= kRawStageBytes) {
      load_raw(stage.address + lane.raw_registers(), batch, a);
      patches.left = 0;
    } else {
      clear(a);
      patches.left = 1;
    }
  }
  __device__ __forceinline__ void decode_codes(int batch, Batch& a) {
    const auto lookup = [this](uint32_t x) { return ptx::load_shared(dot4(x, lane.top, lane.column)); };
#pragma unroll
    for (int pair = 0; pair < kBatchPairs; pair++) {
      const uint4 s = ptx::load_shared_quad(signs + kSignsStep * (kBatchPairs * batch + pair));
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int k = 2 * pair + odd;
        uint32_t entries[kRegisters];
        words.decode(streams.of[odd], lookup, entries);
        merge_entries(entries, odd ? s.z : s.x, odd ? s.w : s.y, a[k]);
      }
    }
  }
};

}  // namespace unweight::cuda
