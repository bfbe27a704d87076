// torch's threads for the torch-free code.
#pragma once
#include "../cpu/codec.h"

namespace unweight {

// threads: 0 as many as torch uses, 1 the caller's alone, n at most n.
Parallel torch_threads(int64_t threads = 0);

}  // namespace unweight
