"""What is broken, and which tests should notice: one line of a kernel each, as a tired programmer could write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in csrc/cuda
    old: str  # stands there once
    new: str
    tests: tuple[str, ...]  # pytest's arguments: where it is expected to be seen


UNPACK_ALL = ("tests/test_cuda_unpack.py",)
UNPACK = (*UNPACK_ALL, "-k", "stacks or shapes and 648")
TAILS = (*UNPACK_ALL, "-k", "shapes and 129")
ARCHIVE = (*UNPACK_ALL, "-k", "(shapes or contents or bands) and archive")
LOOKUP = ("tests/test_cuda_embedding.py",)
HOSTILE = ("tests/test_cuda_hostile.py",)
AMPERE = ("tests/test_cuda_ampere.py",)
VERIFY = ("tests/test_cuda_verify.py",)
TRANSCODE = ("tests/test_cuda_transcode.py",)

GATHER = ("tests/test_cuda_linear_gather.py", "-k", "many_chunks and not 128")
MANY = ("tests/test_cuda_linear_many.py",)
PRODUCT = ("tests/test_cuda_linear.py", "-k", "shapes and 66")
PATCHES = ("tests/test_cuda_linear.py", "-k", "numbers_of_patches")
HOSTILE_PRODUCT = ("tests/test_cuda_linear_hostile.py",)

MUTATIONS = (
    # Pieces of blocks of the fused product.
    Mutation(
        "a piece is published before all lanes have stored it",
        "linear/gather.cuh",
        "    __syncwarp();  // all lanes' sums\n",
        "",
        GATHER,
    ),
    Mutation("a flag that orders nothing", "ptx.cuh", "st.release.gpu.global.u64", "st.relaxed.gpu.global.u64", GATHER),
    Mutation(
        "a flag is seen, and not what it stands for",
        "ptx.cuh",
        "ld.acquire.gpu.global.u64",
        "ld.relaxed.gpu.global.u64",
        GATHER,
    ),
    Mutation(
        "a flag isn't taken back", "linear/gather.cuh", "ptx::store_relaxed(flag, 0);", "{}", (*GATHER[:2], "repeated")
    ),
    Mutation("nobody waits for a piece", "linear/gather.cuh", "if (has) Piece<I>", "if (false) Piece<I>", GATHER),
    Mutation(
        "others' pieces are left out",
        "linear/gather.cuh",
        "Piece<I>::add_loaded(sums, loaded[i], tokens)",
        "{}",
        GATHER,
    ),
    Mutation(
        "only the nearest pieces are added", "linear/gather.cuh", "while (left) add_some", "if (left) add_some", GATHER
    ),
    Mutation(
        "pieces of all tiles share their flags",
        "linear/gather.cuh",
        "sheet_rows(a.tile_sheets, a.tokens, 1) + first_row",
        "sheet_rows(a.tile_sheets, a.tokens, 1)",
        (*GATHER[:1], "-k", "experts"),
    ),
    Mutation(
        "groups that are added up are left out",
        "linear/walk.cuh",
        "turn < 2 * sheets; turn++",
        "turn < sheets; turn++",
        GATHER,
    ),
    Mutation(
        "a border is the last unit's that begins before",
        "linear/schedule.h",
        "(stage + length / 2) / length",
        "stage / length",
        (*GATHER[:2], "any_order"),
    ),
    # The ring of the fused product, and what fills and empties it.
    Mutation(
        "a slot is full when one warp has brought x",
        "linear/ring.cuh",
        "I::kWarpgroups + kLoaderWarps)",
        "I::kWarpgroups + 1)",
        PRODUCT,
    ),
    Mutation(
        "a slot is free when one warpgroup is done with it",
        "linear/ring.cuh",
        "I::kWarpgroups * kWarps)",
        "kWarps)",
        PRODUCT,
    ),
    Mutation(
        "no fence between x and the tensor cores", "linear/copy.cuh", "    ptx::fence_proxy_async();\n", "", PRODUCT
    ),
    Mutation("rows of x behind the tile's last", "linear/copy.cuh", "row < tokens ? there : 0", "there", PRODUCT),
    Mutation(
        "columns of x behind the last", "linear/copy.cuh", "min(columns - column, uint64_t{8})", "uint64_t{8}", PRODUCT
    ),
    Mutation("x isn't swizzled", "linear/copy.cuh", "(chunk ^ row) % 8", "chunk % 8", PRODUCT),
    Mutation(
        "a product's stages of any length",
        "linear/copy.cuh",
        " || length > I::kShared.stage_bytes / 16",
        "",
        (*HOSTILE_PRODUCT, "-k", "longer"),
    ),
    Mutation(
        "a product's stages outside the matrix",
        "linear/copy.cuh",
        " || end > steps",
        "",
        (*HOSTILE_PRODUCT, "-k", "behind_the_end"),
    ),
    Mutation(
        "a slot is given back while its x is read",
        "linear/multiply.cuh",
        "    batch<0>(fragments, a[0], x);\n    release();\n",
        "    release();\n    batch<0>(fragments, a[0], x);\n",
        PRODUCT,
    ),
    Mutation(
        "A registers are filled while they are read",
        "linear/multiply.cuh",
        "ptx::wgmma_wait<1>();",
        "ptx::wgmma_wait<2>();",
        PRODUCT,
    ),
    Mutation(
        "a code table is filled while it is read",
        "linear/linear.cuh",
        "    ptx::named_barrier<1>(I::kConsumers);  // nobody looks up the code before\n",
        "",
        (*MANY, "-k", "one_layout and huffman"),
    ),
    # From stages to sums to y.
    Mutation(
        "a product's patches are left out",
        "linear/fragments.cuh",
        "if (patched | zeros)",
        "if (zeros)",
        (*PRODUCT[:2], "as_many_patches and nibble"),
    ),
    Mutation(
        "one patch too many is taken for one that a warp's lanes hold",
        "linear/fragments.cuh",
        "kTooMany = 0xE0000000u",
        "kTooMany = 0xC0000000u",
        PATCHES,
    ),
    Mutation("a patch of one lane goes to all", "linear/fragments.cuh", '", 127, 0x28;', '", 3, 0x28;', PATCHES),
    Mutation(
        "a k-step takes all patches that are left",
        "linear/fragments.cuh",
        "patch, 0x80000000, 0x08;",
        "patch, 0x80000000, 0x0A;",
        PATCHES,
    ),
    Mutation(
        "patches that are left aren't said",
        "linear/fragments.cuh",
        "damaged() const { return patches.left; }",
        "damaged() const { return 0; }",
        (*HOSTILE_PRODUCT, "-k", "sections and huffman"),
    ),
    Mutation(
        "streams start in every stage",
        "linear/fragments.cuh",
        "    words.start(streams, lane.lane4 / 4);\n    start = 0;\n",
        "    words.start(streams, lane.lane4 / 4);\n",
        PATCHES,
    ),
    Mutation(
        "a product's words behind the stage",
        "linear/fragments.cuh",
        '        "min.u32 from, from, %6;\\n"\n',
        "",
        (*PRODUCT[:2], "shapes and huffman"),
    ),
    Mutation(
        "damage isn't said",
        "linear/linear.cuh",
        "damaged ? kNaN : p.scale",
        "p.scale",
        (*HOSTILE_PRODUCT, "-k", "sections"),
    ),
    Mutation("lanes exchange the wrong sums", "linear/store.cuh", "odd ? s0 : s1, 4)", "odd ? s1 : s0, 4)", PRODUCT),
    Mutation("a product's rows behind the last", "linear/store.cuh", "    if (r >= rows) return;\n", "", PRODUCT),
    # Barriers and fences.
    Mutation("no fence after mbarrier.init", "unpack_tiled.cu", "    ptx::fence_mbarrier_init();\n", "", UNPACK),
    Mutation("no barrier after the start", "unpack_tiled.cu", "  __syncthreads();\n", "", UNPACK),
    Mutation("a slot is free when one warp is done", "unpack_tiled.cu", "8 * i, kWarps);", "8 * i, 1);", UNPACK),
    Mutation("the producer waits for the wrong phase", "unpack_tiled.cu", "ring.phase ^ 1", "ring.phase", UNPACK),
    Mutation(
        "the producer doesn't wait", "unpack_tiled.cu", "      wait_phase(ring.empty(), ring.phase ^ 1);\n", "", UNPACK
    ),
    Mutation(
        "warps don't wait for a stage", "unpack_tiled.cu", "    wait_phase(ring.full(), ring.phase);\n", "", UNPACK
    ),
    Mutation(
        "a wait that doesn't try again",
        "staging.cuh",
        "while (!ptx::mbarrier_try_wait(barrier, parity)) {",
        "if (!ptx::mbarrier_try_wait(barrier, parity)) {",
        UNPACK,
    ),
    Mutation(
        "rows are stored before all lanes have decoded them",
        "unpack_tiled.cu",
        "    __syncwarp();  // the stage is read, and the tile is written\n",
        "",
        UNPACK,
    ),
    Mutation(
        "a tile is decoded over one that is still stored",
        "unpack_tiled.cu",
        "    __syncwarp();  // the tile is read\n",
        "",
        UNPACK,
    ),
    Mutation(
        "fewer bytes are expected than come",
        "staging.cuh",
        "arrive_expect(barrier, bytes)",
        "arrive_expect(barrier, bytes - 16)",
        UNPACK,
    ),
    Mutation(
        "a ring of pieces is refilled while it is read",
        "archive.cuh",
        "    __syncwarp();  // what was in the rings is read\n",
        "",
        ARCHIVE,
    ),
    Mutation(
        "words are read before they are there",
        "archive.cuh",
        "    words.wait((first + kPieceRounds * kArchiveStreams - 1) / kPieceWords + 1);\n",
        "    words.wait(first / kPieceWords);\n",
        ARCHIVE,
    ),
    Mutation(
        "copies are on their way when the warp ends",
        "archive.cuh",
        "    words.drain();\n",
        "",
        (*HOSTILE, "-k", "positions"),
    ),
    Mutation(
        "patches race with what they replace",
        "unpack_archive.cu",
        "__syncthreads_and(patches_ascend_part(m, chunk, threadIdx.x, kArchiveThreads))",
        "patches_ascend_part(m, chunk, threadIdx.x, kArchiveThreads)",
        (*UNPACK_ALL, "-k", "archive_patches"),
    ),
    Mutation(
        "a row's patches race with what they replace",
        "embedding_archive.cu",
        "        __syncwarp();  // patches come after what they replace, and so does NaN\n",
        "",
        LOOKUP,
    ),
    Mutation("no barrier before the look-ups", "embedding.cu", "  __syncthreads();\n", "", LOOKUP),
    Mutation(
        "NaN before all warps are done",
        "embedding.cu",
        "if (__syncthreads_or(!good))",
        "if (!good)",
        (*LOOKUP, "-k", "damage"),
    ),
    # Bounds.
    Mutation("stages of any length", "unpack_tiled.cu", " || mine.bytes > kSlotBytes", "", (*HOSTILE, "-k", "longer")),
    Mutation("rows behind the last", "tiles.cuh", "row < rows && column < columns", "column < columns", TAILS),
    Mutation("columns behind the last", "tiles.cuh", "row < rows && column < columns", "row < rows", TAILS),
    Mutation(
        "words behind the stage",
        "tiles.cuh",
        "load_shared(min(address, last))",
        "load_shared(address)",
        (*UNPACK_ALL, "-k", "(shapes or contents) and huffman"),
    ),
    Mutation(
        "patches without an end",
        "tiles.cuh",
        "      if (next >= end) {",
        "      if (false) {",
        (*HOSTILE, "-k", "go_on"),
    ),
    Mutation(
        "sections outside the stage",
        "tiles.cuh",
        "(zero_rows + header.patches()) <= bytes",
        "0 <= bytes",
        (*HOSTILE, "-k", "sections"),
    ),
    Mutation(
        "more bytes used than there are",
        "matrix.cuh",
        " && h.used_bytes <= a.matrix_bytes",
        "",
        (*HOSTILE, "-k", "cut_off"),
    ),
    Mutation(
        "units outside the data",
        "matrix.cuh",
        "begin < end && m.data_offset + 16 * uint64_t{end} <= m.used_bytes",
        "true",
        (*HOSTILE, "-k", "far"),
    ),
    Mutation("any id", "embedding.cu", " && id < a.packed.out_features", "", LOOKUP),
    Mutation(
        "the rest of a row",
        "rows.cuh",
        "      if (column + 1 < columns) out",
        "      out",
        (*LOOKUP, "-k", "shapes"),
    ),
    # Indices.
    Mutation(
        "the lower half of the matrix rows",
        "staging.cuh",
        "(lane % 16) * kTilePitch",
        "(lane % 8) * kTilePitch",
        UNPACK,
    ),
    Mutation(
        "tiles without a skew",
        "unpack_shared.h",
        "2 * kStageColumns + 16;",
        "2 * kStageColumns;",
        (*UNPACK_ALL, "-k", "conflicts"),
    ),
    Mutation("words of the lanes before", "ptx.cuh", "%%lanemask_lt", "%%lanemask_le", UNPACK),
    Mutation(
        "streams don't start afresh",
        "unpack_tiled.cu",
        "if (stage % m.segment_stages == 0) start = true;",
        "",
        (*UNPACK_ALL, "-k", "segment"),
    ),
    Mutation("where a stage's words are in the block", "unpack_tiled.cu", "      word += bytes / 4;\n", "", UNPACK),
    Mutation(
        "the other k-step's patches",
        "tiles.cuh",
        "patched >>= 2) {\n    const uint4 s = ptx::load_shared_quad(signs);\n#pragma",
        "patched >>= 1) {\n    const uint4 s = ptx::load_shared_quad(signs);\n#pragma",
        (*UNPACK_ALL, "-k", "patches"),
    ),
    Mutation("a header's own checksum", "verify.cu", "kOwnWord = 4", "kOwnWord = 6", VERIFY),
    Mutation(
        "the last block isn't compared", "verify.cu", "block < m.blocks; block", "block + 1 < m.blocks; block", VERIFY
    ),
    # The kernels that write packed matrices.
    Mutation(
        "counters are used before all are cleared",
        "count.cu",
        "    table[i] = make_uint4(0, 0, 0, 0);\n  __syncthreads();\n",
        "    table[i] = make_uint4(0, 0, 0, 0);\n",
        TRANSCODE,
    ),
    Mutation(
        "counters are emptied while others count",
        "count.cu",
        "    __syncthreads();\n    if (__syncthreads_or",
        "    if (__syncthreads_or",
        TRANSCODE,
    ),
    Mutation("a tile is encoded before it is there", "encode/tile.cuh", "  __syncwarp();\n}", "}", TRANSCODE),
    Mutation(
        "a tile is filled while it is encoded",
        "encode/tile.cuh",
        "  __syncwarp();  // the last user of the tile may still read it\n",
        "",
        TRANSCODE,
    ),
    Mutation("rows behind the band", "encode/tile.cuh", "row < from.rows && 8 * piece", "8 * piece", TRANSCODE),
    Mutation(
        "the second weight of an odd row's last pair",
        "encode/tile.cuh",
        "if (column + 1 < from.columns) return",
        "if (true) return",
        TRANSCODE,
    ),
    Mutation(
        "a full word goes one place further",
        "encode_huffman.cu",
        "words[place] = filled;",
        "words[place + 1] = filled;",
        TRANSCODE,
    ),
    Mutation(
        "a block's sum goes to the next block",
        "sum_blocks.cu",
        "a.checksums_offset) + block,",
        "a.checksums_offset) + block + 1,",
        TRANSCODE,
    ),
    # Further bounds, orders and conditions.
    Mutation("a slot is never given back", "unpack_tiled.cu", "ptx::mbarrier_arrive(ring.empty());", "", UNPACK),
    Mutation("the ring has one phase", "unpack_tiled.cu", "phase ^= slot == 0;", "", UNPACK),
    Mutation(
        "more bytes are expected than come",
        "staging.cuh",
        "_expect(barrier, bytes)",
        "_expect(barrier, bytes + 16)",
        UNPACK,
    ),
    Mutation(
        "slots overlap",
        "unpack_tiled.cu",
        "kRingOffset + kSlotBytes * slot",
        "kRingOffset + (kSlotBytes - 128) * slot",
        (*UNPACK_ALL, "-k", "raw"),
    ),
    Mutation(
        "rows behind the band's last",
        "unpack_tiled.cu",
        "min(rows_end - row, uint64_t{kWarpRows})",
        "uint64_t{kWarpRows}",
        UNPACK_ALL,
    ),
    Mutation("raw stages of any length", "unpack_tiled.cu", "if (bytes >= kRawStageBytes)", "if (bytes)", HOSTILE),
    Mutation("the mask of other rows", "tiles.cuh", "zeros >> 8 & 1", "zeros >> 4 & 1", UNPACK_ALL),
    Mutation(
        "parts that go past their chunk",
        "archive.cuh",
        "+ 15) / 16 * 16 == c.end;",
        "+ 15) / 16 * 16 >= c.end;",
        HOSTILE,
    ),
    Mutation(
        "patches outside their chunk", "archive.cuh", "good &= 2 * uint64_t{positions[i]} < c.weights;", "", HOSTILE
    ),
    Mutation(
        "two patches of one pair", "archive.cuh", "good &= i == 0 || positions[i - 1] < positions[i];", "", HOSTILE
    ),
    Mutation(
        "words behind the chunk's last", "archive.cuh", "at < words_end ?", "true ?", (*UNPACK_ALL, "-k", "archive")
    ),
    Mutation(
        "codes that take more space than there is",
        "matrix.cuh",
        "m.code_symbols > 0 && space <= 1u << longest",
        "true",
        (*VERIFY, *HOSTILE),
    ),
    Mutation(
        "words count the same wherever they are",
        "checksum.cuh",
        "weighted += uint64_t{word} * (j + 1);",
        "weighted += word;",
        VERIFY,
    ),
    Mutation(
        "a word without a code's bit is kept",
        "encode_huffman.cu",
        "last = moved > 32 ?",
        "last = moved >= 32 ?",
        TRANSCODE,
    ),
    Mutation(
        "a warp full of patches is raw",
        "encode_huffman.cu",
        "patches > kMaxWarpPatches",
        "patches >= kMaxWarpPatches",
        TRANSCODE,
    ),
    Mutation(
        "an exponent below the range fits",
        "encode_nibble.cu",
        "scaled >= 1 && scaled",
        "scaled >= 0 && scaled",
        TRANSCODE,
    ),
    Mutation(
        "the end of a stage is left as it is",
        "encode/tile.cuh",
        "if (at < (end + 15) / 16 * 16) store_word(stage, at, 0);",
        "",
        TRANSCODE,
    ),
    Mutation(
        "pairs without a counter of their own are forgotten",
        "count.cu",
        "second_exponent(weights) >= kCountSeconds",
        "second_exponent(weights) > kCountSeconds",
        (*TRANSCODE, "-k", "counts"),
    ),
    # GPUs before Hopper.
    Mutation(
        "nobody arrives for the copies of lanes",
        "staging.cuh",
        "    ptx::mbarrier_arrive_after_copies(barrier);\n",
        "    ptx::mbarrier_arrive(barrier);\n",
        AMPERE,
    ),
    Mutation(
        "what a lane wrote itself isn't handed over",
        "staging.cuh",
        "if (lane == 0) ptx::mbarrier_arrive(barrier);",
        "if (lane == 0) ptx::mbarrier_arrive_after_copies(barrier);",
        AMPERE,
    ),
    Mutation(
        "lanes copy the same part",
        "staging.cuh",
        "for (uint32_t i = 16 * lane; i < bytes",
        "for (uint32_t i = 16 * (lane & 15); i < bytes",
        AMPERE,
    ),
    Mutation("the lower half of a tile, by words", "staging.cuh", "(i & 1 ? 8 * kTilePitch : 0)", "0", AMPERE),
    Mutation("the right half of a k-step, by words", "staging.cuh", "(i >> 1) * 16", "(i >> 1) * 8", AMPERE),
)
