// Which instance of the fused product a call runs, or whether the weight is decoded to scratch for torch's own product.
// Torch-free, CUDA-free, a function of its arguments and of the tuned table that was set for that GPU, if one was.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config.h"

namespace unweight::cuda {

struct Choice {
  bool scratch;  // decode everything, then F.linear: `config` is of no use then
  LinearConfig config;
  int config_index;  // in kLinearConfigs; -1 for scratch
};

// `layout` as the header numbers it, or kAnyLayout; archives are always decoded. `tokens` is M: of each expert, about.
// Up to kInvariantTokens the instance depends on `tokens` alone, and all that can be chosen give the same bits.
// `gpu`: the name that the device has for itself, whose tuned table is looked at; empty for none.
Choice choose(int layout, uint64_t out_features, uint64_t in_features, uint64_t tokens, int multiprocessors,
              const std::string& gpu = {});

// Calls whose numbers of tokens round up to the same power of two are chosen for alike: from 8 to 16384.
uint64_t token_bucket(uint64_t tokens);

// One measured choice.
struct TunedEntry {
  int layout;
  uint64_t out_features, in_features;
  uint64_t tokens;   // a bucket
  int config_index;  // in kLinearConfigs, or -1 for scratch
};

// Replaces the table of GPUs of that name; an empty one removes it. Calls that run meanwhile see the old one or the new
// one. Throws Error for an entry that isn't of an instance, or that would make results up to kInvariantTokens depend on
// the number of tokens (only an instance that takes all of the bucket's tokens at once, and at most that many, may be
// chosen there).
void set_tuned(const std::string& gpu, const std::vector<TunedEntry>& entries);

// The tables' entries, for tests and for `unweight tune`.
std::vector<TunedEntry> tuned(const std::string& gpu);

}  // namespace unweight::cuda
