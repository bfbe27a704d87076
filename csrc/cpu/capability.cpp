#include "capability.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../format/error.h"

namespace unweight {
namespace {

Capability best_of_this_cpu() {
#ifdef UNWEIGHT_PORTABLE_ONLY
  return Capability::kPortable;
#else
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
  return avx512 ? Capability::kAvx512 : Capability::kPortable;
#endif
}

Capability at_start() {
  const char* wanted = std::getenv("UNWEIGHT_CPU");
  if (!wanted || !*wanted) return best_of_this_cpu();
  if (std::strcmp(wanted, "portable")) fail("UNWEIGHT_CPU: '", wanted, "', expected portable, or nothing for the best");
  return Capability::kPortable;
}

std::atomic<Capability>& current() {
  static std::atomic<Capability> value{at_start()};
  return value;
}

}  // namespace

Capability capability() { return current().load(std::memory_order_relaxed); }

void set_capability(Capability wanted) {
  if (wanted > best_of_this_cpu())
    fail("level: ", static_cast<int>(wanted),
         " (AVX-512 with VBMI2 and BF16) is not supported by this machine or build");
  current().store(wanted, std::memory_order_relaxed);
}

}  // namespace unweight
