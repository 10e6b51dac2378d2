#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, configures, builds and runs the tests. Safe to run again; quick when nothing changed.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: tests/run.sh [--preset NAME] [--label NAME] [--no-install] [--help]
  --preset NAME   a preset of CMakePresets.json: dev (default), clang, asan, tsan, cuda; builds in build/NAME
  --label NAME    only the tests with this CTest label: unit, conformance, sim, loopback, golden, python, e2e, lint,
                  fuzz (preset asan), deploy, deploy-full, upgrade, restarts, bench, gpu, soak. Default: the tests of the
                  preset (dev: all but the last six). Only a label that begins with deploy installs the tools of deploy.
                  Such a run fails if a test is skipped
  --no-install    do not look for missing packages
  --help          this text
The last lines are CTest's summary; the exit status is 0 when every test passed.
HELP
}

fail_usage() {
  echo "tests/run.sh: $1" >&2
  usage >&2
  exit 2
}

preset=dev
label=""
install=yes
while (( $# )); do
  case "$1" in
    --preset) preset="${2:-}"; [[ -n "$preset" ]] || fail_usage "--preset needs a name"; shift 2 ;;
    --label) label="${2:-}"; [[ -n "$label" ]] || fail_usage "--label needs a name"; shift 2 ;;
    --no-install) install=no; shift ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument: $1" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=$(( $(nproc) < 4 ? 2 * $(nproc) : 8 ))  # many tests wait more than they compute

run() {
  echo "== $*"
  "$@"
}

if [[ "$install" == yes ]]; then
  run deploy/install.sh --test
  if [[ "$label" == deploy* ]]; then run deploy/install.sh --deploy; fi
fi
run cmake --preset "$preset"
run cmake --build --preset "$preset"
record=()
if [[ "$label" == deploy* ]]; then record=(--output-junit "$PWD/build/$preset/deploy.xml" --test-output-size-passed 1000000); fi
case "$label" in
  "") run ctest --preset "$preset" -j "$jobs" ;;
  # The presets leave these out, and a preset's exclusion wins over a label given here.
  gpu | bench | soak | upgrade | restarts | deploy-full)
    run ctest --test-dir "build/$preset" -L "^$label\$" --output-on-failure --no-tests=error --timeout 1800 "${record[@]}" ;;
  *) run ctest --preset "$preset" -L "^$label\$" -j "$jobs" "${record[@]}" ;;
esac
if [[ "$label" == deploy* ]]; then
  python3 - "build/$preset/deploy.xml" <<'PYTHON'
import re
import sys
import xml.etree.ElementTree

wrong = []
for test in xml.etree.ElementTree.parse(sys.argv[1]).iter("testcase"):
    reasons = re.findall(r".*(?:: skipped: |\.\.\. skipped ').*", test.findtext("system-out", ""))
    if reasons or test.get("status") != "run":
        wrong.append(f"tests/run.sh: {test.get('name')} was skipped: {'; '.join(reasons) or 'it gives no reason'}")
sys.exit("\n".join(wrong) or None)
PYTHON
fi
