#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy with the root's .clang-tidy over sources that a configured build compiles. It takes 5 to 30 s a file, so it
# is no CTest: .ci/run checks what changed, and --all everything.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/lint/tidy.sh [--preset NAME] (--all | --changed BASE | PATH...)
  --preset NAME    take the compile commands of build/NAME; default asan. A preset that compiles with Clang, configured,
                   and built as far as generated and precompiled headers go
  --all            every source of the build but generated ones
  --changed BASE   sources that differ, or whose header of the same name differs, from this commit or branch
  PATH...          sources, or folders of them
HELP
}

preset=asan
changed=""
paths=()
while (( $# )); do
  case "$1" in
    --preset) preset="${2:?--preset needs a name}"; shift 2 ;;
    --all) paths=(kernels proto server client tests); shift ;;
    --changed)
      changed=${2:?--changed needs a commit}
      mapfile -t paths < <(git diff --name-only --diff-filter=d "$changed" -- '*.cc' '*.h' |
        sed 's/\.h$/.cc/' | sort -u)
      if (( ${#paths[@]} == 0 )); then echo "tidy.sh: no source differs from $changed"; exit 0; fi
      shift 2 ;;
    --help | -h) usage; exit 0 ;;
    -*) echo "tidy.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    *) paths+=("$1"); shift ;;
  esac
done
if (( ${#paths[@]} == 0 )); then usage >&2; exit 2; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
database=build/$preset/compile_commands.json
if [[ ! -f "$database" ]]; then
  echo "tidy.sh: no $database; run: cmake --preset $preset" >&2
  exit 1
fi

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
  echo "tidy.sh: the build $preset compiles none of what differs from $changed"
  exit 0
fi
if (( ${#files[@]} == 0 )); then
  echo "tidy.sh: the build $preset compiles none of: ${paths[*]}" >&2
  exit 1
fi
echo "tidy.sh: ${#files[@]} sources"
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 clang-tidy-14 -p "build/$preset" --quiet 2> >(grep -vE '^[0-9]+ warnings? generated|^$' >&2)
