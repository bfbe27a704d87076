#!/usr/bin/env bash
# The portable code on another processor: cross-compiled for aarch64 and run in emulation, with the fuzz driver.
# Needs g++-aarch64-linux-gnu and qemu-user (Debian's names); installs them where it may.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: needs aarch64-linux-gnu-g++ and qemu-aarch64: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  fi
  echo "installing g++-aarch64-linux-gnu and qemu-user (about 100 MB)"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++-aarch64-linux-gnu qemu-user >/dev/null
fi

objects=$root/build/aarch64
rm -rf "$objects"
mkdir -p "$objects"
sources=(csrc/format/*.cpp tests/native/fuzz_driver.cpp)
for file in csrc/cpu/*.cpp; do
  case $file in *_avx512.cpp) ;; *) sources+=("$file") ;; esac
done
printf '%s\n' "${sources[@]}" | xargs -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c '
  aarch64-linux-gnu-g++ -std=c++17 -O2 -Wall -Wextra -Werror -ffp-contract=off -DUNWEIGHT_PORTABLE_ONLY \
    -c "$1" -o "$2/$(basename "$1" .cpp).o"' compile {} "$objects"
aarch64-linux-gnu-g++ -static -o "$objects/fuzz_driver" "$objects"/*.o
qemu-aarch64 "$objects/fuzz_driver" "${1:-2}"
