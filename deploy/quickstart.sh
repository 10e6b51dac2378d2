#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh machine to a trained model: installs, builds, starts one coordinator and two shards as processes on
# loopback, trains on real data with four workers, shows a table, and stops what it started.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/quickstart.sh [--json FILE] [--no-install] [--binaries DIR] [-- FLAGS...]
Trains two small models with AdamW alone and with two methods of Precondor, and shows how many steps each of them needs: under
a minute once built.
  --json FILE     where to write the results (build/quickstart/runs.json)
  --no-install    do not look for missing packages
  --binaries DIR  an existing build tree to use; implies --no-install and builds nothing
  --help          this text
FLAGS go to tests/bench/digits.py, whose --help describes them: --tasks, --methods and --seeds. For example
  deploy/quickstart.sh -- --tasks autoencoder --methods all --seeds 3
The servers' logs stay in build/quickstart. Safe to run again; the second time nothing is installed or built anew.
HELP
}

fail() {
  echo "quickstart: $1" >&2
  exit "${2:-1}"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out="$root/build/quickstart"
json="$out/runs.json"
install=yes
binaries=""
flags=()
while (( $# )); do
  case "$1" in
    --json) [[ -n "${2:-}" ]] || fail "--json needs a file" 2; json=$(realpath -m "$2"); shift 2 ;;
    --binaries) [[ -n "${2:-}" ]] || fail "--binaries needs a folder" 2; binaries=$(realpath -m "$2"); shift 2 ;;
    --no-install) install=no; shift ;;
    --help | -h) usage; exit 0 ;;
    --) shift; flags+=("$@"); break ;;
    *) usage >&2; fail "unknown argument: $1" 2 ;;
  esac
done
cd "$root"
mkdir -p "$out" "$(dirname "$json")"

if [[ -z "$binaries" ]]; then
  if [[ "$install" == yes ]]; then
    echo "quickstart, 1 of 3: packages"
    deploy/install.sh
  fi
  binaries="$root/build/dev"
  echo "quickstart, 2 of 3: building precondor-server and digits_trainer in build/dev"
  cmake --preset dev >"$out/configure.log" || { cat "$out/configure.log" >&2; fail "cmake failed"; }
  cmake --build --preset dev --target precondor-server digits_trainer
fi
server="$binaries/server/precondor-server"
for program in "$server" "$binaries/tests/e2e/trainer/digits_trainer"; do
  [[ -x "$program" ]] || fail "no program $program"
done

pids=()
stop() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
run_dir=$(mktemp -d)
trap 'stop; rm -rf "$run_dir"' EXIT
trap 'exit 130' INT TERM

# start NAME FLAGS...: a server process on a free port; its address is in $address afterwards.
start() {
  local name=$1 port_file="$run_dir/$1.port" deadline=$((SECONDS + 30)) pid
  shift
  "$server" --listen=127.0.0.1:0 --port-file="$port_file" --drain-deadline-ms=2000 "$@" >"$out/$name.log" 2>&1 &
  pid=$!
  pids+=("$pid")
  until [[ -s "$port_file" ]]; do
    kill -0 "$pid" 2>/dev/null || { tail -n 20 "$out/$name.log" >&2; fail "$name ended at its start"; }
    (( SECONDS < deadline )) || fail "$name did not open its port in 30 s; see $out/$name.log"
    sleep 0.05
  done
  address="127.0.0.1:$(<"$port_file")"
  echo "quickstart: $name is process $pid on $address"
}

echo "quickstart, 3 of 3: training"
start shard-0 --role=shard
shards="$address"
start shard-1 --role=shard
shards+=",$address"
start coordinator --role=coordinator --shards="$shards"

# In the background, so that a signal to this script stops it at once.
python3 -B tests/bench/digits.py --coordinator="$address" --shards=2 --binaries="$binaries" --json="$json" "${flags[@]}" &
pids+=("$!")
wait "$!"
echo "quickstart: results in $json"
