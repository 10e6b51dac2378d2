#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures the CUDA backend on a device, in phases. Needs no package but what --pack brings.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/gpu.sh --phase LIST [--out DIR] [--filter REGEX] [--limit SECONDS] [--short] [--imitation]
                    [--programs DIR] [--arch LIST]
       tests/gpu.sh --phase report [--out DIR] [--results DIR]... [--docs FILE]
       tests/gpu.sh --pack [--imitation] [--arch LIST] [--python PYTHON]
       tests/gpu.sh --weigh
  --phase LIST    of smoke, steps, server, profile, train, conformance, sanitize, with commas; lease: the first four, which
                  take 450 s at most with the start, so that one command of 480 s runs them. A phase that outruns its limit
                  is ended, and the next one runs. report: only the report, and the table of a page
  --out DIR       where results.jsonl, log.txt and report.md go after each check; default $OUT, then build/gpu-results
  --filter REGEX  only checks PHASE/NAME in which it is found, as steps/step/cuda/low or sanitize/memcheck
  --limit SECONDS of each phase, in place of its own
  --short         the benchmark in short: its figures mean little then
  --imitation     runs everything over the host's imitation of CUDA (tests/support/cuda_host)
  --programs DIR  programs of this folder, a build folder or an unpacked pack, in place of the pack's
  --results DIR   report: the results of another call as well, those of --out last
  --docs FILE     report: writes the table between the marks of this page (docs/develop/lab/kernels.md)
  --pack          on Debian 12 with what deploy/install.sh installs: builds, writes build/gpu-pack/, and weighs
  --weigh         the weight of what travels, the files that git does not ignore and build/gpu-pack/; fails above 64 MiB
  --python PYTHON --pack: the packages of server, train and step/torch/soap are built for this interpreter, whose headers are
                  installed; default a python3.12 of this machine. none leaves them out, and these checks are skipped
  --arch LIST     GPU architectures, as CMAKE_CUDA_ARCHITECTURES takes them; default 90-real (H100, H200)
  --help          this text

A machine with a GPU needs the driver, CUDA's libraries (cuBLAS, cuSOLVER), glibc 2.36 and Python 3.11, and the folder
build/gpu-pack in the tree, which git ignores; phases server and train, and those steps that ours are compared with, need
torch as well. Where the pack's programs do not start there, they are built from source: that needs the CUDA toolkit 12.8
or later, CMake 3.25, g++, and make or ninja; without the pack, Abseil and the other libraries too. The build takes
minutes, which no limit counts; a build that is killed continues at the next call; --filter '^$' only builds.

Examples:
  tests/gpu.sh --pack                                      # here; then copy the tree with build/gpu-pack to the machine
  tests/gpu.sh --phase lease                               # there: one command of 480 s
  tests/gpu.sh --phase train                               # another of 300 s
  tests/gpu.sh --phase steps --filter /low_                # one phase, and of it the steps in low rank alone
  tests/gpu.sh --phase conformance,sanitize                # another command of 480 s
  tests/gpu.sh --phase report --results first --results second --out report --docs docs/develop/lab/kernels.md

Exit status: 0 when nothing failed and all checks came to an end, also where some or, without a GPU, all
were skipped, which the last line says; 1 otherwise. A missed target is reported and is no failure.
HELP
}

fail_usage() {
  echo "tests/gpu.sh: $1" >&2
  usage >&2
  exit 2
}

# An empty environment has no search path.
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
phase="" out=${OUT:-} programs="" docs="" filter="" arch=90-real python="" pack=no weigh=no imitation=() short=() limit=() results=()
while (( $# )); do
  case "$1" in
    --phase | --out | --filter | --limit | --programs | --results | --docs | --arch | --python)
      [[ -n "${2:-}" ]] || fail_usage "$1 needs a value"
      case "$1" in
        --phase) phase=$2 ;;
        --out) out=$(realpath -m "$2") ;;
        --filter) filter=$2 ;;
        --limit) limit=(--limit "$2") ;;
        --programs) programs=$(realpath -m "$2") ;;
        --results) results+=(--results "$(realpath -m "$2")") ;;
        --docs) docs=$(realpath -m "$2") ;;
        --arch) arch=$2 ;;
        --python) python=$2 ;;
      esac
      shift 2 ;;
    --pack) pack=yes; shift ;;
    --weigh) weigh=yes; shift ;;
    --short) short=(--short); shift ;;
    --imitation) imitation=(--imitation); shift ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done
