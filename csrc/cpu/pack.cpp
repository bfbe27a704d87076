// From weights to packed matrices: counts, code table, blocks, header. docs/FORMAT.md sections 1, 2, 4 and 9.
#include <algorithm>
#include <atomic>

#include "../format/packing.h"
#include "arena.h"
#include "capability.h"
#include "codec.h"
#include "encode.h"
#include "pair_counts.h"

namespace unweight {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class WeightsInMemory : public RowSource {
 public:
  WeightsInMemory(const uint16_t* data, int64_t matrices, int64_t out_features, int64_t in_features)
      : RowSource(matrices, out_features, in_features), data_(data) {}
  const uint16_t* rows(int64_t matrix, int64_t first, int64_t, uint16_t*) const override {
    return data_ + (matrix * out_features + first) * in_features;
  }

 private:
  const uint16_t* data_;
};

// A run of rows that one task handles.
struct Span {
  int64_t matrix, first, count;
};

std::vector<Span> cut(const RowSource& source, int64_t rows) {
  std::vector<Span> spans;
  for (int64_t m = 0; m < source.matrices; m++)
    for (int64_t r = 0; r < source.out_features; r += rows)
      spans.push_back({m, r, std::min(rows, source.out_features - r)});
  return spans;
}

// Runs task(span, rows) with a scratch of its own for each span.
template <class Task>
void for_each_span(const RowSource& source, const std::vector<Span>& spans, const Parallel& parallel, Task task) {
  parallel(spans.size(), [&](int64_t i) {
    const Span& s = spans[i];
    std::unique_ptr<uint16_t[]> scratch(new uint16_t[source.scratch_weights(s.count)]);
    task(i, s, source.rows(s.matrix, s.first, s.count, scratch.get()));
  });
}

}  // namespace

std::unique_ptr<RowSource> weights_in_memory(const uint16_t* data, int64_t matrices, int64_t out_features,
                                             int64_t in_features) {
  return std::make_unique<WeightsInMemory>(data, matrices, out_features, in_features);
}

// A block that is done.
struct Block {
  const uint8_t* bytes;
  size_t size;
  uint64_t patches, checksum;
  std::vector<uint32_t> unit_steps;
};

struct Packer::State {
  const RowSource& source;
  EncodePlan plan;
  std::unique_ptr<Arena> arena;
  std::vector<Block> blocks;       // matrix by matrix
  std::vector<PackedParts> parts;  // of each matrix
  std::vector<Header> headers;
  int64_t row_bytes = 0;

  explicit State(const RowSource& source) : source(source) {
    plan.in_features = source.in_features;
    plan.segment_stages = segment_stages(source.out_features, source.in_features);
    plan.avx512 = capability() == Capability::kAvx512;
  }

  PairCounts count(Layout layout, const Parallel& parallel) const;
  int64_t archive_rows() const;
  bool encode(Layout layout, const Parallel& parallel);
  size_t blocks_per_matrix() const { return blocks.size() / source.matrices; }
  void join_blocks();
  void make_headers(const std::vector<int64_t>& shape);
};

int64_t Packer::State::archive_rows() const {
  Header h{};
  h.in_features = source.in_features;
  return h.chunk_rows();
}

PairCounts Packer::State::count(Layout layout, const Parallel& parallel) const {
  // Whole chunks, whose pairs run on over rows; those of in-memory tiles as well, to be worth a table of counts.
  const int64_t columns = source.in_features;
  const auto spans = cut(source, std::max(source.group_rows(), archive_rows()));
  PairCounts total;
  for_each_span(source, spans, parallel, [&](int64_t, const Span& s, const uint16_t* rows) {
    const bool archive = layout == Layout::kArchive;
    const int64_t step = archive ? archive_rows() : s.count;
    for (int64_t r = 0; r < s.count; r += step) {
      const int64_t n = std::min(step, s.count - r) * columns;
      count_pairs(rows + r * columns, n, archive ? n : columns, layout, total);
    }
  });
  return total;
}

namespace {

// False if the weights can't have the layout.
bool encode_block(const EncodePlan& plan, Layout layout, const uint16_t* rows, int64_t row_count, EncodedBlock& block) {
  switch (layout) {
    case Layout::kRaw: encode_raw_block(plan, rows, row_count, block); return true;
    case Layout::kHuffman: encode_huffman_block(plan, rows, row_count, block); return true;
    case Layout::kArchive: encode_archive_chunk(plan, rows, row_count * plan.in_features, block); return true;
    case Layout::kNibble: return encode_nibble_block(plan, rows, row_count, block);
  }
  return false;
}

}  // namespace

