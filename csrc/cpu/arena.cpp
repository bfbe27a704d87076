#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace unweight {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLargestSlab = size_t{64} << 20;

}  // namespace

void advise_huge_pages(void* memory, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + size) / kHugePage * kHugePage;
  // Only advice: a failure changes nothing but the speed.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)size;
#endif
}

Arena::Arena(size_t expected) : slab_bytes_(std::min(expected, kLargestSlab)) {}

Arena::~Arena() {
  for (const Slab& slab : slabs_) std::free(slab.memory);
}

uint8_t* Arena::take(size_t size) {
  size = (size + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slabs_.empty() || slabs_.back().size - used_ < size) {
    const size_t bytes = (std::max(size, slab_bytes_) + kHugePage - 1) / kHugePage * kHugePage;
    const bool huge = slab_bytes_ >= 2 * kHugePage;
    void* memory = huge ? std::aligned_alloc(kHugePage, bytes) : std::malloc(std::max(size, slab_bytes_));
    if (!memory) throw std::bad_alloc();
    if (huge) advise_huge_pages(memory, bytes);
    slabs_.push_back({memory, huge ? bytes : std::max(size, slab_bytes_)});
    used_ = 0;
  }
  uint8_t* piece = static_cast<uint8_t*>(slabs_.back().memory) + used_;
  used_ += size;
  return piece;
}

}  // namespace unweight
