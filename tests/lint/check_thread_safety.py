#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Clang's thread-safety analysis really refuses an unguarded read through our Mutex, and is on in the build."""

import subprocess

from lint_support import ROOT, Case, main

_CLASS = """
#include "kernels/base/mutex.h"
class Counter {
 public:
  int Read() { %s return value_; }
 private:
  precondor::Mutex mu_;
  int value_ ABSL_GUARDED_BY(mu_) = 0;
};
int main() { return Counter().Read(); }
"""
_TARGETS = "deploy/cmake/PrecondorTargets.cmake"


def _compiles(text):
    command = ["clang++-14", "-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror", f"-I{ROOT}", "-xc++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def check(tree):
    findings = []
    if "-Wthread-safety" not in tree.read(_TARGETS):
        findings.append(f"{_TARGETS}: -Wthread-safety is not on for Clang")
    guarded = _compiles(_CLASS % "precondor::MutexLock lock(mu_);")
    if guarded.returncode != 0:
        findings.append(f"a guarded read does not compile: {guarded.stderr}")
    unguarded = _compiles(_CLASS % "")
    if unguarded.returncode == 0:
        findings.append("an unguarded read compiles")
    elif "requires holding mutex 'mu_'" not in unguarded.stderr:
        findings.append(f"an unguarded read is refused for another reason: {unguarded.stderr}")
    return findings


CASES = [
    Case("on", {_TARGETS: "-Wthread-safety\n"}, []),
    Case("off", {_TARGETS: "-Wall\n"}, ["is not on"]),
]

if __name__ == "__main__":
    main(check, CASES)
