// Memory for results whose number and size only the work itself shows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

namespace unweight {

// Asks for huge pages below [memory, memory + size), where the system has them: a fault every 4 KB costs more than
// filling the page. No effect on small ranges.
void advise_huge_pages(void* memory, size_t size);

// Memory that the system hasn't backed yet costs a fault every 4 KB when it is written, which can be more than the work
// of filling it. Memory that is `untouched` is better made ready by make_present(), piece by piece before each is
// written. Both are guesses and requests; nothing but speed depends on them.
bool untouched(const void* memory, size_t size);
void make_present(void* memory, size_t size);

// Hands out memory to be filled from the front, to one borrower at a time for each slab. What was filled stays until
// the arena goes.
class Arena {
 public:
  // `expected`: bytes in all, roughly.
  explicit Arena(size_t expected);

  struct Slab {
    uint8_t* memory;
    size_t size, used;
    uint8_t* end() const { return memory + used; }
  };
  // A slab with room for `size` bytes at its end().
  Slab borrow(size_t size);
  // `slab`, with `filled` bytes more in use.
  void give_back(Slab slab, size_t filled);

 private:
  std::mutex mutex_;
  std::vector<Slab> idle_;
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<uint8_t, Free>> all_;
  size_t slab_bytes_;
};

}  // namespace unweight
