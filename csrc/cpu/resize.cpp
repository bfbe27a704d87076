// Copies of packed matrices, with another row_bytes if wanted.
#include <algorithm>
#include <cstring>

#include "arena.h"
#include "codec.h"

namespace unweight {

void resize(const uint8_t* bytes, size_t size, uint8_t* out, size_t out_size, const Parallel& parallel) {
  // Not only for the copy: a product reads its weights from huge pages one and a half times as fast.
  advise_huge_pages(out, out_size);
  constexpr size_t kPiece = size_t{1} << 20;
  parallel((out_size + kPiece - 1) / kPiece, [&](int64_t piece) {
    const size_t begin = piece * kPiece, end = std::min(begin + kPiece, out_size);
    const size_t copied = std::min(std::max(begin, size), end);
    std::memcpy(out + begin, bytes + begin, copied - begin);
    std::memset(out + copied, 0, end - copied);
  });
}

}  // namespace unweight
