#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
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

#ifdef __linux__
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels refuse
#endif

uintptr_t page_bytes() {
  static const uintptr_t bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

bool untouched(const void* memory, size_t size) {
  const uintptr_t page = page_bytes(), begin = reinterpret_cast<uintptr_t>(memory);
  if (size < 4 * page) return false;
  for (uintptr_t at : {begin + page, begin + size / 2, begin + size - 2 * page}) {
    unsigned char present = 1;
    if (mincore(reinterpret_cast<void*>(at / page * page), page, &present) != 0 || present & 1) return false;
  }
  return true;
}

void make_present(void* memory, size_t size) {
  const uintptr_t page = page_bytes(), begin = reinterpret_cast<uintptr_t>(memory) / page * page;
  madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(memory) + size - begin, kPopulateWrite);
}
#else
bool untouched(const void*, size_t) { return false; }
void make_present(void*, size_t) {}
#endif

Arena::Arena(size_t expected) : slab_bytes_(std::min(expected, kLargestSlab)) {}

Arena::Slab Arena::borrow(size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Slab& slab : idle_) {
    if (slab.size - slab.used < size) continue;
    const Slab found = slab;
    slab = idle_.back();
    idle_.pop_back();
    return found;
  }
  size_t bytes = std::max(size, slab_bytes_);
  const bool huge = bytes >= 2 * kHugePage;
  if (huge) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  auto* const memory = static_cast<uint8_t*>(huge ? std::aligned_alloc(kHugePage, bytes) : std::malloc(bytes));
  if (!memory) throw std::bad_alloc();
  all_.push_back(std::unique_ptr<uint8_t, Free>(memory));
  if (huge) advise_huge_pages(memory, bytes);
  return {memory, bytes, 0};
}

void Arena::give_back(Slab slab, size_t filled) {
  slab.used = (slab.used + filled + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slab.used < slab.size) idle_.push_back(slab);
}

}  // namespace unweight
