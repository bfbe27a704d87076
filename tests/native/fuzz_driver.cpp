// The torch-free code as a program of its own, for the sanitizers: round trips of every layout, then damaged and
// hostile tensors. Everything lives in allocations of its exact size, so that a read past the end is seen.
//
//   fuzz_driver [MUTATIONS_PER_TENSOR [SEED]]
//   fuzz_driver --replay FOLDER      damaged tensors that hypothesis made (tests/samples.py), one a file
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "../../csrc/cpu/capability.h"
#include "../../csrc/cpu/codec.h"
#include "../../csrc/cpu/embedding.h"
#include "../../csrc/cpu/linear.h"
#include "../../csrc/format/checksum.h"
#include "../../csrc/format/error.h"

using namespace unweight;

// Allocations until one fails; below 0: none does. Not inlined, or gcc sees free() take what a `new` gave.
static int64_t allocations_left = -1;
#define NOT_INLINED __attribute__((noinline))
NOT_INLINED void* operator new(size_t size) {
  void* memory = allocations_left >= 0 && allocations_left-- == 0 ? nullptr : std::malloc(size);
  if (!memory) throw std::bad_alloc();
  return memory;
}
NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

std::mt19937_64 rng;
int64_t passed = 0, refused = 0, harmless = 0, hostile = 0;

uint64_t below(uint64_t n) { return rng() % n; }

void require(bool condition, const char* what) {
  if (condition) {
    passed++;
    return;
  }
  std::fprintf(stderr, "fuzz_driver: %s\n", what);
  std::abort();
}

const Parallel serial = [](int64_t n, const std::function<void(int64_t)>& task) {
  for (int64_t i = 0; i < n; i++) task(i);
};

struct Matrix {
  int64_t matrices, out_features, in_features;
  std::vector<uint16_t> weights;
};

enum class Content {
  kTrained,
  kOutliers,
  kRandom,
  kZeroRows,
  kConstant,
  kNan,
  kIncompressibleStage,
  kMixedWarps,
  kNarrowCode,
  kCount
};

// Kinds of weights that warps of a stage can have next to each other: coded well, all patches, or hardly any bits.
uint16_t any_exponent(uint64_t kind, uint64_t base) {
  const uint16_t rest = static_cast<uint16_t>(rng() & 0x807F);
  uint64_t exponent = base + below(3);
  if (kind == 0) exponent = below(256);
  if (kind == 1 && below(40) == 0) exponent = below(256);
  if (kind == 2) exponent = base + static_cast<uint64_t>(__builtin_ctzll(rng() | uint64_t{1} << 40));
  return static_cast<uint16_t>(rest | std::min<uint64_t>(exponent, 255) << 7);
}

Matrix make_matrix(Content content, int64_t matrices, int64_t n, int64_t k) {
  Matrix m{matrices, n, k, std::vector<uint16_t>(matrices * n * k)};
  std::normal_distribution<float> normal(0.f, 0.02f);
  for (auto& w : m.weights) {
    const float x = normal(rng);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    w = static_cast<uint16_t>(bits >> 16);
    if (content == Content::kRandom || (content == Content::kOutliers && below(200) == 0))
      w = static_cast<uint16_t>(rng());
    if (content == Content::kConstant) w = 0x3F80;
    if (content == Content::kNan) w = static_cast<uint16_t>(0x7F81 + below(100));
  }
  for (int64_t r = 0; r < n; r++)
    for (int64_t c = 0; c < k; c++) {
      uint16_t& w = m.weights[r * k + c];
      if (content == Content::kZeroRows && r % 3 == 0) w = 0;
      if (content == Content::kIncompressibleStage && r < 64 && c < 128) w = static_cast<uint16_t>(rng());
    }
  // Raw stages at any place of a segment, and windows of exponents at both edges.
  const uint64_t bases[] = {0, 1, 118, 238, 240, 241, 253}, base = bases[below(std::size(bases))];
  std::vector<uint64_t> kinds((n + 15) / 16 * ((k + 127) / 128));
  for (uint64_t& kind : kinds) kind = below(8) ? 1 + below(3) : 0;
  for (int64_t i = 0; i < matrices * n * k; i++) {
    const int64_t r = i / k % n, c = i % k;
    if (content == Content::kMixedWarps) m.weights[i] = any_exponent(kinds[r / 16 * ((k + 127) / 128) + c / 128], base);
    if (content == Content::kNarrowCode) m.weights[i] = any_exponent(2, base);
  }
  return m;
}

using Bytes = std::vector<uint8_t>;

Bytes pack_source(const RowSource& source, Layout layout, bool stacked) {
  const Packer packer(source, layout, {source.out_features, source.in_features}, stacked, serial);
  Bytes packed(source.matrices * source.out_features * packer.row_bytes());
  packer.write(packed.data(), serial);
  return packed;
}

