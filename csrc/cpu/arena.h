// Memory for results whose number and size only the work itself shows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace unweight {

// Asks for huge pages below [memory, memory + size), where the system has them: a fault every 4 KB costs more than
// filling the page. No effect on small ranges.
void advise_huge_pages(void* memory, size_t size);

// Hands out pieces that live as long as it does. Threads may share it.
class Arena {
 public:
  // `expected`: bytes in all, roughly.
  explicit Arena(size_t expected);
  ~Arena();
  Arena(const Arena&) = delete;
  uint8_t* take(size_t size);

 private:
  struct Slab {
    void* memory;
    size_t size;
  };
  std::mutex mutex_;
  std::vector<Slab> slabs_;
  size_t slab_bytes_, used_ = 0;
};

}  // namespace unweight
