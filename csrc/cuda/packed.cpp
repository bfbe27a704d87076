// What the host knows of packed matrices, checked, and what follows from it.
#include "../format/error.h"
#include "grid.h"
#include "plan.h"

namespace unweight::cuda {
namespace {

Header header_of(const PackedMatrices& packed, Layout layout) {
  Header header{};
  header.layout = layout;
  header.out_features = packed.out_features;
  header.in_features = packed.in_features;
  return header;
}

}  // namespace

PackedMatrices PackedMatrices::matrix(uint32_t m) const {
  if (m >= matrices) fail("packed: matrix ", m, " of ", matrices);
  PackedMatrices one = *this;
  one.address += m * matrix_bytes;
  one.matrices = 1;
  return one;
}

PackedArgument packed_argument(const PackedMatrices& packed) {
  if (packed.address % 16)
    fail("packed: lies ", packed.address % 16, " bytes behind a multiple of 16 in memory, expected 0");
  if (packed.matrices < 1) fail("packed: no matrices, expected at least one");
  if (packed.matrices > 1 && packed.matrix_bytes % 128)
    fail("packed: matrices of ", packed.matrix_bytes, " bytes, expected a multiple of 128");
  if (packed.layout < kAnyLayout || packed.layout > static_cast<int>(Layout::kArchive))
    fail("layout: ", packed.layout, ", allowed are -1 to 3");
  // Of tiles the more padding; what only an archive can hold is known to be one.
  const Header tiles = header_of(packed, Layout::kRaw), archive = header_of(packed, Layout::kArchive);
  const bool tiled = packed.layout != static_cast<int>(Layout::kArchive) && !too_large(tiles);
  if (const char* reason = too_large(tiled ? tiles : archive))
    fail("packed: ", packed.out_features, " x ", packed.in_features, " weights; ", reason);
  PackedArgument a{};
  a.packed = packed.address;
  a.matrix_bytes = packed.matrix_bytes;
  a.out_features = packed.out_features;
  a.in_features = packed.in_features;
  a.chunk_rows = archive.chunk_rows();
  a.matrices = packed.matrices;
  a.blocks = static_cast<uint32_t>(ceil_div(packed.out_features, kBlockRows));
  a.chunks = static_cast<uint32_t>(archive.blocks());
  a.stages_per_block = static_cast<uint32_t>(tiles.stages_per_block());
  a.layout = packed.layout;
  // Matrices too large for tiles are archives, or the kernels say that the header is impossible.
  if (!tiled) a.layout = static_cast<int>(Layout::kArchive);
  return a;
}

uint64_t group_rows(const PackedMatrices& packed) {
  const int32_t layout = packed_argument(packed).layout;
  const bool tiled = layout >= 0 && layout != static_cast<int>(Layout::kArchive);
  return tiled ? kBlockRows : packed_argument(packed).chunk_rows;
}

uint64_t sums_bytes(const PackedMatrices& packed) {
  return 8 * uint64_t{packed.matrices} * (uint64_t{packed_argument(packed).blocks} + 1);
}

}  // namespace unweight::cuda
