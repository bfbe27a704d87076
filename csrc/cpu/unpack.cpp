// Unpacking, verifying, and packed matrices as a source of rows. Portable code and the choice of the faster one.
#include <algorithm>
#include <vector>

#include "../format/code.h"
#include "../format/error.h"
#include "archive_decoder.h"
#include "arena.h"
#include "capability.h"
#include "codec.h"
#include "tile_decoder.h"
#include "unpack_avx512.h"

namespace unweight {
namespace {

// A matrix made ready for decoding: tables are built once.
struct Decoder {
  const Packed& packed;
  MatrixView view{};                    // tiled layouts
  std::vector<uint32_t> archive_table;  // archive
  bool avx512 = capability() == Capability::kAvx512;

  Decoder(const Packed& packed, size_t size) : packed(packed) {
    const Header& h = packed.header;
    if (h.tiled())
      view = matrix_view(packed, size);
    else
      archive_table =
          read_code(packed.bytes + kHeaderBytes, h.index_offset - kHeaderBytes, h.longest_code).decode_table();
  }

  int64_t block_rows() const { return packed.header.tiled() ? kBlockRows : packed.header.chunk_rows(); }
  int64_t rows_of(uint64_t block) const {
    return std::min<int64_t>(block_rows(), packed.header.out_features - block * block_rows());
  }
  void decode(uint64_t block, uint16_t* out, bool around_caches) const;
  void decode_checked(uint64_t block, uint16_t* out, bool around_caches) const;
  void decode_tiles(uint64_t block, uint16_t* out) const;
  void decode_chunk(uint64_t block, uint16_t* out, bool around_caches) const;
};

void Decoder::decode_tiles(uint64_t block, uint16_t* out) const {
  const int64_t columns = packed.header.in_features, rows = rows_of(block);
  TileDecoder tiles(view, block);
  uint16_t tile[kTileWeights];
  for (int64_t first = 0; first < columns; first += kStageColumns) {
    tiles.next(tile);
    const int64_t n = std::min<int64_t>(kStageColumns, columns - first);
    for (int64_t r = 0; r < rows; r++) std::copy_n(tile + r * kStageColumns, n, out + r * columns + first);
  }
}

uint32_t load_word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

uint32_t take_word(ArchiveStreamState& state) {
  if (state.end - state.next < 4) return 0;
  state.next += 4;
  return load_word(state.next - 4);
}

// Rounds from `round` on, the last of them perhaps in part.
void decode_rounds(ArchiveStreamState& state, const std::vector<uint32_t>& table, const uint8_t* plane, int64_t round,
                   int64_t count, uint16_t* out) {
  for (int64_t base = round * 2 * kRoundPairs; base < count; base += 2 * kRoundPairs)
    for (int s = 0; s < kArchiveStreams; s++) {
      uint32_t& position = state.position[s];
      uint64_t window = (uint64_t{state.w0[s]} << 32 | state.w1[s]) << position;
      for (int64_t q : {s, kArchiveStreams + s}) {
        const uint32_t entry = table[window >> (64 - kMaxCodeBits)], length = entry & kCodeLengthBits;
        window <<= length;
        position += length;
        for (int64_t h = 0; h < 2; h++) {
          const int64_t i = base + 2 * q + h;
          if (i < count)
            out[i] = static_cast<uint16_t>((plane[i] & 0x80) << 8 | (plane[i] & 0x7F) | (entry >> 16 * h & 0x7F80));
        }
      }
      if (position >= 32) {
        position -= 32;
        state.w0[s] = state.w1[s];
        state.w1[s] = take_word(state);
      }
    }
}

void Decoder::decode_chunk(uint64_t block, uint16_t* out, bool around_caches) const {
  const Range range = unit_range(packed, block);
  const int64_t count = rows_of(block) * packed.header.in_features;
  const uint8_t* chunk = packed.bytes + range.begin;
  const size_t size = range.end - range.begin;
  if (size < kChunkHeaderBytes) fail("packed: chunk ", block, " has ", size, " bytes, its header alone has 16");
  const uint32_t patches = load_word(chunk), words = load_word(chunk + 4);
  const ArchiveChunk parts(count, patches, words);
  if (parts.end != size)
    fail("packed: chunk ", block, " of ", count, " weights, ", patches, " patches and ", words, " words has ", size,
         " bytes, expected ", parts.end);

  ArchiveStreamState state{};
  state.next = chunk + parts.words;
  state.end = state.next + 4 * size_t{words};
  for (uint32_t& w : state.w0) w = take_word(state);
  for (uint32_t& w : state.w1) w = take_word(state);
  const uint8_t* plane = chunk + parts.plane;
  int64_t done = 0;
  if (avx512)
    done =
        decode_archive_rounds_avx512(state, archive_table.data(), plane, out, count / (2 * kRoundPairs), around_caches);
  decode_rounds(state, archive_table, plane, done, count, out);

  int64_t last = -1;
  for (uint32_t i = 0; i < patches; i++) {
    const int64_t position = load_word(chunk + parts.positions + 4 * size_t{i});
    if (position <= last || 2 * position >= count)
      fail("packed: chunk ", block, ": patch ", i, " is at pair ", position, " of ", (count + 1) / 2, ", after ", last);
    last = position;
    uint16_t pair;
    std::memcpy(&pair, chunk + parts.pairs + 2 * size_t{i}, 2);
    for (int64_t h = 0; h < 2 && 2 * position + h < count; h++) {
      uint16_t& w = out[2 * position + h];
      w = static_cast<uint16_t>((w & 0x807F) | (pair >> 8 * h & 255) << 7);
    }
  }
}

void Decoder::decode(uint64_t block, uint16_t* out, bool around_caches) const {
  if (!packed.header.tiled())
    decode_chunk(block, out, around_caches);
  else if (avx512)
    check_damage(view, unpack_block_avx512(view, block, out, around_caches, nullptr));
  else
    decode_tiles(block, out);
}

void Decoder::decode_checked(uint64_t block, uint16_t* out, bool around_caches) const {
  if (packed.header.tiled() && avx512) {
    // In one pass: the bytes are summed as they come into the cache.
    uint64_t sum = 0;
    check_damage(view, unpack_block_avx512(view, block, out, around_caches, &sum));
    check_block_sum(packed, block, sum);
    return;
  }
  check_block(packed, block, fast_checksum);
  decode(block, out, around_caches);
}

// A packed matrix, checked once, that hands out whole blocks.
class PackedWeights : public RowSource {
 public:
  PackedWeights(size_t stride, const std::vector<Packed>& packed)
      : RowSource(packed.size(), packed[0].header.out_features, packed[0].header.in_features), packed_(packed) {
    for (size_t m = 0; m < packed_.size(); m++) {
      check_header(packed_[m], stride);
      decoders_.emplace_back(packed_[m], stride);
    }
  }
  int64_t group_rows() const override { return decoders_[0].block_rows(); }
  size_t scratch_weights(int64_t rows) const override { return static_cast<size_t>(rows * in_features); }
  const uint16_t* rows(int64_t matrix, int64_t first, int64_t count, uint16_t* scratch) const override {
    const Decoder& d = decoders_[matrix];
    for (int64_t r = 0; r < count; r += d.block_rows()) {
      const uint64_t block = (first + r) / d.block_rows();
      d.decode_checked(block, scratch + r * in_features, false);
    }
    return scratch;
  }

