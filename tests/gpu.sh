#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CUDA backend with its tests, runs them on a device and reports. Needs no package but what --pack brings.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/gpu.sh [--json FILE] [--short] [--arch LIST] [--jobs N]
       tests/gpu.sh --pack
  --json FILE   the report; default build/gpu/report.json: device, driver, CUDA, revision, each suite, the rows measured
  --short       no compute-sanitizer, the benchmark in short: its figures mean little then
  --arch LIST   GPU architectures, as CMAKE_CUDA_ARCHITECTURES takes them (90-real); default: all that the tree is made for
  --jobs N      how many compilers at a time; default: one a core
  --pack        on Debian 12 with what deploy/install.sh installs: writes build/gpu-deps.tar.xz
  --help        this text

A machine with a GPU needs: CUDA toolkit 12.8 or later with cuBLAS and cuSOLVER, g++ 11, CMake 3.25, make
or ninja, Python 3, and glibc 2.34. Abseil, GoogleTest, OpenBLAS, Highway and the like come from build/gpu-deps.tar.xz where
that file lies in the tree, otherwise from the system.

Examples:
  tests/gpu.sh --pack               # here; then copy the tree with build/gpu-deps.tar.xz to the machine with the GPU
  tests/gpu.sh --json report.json   # there: build, suites, compute-sanitizer where it is found, benchmark
  tests/gpu.sh --arch 90-real       # for an H100 or H200 alone: builds in a third of the time

Exit status: 0 when nothing failed, also without a GPU, where the last line says that nothing ran on a device; 1 otherwise.
A missed target of the benchmark is reported and is no failure.
HELP
}

fail_usage() {
  echo "tests/gpu.sh: $1" >&2
  usage >&2
  exit 2
}

pack=no
json=""
short=()
arch=()
jobs=$(nproc)
while (( $# )); do
  case "$1" in
    --json | --arch | --jobs)
      [[ -n "${2:-}" ]] || fail_usage "$1 needs a value"
      case "$1" in
        --json) json=$(realpath -m "$2") ;;
        --arch) arch=("-DCMAKE_CUDA_ARCHITECTURES=$2") ;;
        --jobs) jobs=$2 ;;
      esac
      shift 2 ;;
    --pack) pack=yes; shift ;;
    --short) short=(--short); shift ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
  echo "== $*"
  "$@"
}

archive=build/gpu-deps.tar.xz
multiarch=x86_64-linux-gnu

# The development packages' files under their paths in /usr, with the libraries that their links lead to. CMake's files of
# all but OpenBLAS find the others relative to themselves. Debian 12's libraries want glibc 2.34 and g++ 11's libstdc++
# (GLIBCXX_3.4.29), which does not come along: the compiler there brings it. OpenBLAS's Fortran runtime does.
pack_dependencies() {
  local packages=(libabsl-dev libgtest-dev libgmock-dev libbenchmark-dev libhwy-dev libisal-dev libopenblas-pthread-dev)
  local blas=lib/$multiarch/openblas-pthread path library
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  dpkg-query -L "${packages[@]}" | grep -E '^/usr/(include|lib)/' |
    grep -vE '/pkgconfig/|/openblas-pthread/.*\.a$|/lib(blas|lapack)\.' |
    while read -r path; do
      if [[ -d "$path" ]]; then continue; fi
      echo "$path"
      if [[ "$path" == *.so ]]; then
        readlink -f "$path"
        compgen -G "$path.*" || true
      fi
    done | sed 's|^/usr/||' | sort -u >"$stage/list"
  mkdir "$stage/deps"
  tar -C /usr -cf - --files-from="$stage/list" | tar -C "$stage/deps" -xf -
  ldd "/usr/$blas/libopenblas.so" | awk '$1 ~ /^lib(gfortran|quadmath)\./ {print $3}' |
    while read -r library; do cp -L "$library" "$stage/deps/$blas/"; done
  rm -rf "$stage/deps/lib/$multiarch/cmake/openblas"
  mv "$stage/deps/$blas/cmake/openblas" "$stage/deps/lib/$multiarch/cmake/"
  # shellcheck disable=SC2016  # CMake's variable, not the shell's
  sed -i 's|/usr/|${CMAKE_CURRENT_LIST_DIR}/../../../../|' "$stage/deps/lib/$multiarch/cmake/openblas/OpenBLASConfig.cmake"
  git rev-parse HEAD >"$stage/deps/revision"
  mkdir -p build
  XZ_OPT=-3 tar -C "$stage/deps" -cJf "$archive" .
  echo "packed $(du -sh "$stage/deps" | cut -f1) as $archive, $(du -h "$archive" | cut -f1)"
}

if [[ "$pack" == yes ]]; then
  pack_dependencies
  exit 0
fi

build=build/gpu
flags=("${arch[@]}" -DPRECONDOR_ONEDNN=OFF -DPRECONDOR_WERROR=OFF)  # another compiler than ours may warn of more
if ! command -v ninja >/dev/null; then flags+=(-G "Unix Makefiles"); fi
if [[ -f "$archive" ]]; then
  echo "packages: $archive"
  rm -rf "$build-deps"
  mkdir -p "$build-deps"
  run cmake -E chdir "$build-deps" cmake -E tar xf "../../$archive"
  # An old-style run path also holds for what the libraries themselves need.
  flags+=("-DCMAKE_PREFIX_PATH=$PWD/$build-deps" "-DCMAKE_LIBRARY_ARCHITECTURE=$multiarch"
    "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags")
else
  echo "packages: the system's (there is no $archive, which tests/gpu.sh --pack makes elsewhere)"
fi
if [[ -z "${CUDACXX:-}" ]] && ! command -v nvcc >/dev/null && [[ -x /usr/local/cuda/bin/nvcc ]]; then
  PATH=$PATH:/usr/local/cuda/bin
fi
run cmake --preset cuda -B "$build" --fresh "${flags[@]}"
mapfile -t programs < <(python3 -B tests/gpu_run.py --build-dir "$build" --list)
run cmake --build "$build" --parallel "$jobs" --target "${programs[@]}"
run python3 -B tests/gpu_run.py --build-dir "$build" --json "${json:-$build/report.json}" "${short[@]}"
