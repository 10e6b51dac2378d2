#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy with the root's .clang-tidy over sources that a configured build compiles. It takes 5 to 30 s a file, so it
# is no CTest: .ci/run checks what changed, and --all everything.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/lint/tidy.sh [--changed BASE] PATH... | --all
  PATH...          sources, or folders of them
  --changed BASE   of these only sources that differ from this commit or branch, or whose header of the same name does
  --all            every source of the project
It configures the preset tidy in build/tidy, generates headers there, and compiles nothing else.
HELP
}

changed=""
paths=()
while (( $# )); do
  case "$1" in
    --all) paths=(kernels proto server client tests); shift ;;
    --changed) changed=${2:?--changed needs a commit}; shift 2 ;;
    --help | -h) usage; exit 0 ;;
    -*) echo "tidy.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    *) paths+=("$1"); shift ;;
  esac
done
if (( ${#paths[@]} == 0 )); then usage >&2; exit 2; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -n "$changed" ]]; then
  mapfile -t paths < <(git diff --name-only --diff-filter=d "$changed" -- "${paths[@]}" | sed -n 's/\.\(cc\|h\)$/.cc/p' | sort -u)
  if (( ${#paths[@]} == 0 )); then echo "tidy.sh: no source differs from $changed"; exit 0; fi
fi
cmake --preset tidy >/dev/null
cmake --build build/tidy --target generated >/dev/null
database=build/tidy/compile_commands.json

mapfile -t files < <(python3 - "$database" "${paths[@]}" <<'PY'
import json, os, sys
wanted = [p.rstrip("/") for p in sys.argv[2:]]
with open(sys.argv[1], encoding="utf-8") as file:
    compiled = {os.path.relpath(entry["file"]) for entry in json.load(file)}
for path in sorted(compiled):
    # nvcc's options are none of clang's.
    if not path.endswith(".cu") and any(path == w or path.startswith(w + "/") for w in wanted):
        print(path)
PY
)
if (( ${#files[@]} == 0 )) && [[ -n "$changed" ]]; then
  echo "tidy.sh: the build compiles none of what differs from $changed"
  exit 0
fi
if (( ${#files[@]} == 0 )); then
  echo "tidy.sh: the build compiles none of: ${paths[*]}" >&2
  exit 1
fi
echo "tidy.sh: ${#files[@]} sources"
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 clang-tidy-14 -p build/tidy --quiet 2> >(grep -vE '^[0-9]+ warnings? generated|^$' >&2)
