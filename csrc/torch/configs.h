// The fused kernel's configurations, as operators name them: by the rows of x that each multiplies at once.
#pragma once
#include <cstdint>
#include <vector>

namespace unweight {

constexpr int64_t kScratch = 0;  // in their place: the weight is decoded to memory, and F.linear multiplies

// For weights of a layout, or of any (-1).
std::vector<int64_t> supported_configs(int64_t layout);

}  // namespace unweight
