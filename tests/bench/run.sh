#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks and prints rows {name, value, unit, limit, ratio, target, pass}.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/bench/run.sh [--filter RE] [--json FILE] [--short] [--build-dir DIR] [--help]
  --filter RE      only benchmarks whose name matches; the machine's limits are always measured
  --json FILE      write the rows there as well
  --short          one quick repetition: shows that everything runs; the figures mean little
  --build-dir DIR  where the programs were built; default build/dev, which is then brought up to date first
  --help           this text
A row's limit is what this machine allows, measured in the same run. The exit status is 0 when every row passed.
HELP
}

fail_usage() {
  echo "tests/bench/run.sh: $1" >&2
  usage >&2
  exit 2
}

filter="."
json=""
short=no
build=""
while (( $# )); do
  case "$1" in
    --filter | --json | --build-dir)
      [[ -n "${2:-}" ]] || fail_usage "$1 needs a value"
      case "$1" in
        --filter) filter=$2 ;;
        --json) json=$(realpath -m "$2") ;;
        --build-dir) build=$(realpath -m "$2") ;;
      esac
      shift 2 ;;
    --short) short=yes; shift ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z "$build" ]]; then
  build=build/dev
  cmake --preset dev >/dev/null
  cmake --build --preset dev
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
results=()

# One thread: what a shard's strand has, and what the limits are measured with.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
repetitions=5
min_time=0.2
if [[ "$short" == yes ]]; then
  repetitions=1
  min_time=0.01
fi
echo "== kernels" >&2
"$build/tests/bench/kernels_bench" --benchmark_filter="^limit/|($filter)" --benchmark_min_time="$min_time" \
  --benchmark_repetitions="$repetitions" --benchmark_enable_random_interleaving=true \
  --benchmark_out="$out/kernels.json" --benchmark_out_format=json >"$out/kernels.log" 2>&1 || {
  cat "$out/kernels.log" >&2
  exit 1
}
results+=("$out/kernels.json")

python3 -B tests/bench/rows.py "${results[@]}" ${json:+--json "$json"}
