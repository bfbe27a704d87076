// Memory that a thread keeps from task to task.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace unweight {

// Fresh pages cost more than a small product, so a thread's buffer outlives the call; what only few shapes need beyond
// kKept is given back.
class Scratch {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKept = size_t{8} << 20;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // 64-byte aligned; what an earlier call returned is no longer valid.
  uint8_t* reserve(size_t bytes) {
    if (bytes > size_) {
      release();
      memory_.reset(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{kAlignment})));
      size_ = bytes;
    }
    return memory_.get();
  }
  void trim() {
    if (size_ > kKept) release();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  void release() {
    memory_.reset();
    size_ = 0;
  }
  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
};

inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace unweight
