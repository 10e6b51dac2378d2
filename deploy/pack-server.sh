#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs a built server with the libraries it needs, for machines that lack gRPC and the like.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/pack-server.sh [--binaries DIR] [--tree DIR] [--help]
  --binaries DIR  The programs come from this build tree; default build/dev
  --tree DIR      The script writes this folder for container images (deploy/docker), and no archive. The folder has bin,
                  lib, the licences of the libraries, and a bill of materials, sbom.cdx.json
  --help          this text
Writes build/server.tar.xz: precondor-server, the program that deploy/quickstart.sh trains with, libprecondor-cuda.so where
it was built, and in lib all libraries they need but glibc, the C++ runtime and CUDA's own. Built on Debian 12, it wants
glibc 2.34 and g++ 12's libstdc++.

There, in a copy of this repository, with CUDA's libraries where the loader finds them:
  mkdir -p build/server && tar -C build/server -xJf build/server.tar.xz
  export LD_LIBRARY_PATH=$PWD/build/server/lib
  PRECONDOR_BACKEND=cuda deploy/quickstart.sh --binaries build/server
HELP
}

fail_usage() {
  echo "deploy/pack-server.sh: $1" >&2
  usage >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binaries=$root/build/dev
tree=""
while (( $# )); do
  case "$1" in
    --binaries) [[ -n "${2:-}" ]] || fail_usage "--binaries needs a folder"; binaries=$(realpath -m "$2"); shift 2 ;;
    --tree) [[ -n "${2:-}" ]] || fail_usage "--tree needs a folder"; tree=$(realpath -m "$2"); shift 2 ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done
cd "$root"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/lib"
objects=()
programs=(server/precondor-server)
if [[ -n "$tree" ]]; then
  programs+=(client/cpp/tools/precondorctl client/cpp/tools/precondor-perf)
else
  programs+=(tests/e2e/trainer/digits_trainer)
fi
for program in "${programs[@]}"; do
  [[ -x "$binaries/$program" ]] || { echo "deploy/pack-server.sh: no program $binaries/$program" >&2; exit 1; }
  if [[ -n "$tree" ]]; then
    install -D -t "$stage/bin" "$binaries/$program"
  else
    install -D "$binaries/$program" "$stage/$program"  # where quickstart.sh looks for it
  fi
  objects+=("$binaries/$program")
done
module=$binaries/kernels/cuda/libprecondor-cuda.so
if [[ -f "$module" ]]; then
  cp "$module" "$stage/lib/"
  objects+=("$module")
else
  echo "deploy/pack-server.sh: no $module: the CPU's backend alone"
fi
from_the_machine='^(ld-linux-x86-64|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|cuda|cublas|cublasLt|cusolver|cusparse|nvJitLink))\.so'
libraries=$(ldd "${objects[@]}")
if missing=$(grep 'not found' <<<"$libraries"); then
  echo "deploy/pack-server.sh: $missing" >&2
  exit 1
fi
awk -v leave="$from_the_machine" '$3 ~ /^\// && $1 !~ leave {print $3}' <<<"$libraries" | sort -u |
  xargs cp -L -t "$stage/lib"
find "$stage" -type f -exec strip --strip-debug {} +
if [[ -n "$tree" ]]; then
  deploy/sbom.py --licences "$stage/licences" --bill "$stage/sbom.cdx.json" \
    --static libhwy-dev --static libabsl-dev --static nlohmann-json3-dev "${objects[@]}"
  cp LICENSE "$stage/licences/precondor"
  chmod -R u=rwX,go=rX "$stage"
  mkdir -p "$(dirname "$tree")"
  rm -rf "$tree"
  mv -T "$stage" "$tree"
  trap - EXIT
  echo "packed $(find "$tree/lib" -type f | wc -l) libraries, $(du -sh "$tree" | cut -f1), as $tree"
  exit 0
fi
mkdir -p build
XZ_OPT=-3 tar -C "$stage" -cJf build/server.tar.xz .
echo "packed $(find "$stage/lib" -type f | wc -l) libraries, $(du -sh "$stage" | cut -f1), as build/server.tar.xz," \
  "$(du -h build/server.tar.xz | cut -f1)"