Bytes pack(const Matrix& m, Layout layout) {
  const auto source = weights_in_memory(m.weights.data(), m.matrices, m.out_features, m.in_features);
  return pack_source(*source, layout, m.matrices > 1);
}

// Whatever instructions packed them. `packed`: with those in force.
void check_same_bytes(const Matrix& m, Layout layout, const Bytes& packed) {
  const Capability in_force = capability();
  set_capability(Capability::kPortable);
  require(pack(m, layout) == packed, "packed bytes depend on the instruction set");
  set_capability(in_force);
}

void check_round_trip(const Matrix& m, const Bytes& packed) {
  const size_t stride = packed.size() / m.matrices;
  const int64_t weights = m.out_features * m.in_features;
  for (int64_t i = 0; i < m.matrices; i++) {
    std::vector<uint16_t> back(weights);
    unpack(packed.data() + i * stride, stride, back.data(), serial);
    require(std::equal(back.begin(), back.end(), m.weights.begin() + i * weights), "unpacked weights differ");
    // Memory that nobody has written to: it is made present.
    std::unique_ptr<uint16_t[]> fresh(new uint16_t[weights]);
    unpack(packed.data() + i * stride, stride, fresh.get(), serial);
    require(std::equal(back.begin(), back.end(), fresh.get()), "weights unpacked to fresh memory differ");
    verify(packed.data() + i * stride, stride, serial);

    std::vector<int64_t> ids(m.out_features);
    for (size_t r = 0; r < ids.size(); r++) ids[r] = static_cast<int64_t>(ids.size() - 1 - r);
    std::vector<uint16_t> rows(weights);
    embedding(open_packed(packed.data() + i * stride, stride), stride, ids.data(), ids.size(), rows.data(), serial);
    for (int64_t r = 0; r < m.out_features; r++)
      require(std::equal(rows.begin() + r * m.in_features, rows.begin() + (r + 1) * m.in_features,
                         m.weights.begin() + i * weights + ids[r] * m.in_features),
              "embedding rows differ");
  }
  for (Layout other : {Layout::kRaw, Layout::kHuffman, Layout::kNibble, Layout::kArchive}) {
    const auto source = packed_weights(packed.data(), stride, m.matrices);
    require(pack_source(*source, other, m.matrices > 1) == pack(m, other), "transcoding differs from packing");
  }
}

// Wherever memory runs out, what a thread keeps is as good as new for the next call.
void check_failed_allocations(const Matrix& m, Layout layout, const Bytes& packed) {
  for (int64_t n = 0, failed = 1; failed; n++) {
    allocations_left = n;
    try {
      pack(m, layout);
      failed = 0;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
    require(pack(m, layout) == packed, "packed bytes differ after an allocation failed");
  }
}

// Products are only run, not compared: their numbers are tested where torch is.
void run_linear(const uint8_t* bytes, size_t size, int64_t tokens, XType type) {
  const Packed packed = open_packed(bytes, size);
  const int64_t n = packed.header.out_features, k = packed.header.in_features;
  const size_t element = type == XType::kBFloat16 ? 2 : 4;
  Bytes x(tokens * k * element, 0x3C), bias(n * element, 0x3C), y(tokens * n * element);
  linear(packed, size, x.data(), k, type, tokens, bias.data(), y.data(), serial);
}

void run_everything(const uint8_t* bytes, size_t size) {
  for (const auto& [tokens, type] : {std::pair{1, XType::kBFloat16}, {9, XType::kBFloat16}, {2, XType::kFloat32}}) {
    try {
      run_linear(bytes, size, tokens, type);
    } catch (const Error&) {
    }
  }
  try {
    const Packed packed = open_packed(bytes, size);
    const int64_t ids[] = {0, static_cast<int64_t>(packed.header.out_features) - 1};
    std::vector<uint16_t> rows(2 * packed.header.in_features);
    embedding(packed, size, ids, 2, rows.data(), serial);
  } catch (const Error&) {
  }
}

// What checks checksums: refused, or decoded.
void run_checked(const uint8_t* bytes, size_t size) {
  try {
    const auto source = packed_weights(bytes, size, 1);
    pack_source(*source, Layout::kRaw, false);
  } catch (const Error&) {
    refused++;
  }
  try {
    verify(bytes, size, serial);
  } catch (const Error&) {
  }
}

int replay(const char* folder) {
  int64_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    const size_t size = entry.file_size();
    std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
    in.read(reinterpret_cast<char*>(bytes.get()), size);
    require(static_cast<size_t>(in.gcount()) == size, "a file of the corpus could not be read");
    run_everything(bytes.get(), size);
    run_checked(bytes.get(), size);
    files++;
  }
  require(files > 0, "the corpus is empty");
  std::printf("fuzz_driver: %lld tensors of %s, %lld refused\n", static_cast<long long>(files), folder,
              static_cast<long long>(refused));
  return 0;
}

