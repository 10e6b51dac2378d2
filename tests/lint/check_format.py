#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang-format 14 with the root's .clang-format would change nothing. Mend with: clang-format-14 -i FILE"""

import re
import subprocess
import tempfile

from lint_support import ROOT, Case, main

SUFFIXES = (".h", ".cc", ".cu", ".cuh")
FINDING = re.compile(r"^(.*?):(\d+):\d+: error: code should be clang-formatted", re.MULTILINE)


def _findings(folder, paths):
    """The first finding of each file; one process for all of them, because its start takes longer than a file."""
    command = ["clang-format-14", f"--style=file:{ROOT / '.clang-format'}", "--dry-run", "-Werror", *paths]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    first = {}
    for path, line in FINDING.findall(done.stderr):
        first.setdefault(path, line)
    if done.returncode != 0 and not first:
        return [f"clang-format-14 failed: {done.stderr.strip()}"]
    return [f"{path}:{line}: not as clang-format 14 writes it; run clang-format-14 -i {path}"
            for path, line in first.items()]


def check(tree):
    paths = tree.paths(*SUFFIXES)
    if tree.on_disk:
        return _findings(ROOT, paths)
    with tempfile.TemporaryDirectory() as folder:
        tree.write(folder, paths)
        return _findings(folder, paths)


CASES = [
    Case("clean", {"kernels/a.cc": "int F(int a) { return a; }\n"}, []),
    Case("spacing", {"kernels/a.cc": "\nint  F(int a) { return a; }\n"}, ["a.cc:[12]: not as"]),
    Case("pointer alignment", {"kernels/a.h": "int *F(int *a);\n"}, ["not as"]),
    Case("include order", {"kernels/a.cc": "#include <vector>\n#include <array>\n"}, ["not as"]),
]

if __name__ == "__main__":
    main(check, CASES)
