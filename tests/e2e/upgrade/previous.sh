#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the programs of the release before this one, for upgrade_test.py. Quick when they are there.
# Usage: previous.sh FOLDER     (FOLDER/build then has precondor-server and digits_recorded)
set -euo pipefail

# Until 0.1.0 is tagged: the first commit with the formats, messages and arithmetic of today. After a release its tag.
release=6b3b70cc

(( $# == 1 )) || { echo "Usage: previous.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
if [[ "$(cat "$folder/release" 2>/dev/null)" == "$release" ]]; then exit 0; fi
echo "previous.sh: builds $release in $folder, for some minutes"
rm -rf "$folder/source" "$folder/build"
mkdir "$folder/source"
git cat-file -e "$release" || { echo "previous.sh: this clone does not have $release: git fetch --unshallow" >&2; exit 1; }
git archive "$release" | tar -x -C "$folder/source"
cmake -G Ninja -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPRECONDOR_PYTHON=OFF \
  -DPRECONDOR_BENCH=OFF -DPRECONDOR_CUDA=OFF
cmake --build "$folder/build" --target precondor-server digits_recorded
echo "$release" >"$folder/release"
