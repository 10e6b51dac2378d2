#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks and prints rows {name, value, unit, limit, ratio, target, pass}.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/bench/run.sh [--filter RE] [--json FILE] [--short] [--build-dir DIR] [--help]
  --filter RE      only rows whose name matches; a family that it does not name is left out.
                   Kernels: update/, precondition/ and gemm/.
                   BERT-Large through a server: statistics/ and memory/.
                   Transport: gradients/ in shared memory, gradients/grpc/, gradients/tls/.
                   A small job beside a large one on one server: jobs/.
                   A restart of a shard with BERT-Large's layers, on the disk of TMPDIR: recovery/.
  --json FILE      write the rows there as well
  --short          one quick repetition: shows that everything runs and is right; the figures mean little, and a
                   missed target is no failure
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
lenient=()
load_flags=()
quick_flags=()
if [[ "$short" == yes ]]; then
  lenient=(--lenient)
  quick_flags=(--short)
  load_flags=(--workers=2 --steps=3 --warmup=2)
fi

# run NAME COMMAND...: the program writes $out/NAME.json; what it prints is shown when it does not.
run() {
  local name=$1
  shift
  echo "== $name" >&2
  "$@" >"$out/$name.log" 2>&1 || true
  if [[ ! -s "$out/$name.json" ]]; then
    cat "$out/$name.log" >&2
    echo "tests/bench/run.sh: $name gave no result" >&2
    exit 1
  fi
  results+=("$out/$name.json")
}

if [[ -x "$build/tests/bench/tiles_bench" ]]; then
  case "$filter" in
    . | *update* | *tiles*) run tiles "$build/tests/bench/tiles_bench" --json="$out/tiles.json" "${quick_flags[@]}" ;;
  esac
fi
case "$filter" in
  . | *update* | *precondition* | *low_rank*)
    run layer "$build/tests/bench/layer_bench" --json="$out/layer.json" "${quick_flags[@]}" ;;
esac
case "$filter" in
  . | *gemm*) run gemm "$build/tests/bench/gemm_bench" --json="$out/gemm.json" "${quick_flags[@]}" ;;
esac
for rows in statistics jobs layers; do
  case "$rows:$filter" in
    *:. | statistics:*statistics* | statistics:*memory* | jobs:*jobs* | layers:*layers*)
      run "$rows" "$build/tests/bench/service_bench" --rows="$rows" --server-binary="$build/server/precondor-server" \
        --json="$out/$rows.json" "${load_flags[@]}" ;;
  esac
done
case "$filter" in
  . | *gradients*)
    run gradients "$build/client/cpp/tools/precondor-perf" --workload=gradients \
      --server-binary="$build/server/precondor-server" --json="$out/gradients.json" "${load_flags[@]}"
    # As between hosts.
    export PRECONDOR_SHARED_MEMORY_BYTES=0
    run gradients_grpc "$build/client/cpp/tools/precondor-perf" --workload=gradients \
      --server-binary="$build/server/precondor-server" --json="$out/gradients_grpc.json" "${load_flags[@]}"
    sed -i 's|"gradients/|"gradients/grpc/|' "$out/gradients_grpc.json"
    deploy/certificates.sh "$out/certificates" server,127.0.0.1
    run gradients_tls "$build/client/cpp/tools/precondor-perf" --workload=gradients --tls-ca="$out/certificates/ca.pem" \
      --tls-cert="$out/certificates/server.pem" --tls-key="$out/certificates/server.key" \
      --server-binary="$build/server/precondor-server" --json="$out/gradients_tls.json" "${load_flags[@]}"
    unset PRECONDOR_SHARED_MEMORY_BYTES ;;
esac
case "$filter" in
  . | *recovery*) run recovery "$build/tests/bench/recovery_bench" --dir="$out/recovery" --json="$out/recovery.json" \
    "${quick_flags[@]}" ;;
esac
if (( ${#results[@]} == 0 )); then
  echo "tests/bench/run.sh: no row matches $filter" >&2
  exit 1
fi

python3 -B tests/bench/rows.py --filter "$filter" "${lenient[@]}" ${json:+--json "$json"} "${results[@]}"
