#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with PyPI's torch for the CPU, and what the tests of the Python client want beside it.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/torch2.sh [--print | --bench] [--help]
  --print   only print where the environment is, or would be
  --bench   add what tests/bench/training compares with and reads photographs with
  --help    this text
The environment is for Debian's python3, which the build's extension is for. It is kept outside the checkout, in
${XDG_CACHE_HOME:-~/.cache}/precondor, under a name that changes with its packages. The last line printed is its path.
The first time costs 0.8 GB of download, 2.2 GB of disk and 1 to 3 minutes; later runs cost nothing. Environments of other packages
stay, as another checkout may use them: delete what is older than all of your checkouts by hand (torch2-* there).

PyPI's torch for x86 is built for CUDA. The 4 GB of NVIDIA's libraries that it asks for are not installed: empty libraries with
their names and symbols take their place, so that it loads on a machine without a GPU. It works on the CPU alone.
HELP
}

only_print=no
bench=no
case "${1:-}" in
  "") ;;
  --print) only_print=yes ;;
  --bench) bench=yes ;;
  --help | -h) usage; exit 0 ;;
  *) echo "tests/torch2.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
esac

torch=torch==2.15.0
packages=(
  'numpy==1.26.4'  # Debian's pybind11, with which the extension is built, is from before version 2
  transformers==5.23.0 accelerate lightning==2.6.6 setuptools grpcio protobuf
  jax==0.4.38 jaxlib==0.4.38 optax==0.2.4 chex==0.1.88
  matplotlib==3.11.2  # the figure of an example
)
bench_packages=(pillow==13.0.0 kron-torch==0.3.3)  # what they need beside is above
name=torch2-$(sha256sum <<<"1 $torch ${packages[*]}" | cut -c 1-12)  # 1: counts changes of what is below
cache=${XDG_CACHE_HOME:-$HOME/.cache}/precondor
venv=$cache/$name
if [[ "$only_print" == yes ]]; then echo "$venv"; exit 0; fi
mkdir -p "$cache"
exec 9>"$cache/torch2.lock"
flock 9

finish() {
  if [[ "$bench" == yes ]]; then "$venv/bin/pip" install --quiet --no-input --disable-pip-version-check --no-deps "${bench_packages[@]}" >&2; fi
  echo "$venv"
}
if [[ -e "$venv/complete" ]]; then finish; exit 0; fi

# Every NVIDIA library that torch's own ask for, but that is missing: an empty one of its name. All their symbols are in one
# library that those load: the loader refuses a versioned symbol in the very library that the version names.
make_stubs() {
  local folder=$1 source=$1/stubs.c library
  nm -D --undefined-only "$folder"/*.so | sed -nE 's/^ *U ((cu|nv|nccl)[^@]*).*/void \1(void) {}/p' | grep -v ' cuda' | sort -u >"$source"
  gcc -shared -fPIC -w -Wl,-soname,libcuda_stubs.so -o "$folder/libcuda_stubs.so" "$source"
  readelf -d "$folder"/*.so | sed -nE 's/.*NEEDED.*\[(lib(cu|nv|nccl)[^]]*)\]/\1/p' | grep -vE "libcuda(rt)?\.so" | sort -u |
    while read -r library; do
      gcc -shared -Wl,-soname,"$library" -Wl,-rpath,"\$ORIGIN" -Wl,--no-as-needed -o "$folder/$library" "$folder/libcuda_stubs.so"
    done
  rm "$source"
}

echo "== $venv" >&2
rm -rf "$venv"
/usr/bin/python3 -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --no-input --disable-pip-version-check --no-cache-dir)
"${pip[@]}" --no-deps "$torch" nvidia-cuda-runtime >&2
site=$(echo "$venv"/lib/python3*/site-packages)
sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' "$site"/torch-*.dist-info/METADATA
make_stubs "$site/torch/lib"
"${pip[@]}" "$torch" "${packages[@]}" >&2
"$venv/bin/python" -c 'import torch, torch.distributed; assert torch.distributed.is_gloo_available(); torch.linalg.eigh(torch.eye(3))'
touch "$venv/complete"
finish
