#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building and testing Precondor needs on Debian 12. Idempotent; quick when all is there.
# Usage: deploy/install.sh [--test | --bench]   (--test adds what only tests and lint need, and deploy/torch2.sh; --bench a peer to
# compare with and the examples' text)
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache lld git pkgconf ca-certificates
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  prometheus-cpp-dev libcurl4-openssl-dev zlib1g-dev
  libopenblas-pthread-dev libdnnl-dev ocl-icd-opencl-dev libisal-dev libhwy-dev
  libyaml-cpp-dev nlohmann-json3-dev libgtest-dev libgmock-dev libbenchmark-dev
  python3 python3-dev pybind11-dev
)
test_packages=(
  clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev shellcheck
  etcd-server iproute2
  python3-venv python3-yaml python3-grpcio python3-protobuf python3-numpy
  python3-torch  # 570 MB with what it needs; has gloo
  bible-kjv      # the text of an example
)

bench_packages=(python3-torch bible-kjv)

packages=("${build_packages[@]}")
case "${1:-}" in
  "") ;;
  --test) packages+=("${test_packages[@]}") ;;
  --bench) packages+=("${bench_packages[@]}") ;;
  --help | -h)
    echo "Usage: deploy/install.sh [--test | --bench]"
    echo "Installs what building needs on Debian 12; --test adds what only tests and lint need, and runs"
    echo "deploy/torch2.sh; --bench adds torch and a text, which benchmarks run beside ours and examples train on."
    exit 0 ;;
  *) echo "install: unknown argument: $1; see --help" >&2; exit 2 ;;
esac

# What is not Debian's. Without a package index the tests that want it are shown as skipped.
install_torch2() {
  if [[ "$1" == --test ]]; then
    "$(dirname "${BASH_SOURCE[0]}")/torch2.sh" >&2 || echo "install: deploy/torch2.sh failed; the tests with torch 2 will be skipped" >&2
  fi
}

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if (( ${#missing[@]} == 0 )); then
  echo "install: all ${#packages[@]} packages are there"
  install_torch2 "${1:-}"
  exit 0
fi

sudo=()
if (( EUID != 0 )); then
  if ! command -v sudo >/dev/null; then
    echo "install: missing: ${missing[*]}" >&2
    echo "install: not root and no sudo; install them with: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi
if ! command -v apt-get >/dev/null; then
  echo "install: this is not Debian; install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
echo "install: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -q
"${sudo[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
install_torch2 "${1:-}"