 private:
  const std::vector<Packed> packed_;
  std::vector<Decoder> decoders_;
};

}  // namespace

std::unique_ptr<RowSource> packed_weights(const uint8_t* bytes, size_t bytes_per_matrix, int64_t matrices) {
  std::vector<Packed> packed;
  for (int64_t m = 0; m < matrices; m++) {
    packed.push_back(open_packed(bytes + m * bytes_per_matrix, bytes_per_matrix));
    const Header &a = packed[0].header, &b = packed[m].header;
    if (a.layout != b.layout || a.out_features != b.out_features || a.in_features != b.in_features)
      fail("packed: matrix ", m, " is ", layout_name(b.layout), " of ", b.out_features, " x ", b.in_features,
           ", matrix 0 is ", layout_name(a.layout), " of ", a.out_features, " x ", a.in_features);
  }
  return std::make_unique<PackedWeights>(bytes_per_matrix, packed);
}

void unpack(const uint8_t* bytes, size_t size, uint16_t* out, const Parallel& parallel) {
  const Packed packed = open_packed(bytes, size);
  check_header(packed, size);
  const Decoder decoder(packed, size);
  const size_t row_bytes = sizeof *out * packed.header.in_features, out_bytes = row_bytes * packed.header.out_features;
  advise_huge_pages(out, out_bytes);
  const bool fresh = untouched(out, out_bytes);
  parallel(packed.header.blocks(), [&](int64_t b) {
    uint16_t* block = out + b * decoder.block_rows() * packed.header.in_features;
    if (fresh) make_present(block, decoder.rows_of(b) * row_bytes);
    decoder.decode_checked(b, block, /*around_caches=*/!fresh);  // what the system has just cleared is in them
  });
}

void verify(const uint8_t* bytes, size_t size, const Parallel& parallel) {
  const Packed packed = open_packed(bytes, size);
  check_header(packed, size);
  const Decoder decoder(packed, size);
  parallel(packed.header.blocks(), [&](int64_t b) {
    std::unique_ptr<uint16_t[]> scratch(new uint16_t[decoder.rows_of(b) * packed.header.in_features]);
    decoder.decode_checked(b, scratch.get(), false);
  });
}

void unpack_block(const Packed& packed, size_t size, uint64_t block, uint16_t* out) {
  Decoder(packed, size).decode(block, out, false);
}

}  // namespace unweight