// False if the weights don't fit the layout.
bool Packer::State::encode(Layout layout, const Parallel& parallel) {
  plan.packing = Packing{layout, 0, {}};
  if (layout != Layout::kRaw) {
    const auto counts = count(layout, parallel);
    if (layout == Layout::kNibble) {
      plan.packing.nibble_base = best_nibble_base(counts);
    } else {
      const Code& code = plan.packing.code = build_code(counts, layout == Layout::kHuffman ? 8 : kMaxCodeBits);
      plan.encode_table = code.encode_table();
      plan.window = make_pair_window(code, plan.encode_table);
      plan.padding_pair = padding_pair(code);
    }
  }

  const bool archive = layout == Layout::kArchive;
  const int64_t unit_rows = archive ? archive_rows() : kBlockRows;
  const auto spans = cut(source, std::max(source.group_rows(), unit_rows));
  std::vector<size_t> first_block(spans.size() + 1, 0);
  for (size_t i = 0; i < spans.size(); i++)
    first_block[i + 1] = first_block[i] + static_cast<size_t>(ceil_div(spans[i].count, unit_rows));
  blocks.clear();
  blocks.resize(first_block.back());
  const size_t weights = source.matrices * source.out_features * source.in_features;
  arena = std::make_unique<Arena>(weights + weights / 2);
  std::atomic<bool> fits{true};
  for_each_span(source, spans, parallel, [&](int64_t i, const Span& s, const uint16_t* rows) {
    size_t b = first_block[i];
    for (int64_t r = 0; r < s.count && fits; r += unit_rows, b++) {
      const int64_t n = std::min(unit_rows, s.count - r);
      const Arena::Slab slab = arena->borrow(block_limit(plan, layout, n));
      EncodedBlock block;
      block.bytes = slab.end();
      if (encode_block(plan, layout, rows + r * source.in_features, n, block))
        blocks[b] = {block.bytes, block.size, block.patches, fast_checksum(block.bytes, block.size),
                     std::move(block.unit_steps)};
      else
        fits = false;
      arena->give_back(slab, block.size);
    }
  });
  if (!fits) return false;
  join_blocks();
  if (layout != Layout::kNibble) return true;
  return std::all_of(parts.begin(), parts.end(), [&](const PackedParts& p) {
    return few_enough_patches(p.patches, source.out_features, source.in_features);
  });
}

void Packer::State::join_blocks() {
  parts.assign(source.matrices, {});
  for (size_t b = 0; b < blocks.size(); b++) {
    PackedParts& p = parts[b / blocks_per_matrix()];
    p.unit_steps.insert(p.unit_steps.end(), blocks[b].unit_steps.begin(), blocks[b].unit_steps.end());
    p.patches += blocks[b].patches;
  }
}

void Packer::State::make_headers(const std::vector<int64_t>& shape) {
  headers.clear();
  for (const PackedParts& p : parts)
    headers.push_back(make_header(plan.packing, source.out_features, source.in_features, shape, p));
}

Packer::Packer(const RowSource& source, Layout wanted, const std::vector<int64_t>& shape, bool stacked,
               const Parallel& parallel)
    : state_(new State(source)) {
  State& s = *state_;
  check_packable(source.matrices, source.out_features, source.in_features);
  if (!s.encode(wanted, parallel)) s.encode(Layout::kHuffman, parallel);
  s.make_headers(shape);
  if (s.plan.packing.layout != Layout::kRaw && raw_is_no_larger(s.headers)) {
    s.encode(Layout::kRaw, parallel);
    s.make_headers(shape);
  }
  s.row_bytes = common_row_bytes(s.headers, stacked);
}

Packer::~Packer() = default;
int64_t Packer::row_bytes() const { return state_->row_bytes; }

void Packer::write(uint8_t* out, const Parallel& parallel) const {
  const State& s = *state_;
  const size_t per_matrix = s.blocks_per_matrix();
  const size_t stride = static_cast<size_t>(s.row_bytes * s.source.out_features);
  advise_huge_pages(out, stride * s.headers.size());
  const bool fresh = untouched(out, stride * s.headers.size());
  std::vector<uint8_t*> to(s.blocks.size());
  for (size_t m = 0; m < s.headers.size(); m++) {
    const Header& h = s.headers[m];
    uint8_t* const matrix = out + m * stride;
    std::memset(matrix + h.used_bytes, 0, stride - h.used_bytes);
    std::vector<uint64_t> checksums;
    uint64_t at = h.data_offset;
    for (size_t b = m * per_matrix; b < (m + 1) * per_matrix; b++) {
      checksums.push_back(s.blocks[b].checksum);
      to[b] = matrix + at;
      at += s.blocks[b].size;
    }
    write_head(h, s.plan.packing, s.parts[m], checksums, matrix);
  }
  parallel(s.blocks.size(), [&](int64_t b) {
    const Block& block = s.blocks[b];
    if (fresh) make_present(to[b], block.size);
    if (!fresh && s.plan.avx512)
      copy_around_caches_avx512(to[b], block.bytes, block.size);
    else
      std::memcpy(to[b], block.bytes, block.size);
  });
}

}  // namespace unweight
