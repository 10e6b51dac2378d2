#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A compiler launcher for the targets that own a precompiled header of Clang: runs the command that follows and writes
# the checksum of the preprocessed header, macros included, to HEADER.pch.sum.
# A .pch of Clang holds paths of the build folder, so its own bytes differ between two checkouts. ccache takes the .sum
# file in its place (CCACHE_PCH_EXTSUM) and finds in one checkout what another one has compiled.
set -euo pipefail
"$@"

preprocess=()
output=""
while (( $# )); do
  case $1 in
    -o) output=$2; shift 2 ;;
    -MT | -MF | -MQ) shift 2 ;;
    -MD | -c) shift ;;
    -Xclang) if [[ $2 != -emit-pch ]]; then preprocess+=("$1" "$2"); fi; shift 2 ;;
    *) preprocess+=("$1"); shift ;;
  esac
done
if [[ $output == *.pch ]]; then
  "${preprocess[@]}" -E -P -dD | sha256sum >"$output.sum"
fi
