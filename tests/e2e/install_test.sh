#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the client of a build tree to a folder of its own, builds client/cpp/examples with nothing but that package,
# and runs it against a server.
# Usage: install_test.sh BUILD_DIR CXX SERVER
set -euo pipefail
build=$1 cxx=$2 server=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

work="$build/install_test"
rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --component client --prefix "$work/prefix" >"$work/install.log"
if grep -rIl "$build\|$(cd "$here/../.." && pwd)/" "$work/prefix/lib/cmake" "$work/prefix/include" 2>/dev/null; then
  echo "the installed files above name the tree that they were built in" >&2
  exit 1
fi
cmake -S "$here/../../client/cpp/examples" -B "$work/examples" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_BUILD_TYPE=Release -G Ninja >"$work/configure.log" 2>&1 || { cat "$work/configure.log" >&2; exit 1; }
cmake --build "$work/examples"

"$server" --listen=127.0.0.1:0 --port-file="$work/port" >"$work/server.log" 2>&1 &
pid=$!
trap 'kill -TERM "$pid" 2>/dev/null; wait "$pid" || true' EXIT
deadline=$((SECONDS + 30))
until [[ -s "$work/port" ]]; do
  kill -0 "$pid" || { cat "$work/server.log" >&2; exit 1; }
  (( SECONDS < deadline )) || { echo "the server did not open its port" >&2; exit 1; }
  read -rt 0.05 <> <(:) || true
done
"$work/examples/minimal" "127.0.0.1:$(<"$work/port")" | tee "$work/output"
# It learns, by gradients that the server has preconditioned.
awk '/^step / {last = $4; if (!seen++) first = $4} END {exit !(seen == 6 && last < first / 100)}' "$work/output"
