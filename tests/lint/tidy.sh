#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy with the root's .clang-tidy over sources that a configured build compiles. It takes 5 to 30 s a file, so it
# is no CTest: .ci/run checks what changed, and --all everything.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/lint/tidy.sh [--changed BASE] [--for SECONDS] PATH... | --all
  PATH...          sources, or folders of them
  --changed BASE   of these only sources that differ from this commit or branch, or whose header of the same name does
  --for SECONDS    The script begins no source after this time, and counts the rest. With --changed, large changes come first
  --all            every source of the project
It configures the preset tidy in build/tidy, generates headers there, and compiles nothing else. A source that was clean with
the text of all its headers and of .clang-tidy is not checked again: ~/.cache/precondor/tidy has the sums of such texts.
HELP
}

changed=""
seconds=""
paths=()
while (( $# )); do
  case "$1" in
    --all) paths=(kernels proto server client tests); shift ;;
    --changed) changed=${2:?--changed needs a commit}; shift 2 ;;
    --for) seconds=${2:?--for needs a number of seconds}; shift 2 ;;
    --help | -h) usage; exit 0 ;;
    -*) echo "tidy.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    *) paths+=("$1"); shift ;;
  esac
done
if (( ${#paths[@]} == 0 )); then usage >&2; exit 2; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -n "$changed" ]]; then
  mapfile -t paths < <(git diff --numstat --no-renames --diff-filter=d "$changed" -- "${paths[@]}" | sort -rn | cut -f 3 |
    sed -n 's/\.\(cc\|h\)$/.cc/p' | awk '!seen[$0]++')
  if (( ${#paths[@]} == 0 )); then echo "tidy.sh: no source differs from $changed"; exit 0; fi
fi
cmake --preset tidy >/dev/null
cmake --build build/tidy --target generated >/dev/null
database=build/tidy/compile_commands.json

mapfile -t files < <(python3 - "$database" "${paths[@]}" <<'PY'
import json, os, re, sys
wanted = [p.rstrip("/") for p in sys.argv[2:]]
with open(sys.argv[1], encoding="utf-8") as file:
    # Commands that print the text: with comments, which turn checks off, with macros, and with lines, which checks count.
    texts = {os.path.relpath(entry["file"]): f"cd {entry['directory']} && " + re.sub(r" -o \S+ -c ", " -E -C -dD ", entry["command"])
             for entry in json.load(file)}
for w in wanted:
    for path in sorted(texts):
        # nvcc's options are none of clang's.
        if not path.endswith(".cu") and (path == w or path.startswith(w + "/")):
            print(path, texts[path], sep="\n")
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
echo "tidy.sh: $(( ${#files[@]} / 2 )) sources"
skipped=$(mktemp)
trap 'rm -f "$skipped"' EXIT
began=$(date +%s)
clean=${XDG_CACHE_HOME:-$HOME/.cache}/precondor/tidy
mkdir -p "$clean"
find "$clean" -type f -mtime +30 -delete
export skipped began clean seconds=${seconds:-0}
# shellcheck disable=SC2317  # xargs calls it
check() {
  if (( seconds > 0 && $(date +%s) - began >= seconds )); then echo "$1" >>"$skipped"; return; fi
  local sum
  sum=$({ cat .clang-tidy; clang-tidy-14 --version; echo "$2"; (eval "$2"); } | sed "s|$PWD||g" | sha256sum | cut -d ' ' -f 1)
  if [[ -e "$clean/$sum" ]]; then touch "$clean/$sum"; return; fi
  clang-tidy-14 -p build/tidy --quiet "$1" && touch "$clean/$sum"
}
export -f check
status=0
# shellcheck disable=SC2016  # the inner shell expands it
printf '%s\0' "${files[@]}" | xargs -0 -n 2 -P 2 bash -c 'check "$1" "$2"' _ 2> >(grep -vE '^[0-9]+ warnings? generated|^$' >&2) || status=1
if [[ -s "$skipped" ]]; then echo "tidy.sh: $(wc -l <"$skipped") sources not tried in $seconds s"; fi
exit "$status"
