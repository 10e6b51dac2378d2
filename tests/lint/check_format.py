#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang-format 14 with the root's .clang-format would change nothing. Mend with: clang-format-14 -i FILE"""

import subprocess

from lint_support import ROOT, Case, main

SUFFIXES = (".h", ".cc", ".cu", ".cuh")


def _formatted(path, text):
    return subprocess.run(["clang-format-14", f"--assume-filename={ROOT / path}"], input=text, check=True,
                          capture_output=True, text=True).stdout


def check(tree):
    findings = []
    for path in tree.paths(*SUFFIXES):
        text = tree.read(path)
        formatted = _formatted(path, text)
        if formatted == text:
            continue
        pairs = zip(text.split("\n"), formatted.split("\n"))
        line = next((n for n, (old, new) in enumerate(pairs, 1) if old != new), text.count("\n"))
        findings.append(f"{path}:{line}: not as clang-format 14 writes it; run clang-format-14 -i {path}")
    return findings


CASES = [
    Case("clean", {"kernels/a.cc": "int F(int a) { return a; }\n"}, []),
    Case("spacing", {"kernels/a.cc": "\nint  F(int a) { return a; }\n"}, ["a.cc:[12]: not as"]),
    Case("pointer alignment", {"kernels/a.h": "int *F(int *a);\n"}, ["not as"]),
    Case("include order", {"kernels/a.cc": "#include <vector>\n#include <array>\n"}, ["not as"]),
]

if __name__ == "__main__":
    main(check, CASES)
