// The one exception of the torch-free code.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace unweight {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Builds the message only when the check fails, so checks can stand in front of every access.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace unweight