[[ "$pack$weigh" == *yes* || -n "$phase" ]] || fail_usage "expected --phase, --pack or --weigh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${out:-build/gpu-results}")
packs=build/gpu-pack
if (( ${#imitation[@]} )); then packs=build/gpu-pack-imitation; fi
archive=$packs/programs.tar.gz
packages=$packs/packages.tar.gz
modules=$packs/python.tar.xz
build=build/gpu

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "tests/gpu.sh: expected python3, 3.11 or later, on PATH=$PATH; found $(python3 --version 2>&1 || true)" >&2
  exit 1
fi
run_py() {
  python3 -B tests/gpu/run.py "$@"
}
run() {
  echo "== $*"
  "$@"
}

# Whether a machine takes what travels. Deleted files and a missing pack weigh nothing.
weigh() {
  local tree carried
  tree=$({ git ls-files -coz --exclude-standard | du -cb --files0-from=- 2>/dev/null || true; } | awk 'END {print $1 + 0}')
  carried=$({ du -sb "$packs" 2>/dev/null || true; } | awk '{n = $1} END {print n + 0}')
  awk -v tree="$tree" -v carried="$carried" -v name="$packs" 'BEGIN {
    printf "tree %.1f MiB + %s %.1f MiB = %.1f of 64 MiB\n", tree / 2^20, name, carried / 2^20, (tree + carried) / 2^20
    exit tree + carried > 64 * 2^20 }' || { echo "tests/gpu.sh: expected at most 64 MiB" >&2; return 1; }
}

# Whether the sources can be built here. It is the compiler that knows.
has_abseil() {
  echo '#include "absl/status/status.h"' | g++ -E -x c++ - >/dev/null 2>&1
}

# Builds the programs of the phases in $build: with the packages of the pack where it has them.
build_programs() {
  # An old-style run path, which the libraries of a program follow too: a pack has bin/ and lib/.
  # shellcheck disable=SC2016,SC2054  # the loader's variable, not the shell's; the comma is the linker's
  local flags=("-DCMAKE_CUDA_ARCHITECTURES=$arch" -DPRECONDOR_ONEDNN=OFF '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib'
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags) names
  if ! command -v ninja >/dev/null; then flags+=(-G "Unix Makefiles"); fi
  if [[ -f "$packages" ]] && ! has_abseil; then
    rm -rf "$build-packages"
    mkdir -p "$build-packages"
    run tar -C "$build-packages" -xzf "$packages" || return
    flags+=("-DCMAKE_PREFIX_PATH=$PWD/$build-packages" -DCMAKE_LIBRARY_ARCHITECTURE=x86_64-linux-gnu
      -DPRECONDOR_WERROR=OFF)
  fi
  if [[ -z "${CUDACXX:-}" ]] && ! command -v nvcc >/dev/null && [[ -x /usr/local/cuda/bin/nvcc ]]; then
    PATH=$PATH:/usr/local/cuda/bin
  fi
  run cmake --preset cuda -B "$build" "${flags[@]}" || return  # where this function is a condition, errors do not end it
  mapfile -t names < <(run_py --programs "$build" "${imitation[@]}" --list-programs)
  run cmake --build "$build" --parallel "$(nproc)" --target "${names[@]}"
}

# The archives use gzip, for a bare machine can lack xz.
# The development packages' files under their paths in /usr, with the libraries that their links lead to. CMake's files
# of all but OpenBLAS find the others relative to themselves. OpenBLAS's Fortran runtime comes along.
pack_packages() {
  local names=(libabsl-dev libgtest-dev libgmock-dev libhwy-dev libisal-dev libopenblas-pthread-dev)
  local multiarch=x86_64-linux-gnu
  local blas=lib/$multiarch/openblas-pthread path library stage=$1
  dpkg-query -L "${names[@]}" | grep -E '^/usr/(include|lib)/' |
    grep -vE '/pkgconfig/|/openblas-pthread/.*\.a$|/lib(blas|lapack)\.' |
    while read -r path; do
      if [[ -d "$path" ]]; then continue; fi
      echo "$path"
      if [[ "$path" == *.so ]]; then
        readlink -f "$path"
        compgen -G "$path.*" || true
      fi
    done | sed 's|^/usr/||' | sort -u >"$stage/list"
  mkdir "$stage/packages"
  tar -C /usr -cf - --files-from="$stage/list" | tar -C "$stage/packages" -xf -
  ldd "/usr/$blas/libopenblas.so" | awk '$1 ~ /^lib(gfortran|quadmath)\./ {print $3}' |
    while read -r library; do cp -L "$library" "$stage/packages/$blas/"; done
  rm -rf "$stage/packages/lib/$multiarch/cmake/openblas"
  mv "$stage/packages/$blas/cmake/openblas" "$stage/packages/lib/$multiarch/cmake/"
  # shellcheck disable=SC2016  # CMake's variable, not the shell's
  sed -i 's|/usr/|${CMAKE_CURRENT_LIST_DIR}/../../../../|' \
    "$stage/packages/lib/$multiarch/cmake/openblas/OpenBLASConfig.cmake"
  tar -C "$stage/packages" -czf "$stage/packages.tar.gz" .
  mv "$stage/packages.tar.gz" "$packages"
}

# Stripped programs in bin/, and in lib/ what they need beyond glibc, the driver and CUDA's libraries; with the scripts
# of this folder, so that an unpacked archive runs by itself.
pack_programs() {
  local stage=$1 name path library names
  mkdir -p "$stage/programs/bin" "$stage/programs/lib" "$stage/programs/tests/bench"
  mapfile -t names < <(run_py --programs "$build" "${imitation[@]}" --list-programs)
  for name in "${names[@]}"; do
    path=$(find "$build/tests/conformance" "$build/tests/bench" -maxdepth 1 -name "$name" -type f)
    strip -o "$stage/programs/bin/$name" "$path"
    ldd "$path" | awk '$3 ~ /^\// {print $3}' |
      grep -vE '/(ld-linux|lib(c|m|dl|rt|pthread|resolv)\.so|lib(cuda|cublas|cublasLt|cusolver|cusparse|nvJitLink)\.so)'
  done | sort -u >"$stage/libraries"
  while read -r library; do cp -L "$library" "$stage/programs/lib/"; done <"$stage/libraries"
  cp -r tests/gpu tests/gpu.sh "$stage/programs/tests/"
  cp tests/bench/*.py "$stage/programs/tests/bench/"
  find "$stage/programs/tests" -name __pycache__ -prune -exec rm -r {} +
  echo "$(git rev-parse HEAD)$(test -z "$(git status --porcelain)" || echo ' and changes')" >"$stage/programs/revision"
  tar -C "$stage/programs" -czf "$stage/programs.tar.gz" .
  mv "$stage/programs.tar.gz" "$archive"
  du -sh "$stage/programs/bin" "$stage/programs/lib"
}

# Prints the interpreter that the packages are built for: one that runs, and has its headers and pip.
find_python() {
  python3 -B - "$1" <<'PYTHON'
import subprocess, sys
sys.path.insert(0, "tests/deploy")
import wheels
python = sys.argv[1] or wheels.interpreters().get("3.12", "python3.12")
done = subprocess.run(["env", python, "-c", wheels.CAN_BUILD], stderr=subprocess.PIPE, check=False)
if done.returncode:
    sys.exit(f"tests/gpu.sh: expected an interpreter with its headers and pip, got {python}: {done.stderr.decode().strip()[-300:]}\n"
             "--python PYTHON names another; --python none packs without the Python packages")
print(python)
PYTHON
}

# The client with the server and its backend, and HeavyBall, unpacked for PYTHONPATH.
pack_python() {
  local stage=$1
  run env "CMAKE_ARGS=-DPRECONDOR_ONEDNN=OFF -DCMAKE_CUDA_ARCHITECTURES=$arch" \
    deploy/build-wheel.sh --python "$python" --build-dir build/wheel-gpu --output "$stage/wheels"
  run "$python" -m pip download --quiet --no-deps --dest "$stage/wheels" heavyball==3.2.1
  python3 - "$stage" <<'PYTHON'
import pathlib, sys, tarfile, zipfile
stage = pathlib.Path(sys.argv[1])
for wheel in (stage / "wheels").iterdir():
    with zipfile.ZipFile(wheel) as files:
        for one in files.infolist():
            path = pathlib.Path(files.extract(one, stage / "python"))
            path.chmod(0o755 if one.external_attr >> 16 & 0o100 else 0o644)
for tool in ("precondorctl", "precondor-perf"):
    (stage / "python/precondor/bin" / tool).unlink()
with tarfile.open(stage / "python.tar.xz", "w:xz") as archive:
    archive.add(stage / "python", "python")
PYTHON
  mv "$stage/python.tar.xz" "$modules"
}

if [[ "$pack" == yes ]]; then
  if (( ${#imitation[@]} )); then python=none; fi
  if [[ "$python" != none ]]; then python=$(find_python "$python"); fi
  build_programs
  mkdir -p "$packs"
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  pack_programs "$stage"
  if (( ${#imitation[@]} == 0 )); then
    pack_packages "$stage"
  fi
  if [[ "$python" == none ]]; then rm -f "$modules"; else pack_python "$stage"; fi
  weigh
  exit
fi
if [[ "$weigh" == yes ]]; then weigh; exit; fi

if [[ "$phase" == report ]]; then
  run_py --programs . --phase report --out "$out" "${results[@]}" ${docs:+--docs "$docs"}
  exit
fi

schedule=$(run_py --list-phases "$phase" "${limit[@]}") || exit
# Whether the programs of a folder start; the reason is in the log.
mkdir -p "$out"
start() {
  timeout 25 python3 -B tests/gpu/run.py --programs "$1" "${imitation[@]}" --starts | tee -a "$out/log.txt" ||
    (( $? == 124 ))  # slow, which is no reason to build
}
if [[ -z "$programs" ]]; then
  if [[ -d bin && -f revision ]]; then  # an unpacked pack
    programs=.
  elif [[ -f "$archive" ]]; then
    programs=$packs-programs
    if [[ ! "$programs/revision" -nt "$archive" ]]; then
      rm -rf "$programs"
      mkdir -p "$programs"
      tar -C "$programs" -xzmf "$archive"
      if [[ -f "$modules" ]]; then python3 -m tarfile -e "$modules" "$programs"; fi
    fi
  elif [[ -f "$packages" ]] || has_abseil; then
    programs=$build
  else
    echo "tests/gpu.sh: expected $PWD/$archive: make it with tests/gpu.sh --pack on Debian 12, and copy $packs here with" \
      "the tree, although git ignores it. To build from source, expected g++ and Abseil" >&2
    exit 1
  fi
  if [[ "$programs" == "$build" ]] || ! start "$programs"; then
    if [[ ! -f CMakeLists.txt ]]; then
      echo "tests/gpu.sh: expected programs that start, or the source tree to build them from; found neither in $PWD" >&2
      exit 1
    fi
    echo "building from source; the compiler's output is in $out/build.log"
    build_programs >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
    programs=$build
  fi
fi
# A process for each phase, which ends by itself before timeout's first signal, unless the driver holds it.
status=0
while read -r name seconds grace <&3; do
  timeout --foreground --kill-after="$grace" "$seconds" python3 -B tests/gpu/run.py --programs "$programs" --phase "$name" \
    --out "$out" --filter "$filter" "${limit[@]}" "${short[@]}" "${imitation[@]}" 3<&- || status=1
done 3<<<"$schedule"
if (( status )); then run_py --phase report --out "$out" | tail -n 2; fi
exit "$status"