// Makes the checksums fit the bytes again, as somebody would who means harm.
void forge_checksums(uint8_t* bytes, size_t size) {
  try {
    const Packed p = open_packed(bytes, size);
    const Header& h = p.header;
    for (uint64_t b = 0; b < h.blocks(); b++) {
      const uint64_t begin = unit_range(p, p.first_unit(b)).begin, end = p.unit_offset(p.first_unit(b + 1));
      if (begin >= end || end > h.used_bytes) return;
      const uint64_t sum = checksum(bytes + begin, end - begin);
      std::memcpy(bytes + h.checksums_offset + 8 * b, &sum, 8);
    }
    std::memset(bytes + offsetof(Header, header_checksum), 0, 8);
    const uint64_t sum = checksum(bytes, h.data_offset);
    std::memcpy(bytes + offsetof(Header, header_checksum), &sum, 8);
  } catch (const Error&) {
  }
}

// Damage: a few flipped bits or bytes, an extreme field, a piece copied elsewhere. The structures at the start are hit
// as often as the data.
void damage(uint8_t* bytes, size_t size) {
  const size_t area = below(2) ? std::min<size_t>(size, 64 + below(2048)) : size;
  for (uint64_t i = 0; i <= below(4); i++) {
    const size_t at = below(area);
    switch (below(4)) {
      case 0: bytes[at] ^= static_cast<uint8_t>(1u << below(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>(rng()); break;
      case 2: std::memset(bytes + at, below(2) ? 0xFF : 0, std::min<size_t>(1 + below(8), size - at)); break;
      default: {
        const size_t from = below(size), n = std::min<size_t>({1 + below(64), size - at, size - from});
        std::memmove(bytes + at, bytes + from, n);
      }
    }
  }
}

void check_damaged(const Matrix& m, const Bytes& packed, int64_t mutations) {
  const size_t matrix_bytes = packed.size() / m.matrices;
  const int64_t weights = m.out_features * m.in_features;
  std::vector<uint16_t> back(weights);
  for (int64_t i = 0; i < mutations; i++) {
    const bool truncated = below(8) == 0;
    const size_t size = truncated ? below(matrix_bytes) : matrix_bytes;
    std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
    std::memcpy(bytes.get(), packed.data(), size);
    if (!truncated) damage(bytes.get(), size);
    run_everything(bytes.get(), size);
    const bool forged = below(2);
    if (forged) forge_checksums(bytes.get(), size);
    run_checked(bytes.get(), size);
    try {
      const Packed opened = open_packed(bytes.get(), size);
      if (static_cast<int64_t>(opened.header.out_features) != m.out_features ||
          static_cast<int64_t>(opened.header.in_features) != m.in_features) {
        refused++;  // the operator compares these with the tensor's shape before it allocates
        continue;
      }
      unpack(bytes.get(), size, back.data(), serial);
      if (forged) {
        hostile++;
      } else {
        harmless++;
        require(std::equal(back.begin(), back.end(), m.weights.begin()), "damage changed weights unseen");
      }
    } catch (const Error&) {
      refused++;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && !std::strcmp(argv[1], "--replay")) {
    const Capability best = capability();
    for (int level = 0; level <= static_cast<int>(best); level++) {
      set_capability(static_cast<Capability>(level));
      if (const int failed = replay(argv[2])) return failed;
    }
    return 0;
  }
  const int64_t mutations = argc > 1 ? std::atoll(argv[1]) : 60;
  rng.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 1, 7},     {1, 65, 129},  {1, 64, 128}, {1, 3, 1},
                               {1, 130, 300}, {1, 64, 2176}, {1, 70, 1056}, {3, 66, 130}};
  const Capability best = capability();
  for (int level = 0; level <= static_cast<int>(best); level++) {
    set_capability(static_cast<Capability>(level));
    for (const auto& shape : shapes)
      for (int c = 0; c < static_cast<int>(Content::kCount); c++) {
        const Matrix m = make_matrix(static_cast<Content>(c), shape[0], shape[1], shape[2]);
        for (Layout layout : {Layout::kRaw, Layout::kHuffman, Layout::kNibble, Layout::kArchive}) {
          const Bytes packed = pack(m, layout);
          check_same_bytes(m, layout, packed);
          check_round_trip(m, packed);
          if (m.weights.size() < 10000) check_failed_allocations(m, layout, packed);
          run_everything(packed.data(), packed.size() / m.matrices);
          check_damaged(m, packed, mutations);
        }
      }
  }
  std::printf("fuzz_driver: %lld checks; damaged tensors: %lld refused, %lld harmless, %lld forged and decoded\n",
              static_cast<long long>(passed), static_cast<long long>(refused), static_cast<long long>(harmless),
              static_cast<long long>(hostile));
  require(refused > 0 && passed > 0, "nothing was tested");
  return 0;
}
