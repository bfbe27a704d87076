#include "parallel.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "../format/error.h"

namespace unweight {
namespace {

// Tasks differ in length (compressed bytes, raw stages), so threads take the next one from a counter instead of a
// fixed share. No exception may cross torch's C callback: the first is kept, and thrown in the caller.
class Run {
 public:
  Run(int64_t n, const std::function<void(int64_t)>& task) : n_(n), task_(task) {}

  void work() noexcept {
    try {
      while (true) {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= n_) return;
        task_(i);
      }
    } catch (...) {
      next_.store(n_, std::memory_order_relaxed);  // the others stop after the task they are in
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t n_;
  const std::function<void(int64_t)>& task_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

Parallel torch_threads(int64_t threads) {
  if (threads < 0) fail("threads: ", threads, ", expected 0 (as many as torch uses) or more");
  return [threads](int64_t n, const std::function<void(int64_t)>& task) {
    const int64_t available = threads == 1 ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t workers = std::min(n, threads ? std::min(threads, available) : available);
    if (workers <= 1) {
      for (int64_t i = 0; i < n; i++) task(i);
      return;
    }
    Run run(n, task);
    torch::stable::parallel_for(0, workers, 1, [&run](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; w++) run.work();
    });
    run.rethrow();
  };
}

}  // namespace unweight
