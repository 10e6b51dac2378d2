#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes NAME.hex beside each NAME.txtpb given. Refuses to overwrite: golden bytes do not change.
set -euo pipefail

(( $# > 0 )) || { echo "usage: tests/golden/encode.sh NAME.txtpb..." >&2; exit 2; }
protos="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../proto" && pwd)"
for text in "$@"; do
  hex="${text%.txtpb}.hex"
  if [[ -e "$hex" ]]; then
    echo "$hex is there and stays as it is" >&2
    exit 1
  fi
  type=$(sed -n '1s/^# proto-message: //p' "$text")
  [[ -n "$type" ]] || { echo "$text: the first line has to be: # proto-message: TYPE" >&2; exit 1; }
  protoc -I "$protos" --encode="$type" "$protos"/precondor/v1/*.proto <"$text" | od -An -v -tx1 >"$hex"
done
