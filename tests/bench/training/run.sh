#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains small models with several optimizers, and prints tables of their held-out losses.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/bench/training/run.sh [--json FILE] [--build-dir DIR] [ARGUMENTS OF bench.py...]
  --json FILE      The rows are added to this file, and existing rows are kept; default build/training.json
  --build-dir DIR  where precondor-server and the Python client were built; default build/dev
  --help           this text; arguments of bench.py are --task, --method, --seeds, --times and --table
The packages are those of deploy/install.sh --bench. Everything runs on one thread but the server. A whole run takes some hours on two
cores; it can be stopped at any time, and goes on with the next call.
HELP
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
json=$root/build/training.json
build=$root/build/dev
arguments=()
while (( $# )); do
  case "$1" in
    --json) json=$(realpath -m "${2:?--json needs a file}"); shift 2 ;;
    --build-dir) build=$(realpath -m "${2:?--build-dir needs a folder}"); shift 2 ;;
    --help | -h) usage; exit 0 ;;
    *) arguments+=("$1"); shift ;;
  esac
done

python=$("$root/tests/torch2.sh" --bench)/bin/python
export PATH=$build/server:$PATH PYTHONPATH=$build/client/python OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export TORCH_COMPILE_DISABLE=1  # kron-torch would compile what runs for seconds
bench=("$python" -B "$root/tests/bench/training/bench.py" --json "$json")
"${bench[@]}" "${arguments[@]}"
[[ " ${arguments[*]} " == *" --table "* ]] || "${bench[@]}" --table
