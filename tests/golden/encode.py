#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds the bytes of each message of a table that has none yet; README.md. Existing bytes stay unchanged."""

import pathlib
import subprocess
import sys
import textwrap

protos = pathlib.Path(__file__).resolve().parents[2] / "proto"
for table in map(pathlib.Path, sys.argv[1:]):
    preamble, *entries = table.read_text(encoding="utf-8").split("\n== ")
    for i, entry in enumerate(entries):
        head, _, text = entry.partition("\n")
        if text.startswith("hex:"):
            continue
        sources = sorted(protos.glob("precondor/v1/*.proto"))
        encoded = subprocess.run(["protoc", "-I", protos, f"--encode={head.split()[1]}", *sources], check=True,
                                 input=text.encode(), capture_output=True).stdout.hex()
        lines = [f"hex: {part}" for part in textwrap.wrap(encoded, 112)] or ["hex:"]
        entries[i] = "\n".join([head, *lines, text])
    table.write_text("\n== ".join([preamble, *entries]), encoding="utf-8")
