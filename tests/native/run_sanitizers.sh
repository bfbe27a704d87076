#!/usr/bin/env bash
# The torch-free C++ code as a program of its own (codec round trips, the corpus of damaged tensors) under ASan and
# UBSan: as this CPU runs it, and from the portable files alone.
#
#   run_sanitizers.sh [PYTHON] [ARGUMENTS OF THE DRIVER…]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${1:-python3}
shift || true

export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1:abort_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1
for variant in "" --portable; do
  directory=$root/build/sanitizers$variant
  "$python" "$root/tools/native_build.py" $variant "$directory"
  echo "fuzz_driver $variant $*"
  "$directory/fuzz_driver" "$@"
  # What hypothesis made in a run of the tests with UNWEIGHT_CORPUS=build/corpus.
  if [ -d "$root/build/corpus" ]; then "$directory/fuzz_driver" --replay "$root/build/corpus"; fi
done
