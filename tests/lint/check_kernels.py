#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The report of ptxas on every kernel: registers, shared memory, stack and spills within limits, and no trap, which is
what the compiler leaves of code that it takes for undefined."""

import pathlib
import re
import tempfile

from lint_support import ROOT, Case, compile_cuda, main

TARGETS = ["sm_80", "sm_90", "sm_100"]
FLAGS = ["-no-compress", f"-gencode=arch=compute_80,code=[compute_80,{','.join(TARGETS)}]"]  # PTX in the object, as text
# 80 registers and 24 KiB let three blocks of 256 threads share a multiprocessor, 64 registers four. A stack frame is
# where slow paths of sin and cos reduce large angles.
LIMITS = {"registers": 64, "bytes smem": 24 << 10, "bytes stack frame": 40, "bytes spill stores": 0}
REGISTERS = {"ExpandKernel": 80, "LowRankAppendKernel": 80, "UpdateMultiplyKernel": 80, "SpdInversesKernel": 128}
# Spilled registers are read between two blocks of work, not in a main loop.
SPILLS = {"ProductKernel": 12}


def _kernels_of(report):
    """(kernel, target, its part of ptxas' report) for each."""
    parts = re.split(r"Compiling entry function '([^']+)' for '([^']+)'", report)
    return zip(parts[1::3], parts[2::3], parts[3::3])


def _name(mangled):
    words = re.findall(r"[A-Za-z]*Kernel", mangled)
    return words[0] if words else mangled


def _limits(kernel):
    limits = dict(LIMITS)
    limits["registers"] = REGISTERS.get(kernel, limits["registers"])
    limits["bytes spill stores"] = SPILLS.get(kernel, limits["bytes spill stores"])
    return limits


def _check_source(nvcc, tree, path, folder):
    source, binary = ROOT / path, folder / "kernels.o"
    if not tree.on_disk:
        source = folder / path
        tree.write(folder, [path])
    done = compile_cuda(nvcc, FLAGS, source, binary)
    if done.returncode != 0:
        return [f"{path}: {done.stderr.strip().splitlines()[:1]}"]
    findings = []
    for entry in binary.read_text(encoding="latin-1").split(".entry ")[1:]:
        if re.search(r"^\s*trap;", entry.partition("\0")[0], re.MULTILINE):
            findings.append(f"{path}: {_name(entry.split('(')[0])}: a trap: the compiler found undefined behaviour")
    for kernel, target, report in _kernels_of(done.stderr):
        for what, limit in _limits(_name(kernel)).items():
            found = re.search(rf"(\d+) {what}", report)
            if found and int(found.group(1)) > limit:
                findings.append(f"{path}: {_name(kernel)}: {target}: at most {limit} {what}, got {found.group(1)}")
    return findings


def check(tree, nvcc):
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for path in tree.paths(".cu"):
            findings += _check_source(nvcc, tree, path, pathlib.Path(folder))
    return findings


_GREEDY = """
__global__ void __launch_bounds__(1024) GreedyKernel(float* x) {
  float held[256];
#pragma unroll
  for (int i = 0; i < 256; ++i) held[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 256; ++i) x[i * 1024 + (threadIdx.x ^ 1)] = held[i] * held[255 - i];
}
"""
CASES = [
    Case("clean", {"a.cu": "__global__ void FineKernel(float* x) { x[threadIdx.x] *= 2; }\n"}, []),
    Case("spills", {"a.cu": _GREEDY}, [f"GreedyKernel: {target}: at most 0 bytes spill stores|GreedyKernel: {target}:"
                                       for target in TARGETS for _ in range(2)]),
    Case("undefined", {"a.cu": "__global__ void LostKernel(int* x) { if (*x) __builtin_unreachable(); __trap(); }\n"},
         ["LostKernel: a trap"]),
    Case("does not compile", {"a.cu": "__global__ void BadKernel(\n"}, ["a.cu"]),
]

if __name__ == "__main__":
    main(check, CASES, "--nvcc")
