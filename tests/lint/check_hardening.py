#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads with readelf whether programs and libraries are hardened: --program is a PIE with a protected stack and checked
copies, --library a shared object, and both have their relocations read-only from the start. --self-test: of files that it
compiles."""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE = """#include <cstring>
int main(int n, char** v) { char a[64]; memset(a, 0, 64); strcpy(a, v[0]); return a[n]; }
"""
HARD = ["-O2", "-fPIE", "-pie", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro",
        "-Wl,-z,now"]


def readelf(path):
    return subprocess.run(["readelf", "--wide", "--file-header", "--segments", "--dynamic", "--dyn-syms", str(path)],
                          check=True, capture_output=True, text=True).stdout


def findings(path, program):
    text = readelf(path)
    if not re.search(r"Type:\s+DYN", text):
        yield "expected a position-independent file (-fPIE -pie)"
    if program and not re.search(r"\(FLAGS_1\).*\bPIE\b", text):
        yield "expected a PIE, got a shared object"
    if not re.search(r"^\s*GNU_RELRO\b", text, re.MULTILINE):
        yield "expected a segment GNU_RELRO (-z relro)"
    if not re.search(r"\(FLAGS_1\).*\bNOW\b|\(FLAGS\).*\bBIND_NOW\b|\(BIND_NOW\)", text):
        yield "expected all symbols bound at the start (-z now)"
    if not re.search(r"^\s*GNU_STACK\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+RW\s", text, re.MULTILINE):
        yield "expected a stack that cannot be executed"
    if program and "__stack_chk_fail" not in text:
        yield "expected stack protectors (-fstack-protector-strong)"
    if program and not re.search(r"\b__\w+_chk\b", text):
        yield "expected checked copies (_FORTIFY_SOURCE)"


def check(path, program):
    found = [f"{path}: {what}" for what in findings(path, program)]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return not found


def self_test(compiler):
    """Each flag that is taken back is found, and it alone."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = pathlib.Path(folder, "a.cc"), pathlib.Path(folder, "a.out")
        source.write_text(SOURCE)
        for back, want in [([], None), (["-no-pie", "-fno-pie"], "-fPIE -pie"), (["-Wl,-z,norelro"], "-z relro"),
                           (["-Wl,-z,lazy"], "-z now"), (["-Wl,-z,execstack"], "executed"),
                           (["-fno-stack-protector"], "-fstack-protector-strong"),
                           (["-U_FORTIFY_SOURCE"], "_FORTIFY_SOURCE")]:
            subprocess.run([compiler, str(source), *HARD, *back, "-o", str(out)], check=True)
            found = list(findings(out, program=True))
            if (want is None and found) or (want is not None and not any(want in what for what in found)):
                print(f"check_hardening.py: with {back}: expected {want}, found {found}", file=sys.stderr)
                return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", action="append", default=[])
    parser.add_argument("--library", action="append", default=[])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--compiler", default="c++")
    arguments = parser.parse_args()
    if arguments.self_test:
        return 0 if self_test(arguments.compiler) else 1
    if not arguments.program:
        parser.error("expected at least one --program")
    results = [check(path, True) for path in arguments.program] + [check(path, False) for path in arguments.library]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
