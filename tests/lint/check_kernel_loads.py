#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many bytes of global memory every kernel has in flight on an H100, from its SASS, and whether that is enough.

    check_kernel_loads.py --nvcc NVCC               the lint: kernels below their bound
    check_kernel_loads.py --nvcc NVCC --table       a table of all kernels
    check_kernel_loads.py --nvcc NVCC --json        the same as JSON

In flight in a multiprocessor = what a thread has in flight (kernel_sass.py) x threads of the blocks that fit there.
Memory that answers after 600 to 800 ns at 3.35 TB/s needs 16 to 20 KB in each of 132 multiprocessors at all times.

cuobjdump and nvdisasm are taken from beside nvcc, from PATH, or from PyPI into --venv; where that fails the check exits
with 77, which CTest shows as skipped.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import kernel_sass
from lint_support import ROOT, Case, Tree, compile_cuda, self_test

PACKAGES = ["nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37"]
SKIPPED = 77
ARCHITECTURE = "sm_90"
FLAGS = ["-O3", f"-arch={ARCHITECTURE}"]
REGISTERS, THREADS, BLOCKS, SHARED, SHARED_OF_BLOCK = 65536, 2048, 32, 228 << 10, 1 << 10  # of a multiprocessor


@dataclasses.dataclass
class Expected:
    """At least so many KiB in flight in a multiprocessor, in loops of at least that depth."""

    kib: int
    depth: int = 0
    dynamic_shared: int = 0  # bytes that the launch asks for


# A kernel that is not named here must reach OTHERS.
OTHERS = Expected(16)
EXPECTED = {
    "ProductKernel": Expected(32, depth=2),
    "UpdateMultiplyKernel": Expected(32, depth=1),
    "ExpandKernel": Expected(32, depth=1),
    "CompressKernel": Expected(32, depth=1),
    "MomentumKernel": Expected(32, depth=1),
    "ScaledCopyKernel": Expected(32, depth=1),
    "ElementwiseKernel": Expected(32, depth=1),
    "LowRankAppendKernel": Expected(32, depth=2),
    "RowSquaredNormsKernel": Expected(32, depth=1),
    "DotPartialsKernel": Expected(32, depth=1),
    "ColumnNormsKernel": Expected(32, depth=1),
    "ShermanMorrisonKernel": Expected(32),
    "DiagonalKernel": Expected(8),  # n elements
    "SpdInversesKernel": Expected(16, dynamic_shared=8 * (16 * 128 + 128 * 129 // 2)),  # 128 rows
}


@dataclasses.dataclass
class Kernel:
    """The figures of one; of several with a name, the worst of each."""

    name: str
    registers: int
    shared: int
    spills: int
    threads: int
    blocks: int
    loads: int
    bytes: int

    def kib(self):
        return self.bytes * self.threads * self.blocks / 1024


def _run(command, environment=None):
    return _finished(subprocess.run(command, capture_output=True, text=True, check=False, env=environment))


def _finished(done):
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[0])
    return done


class Tools:
    """nvcc, cuobjdump, and where nvdisasm is that the latter calls."""

    def __init__(self, nvcc, venv):
        beside = pathlib.Path(nvcc).resolve().parent
        path = os.pathsep.join([str(beside), os.environ.get("PATH", "")])
        cuobjdump = shutil.which("cuobjdump", path=path)
        if cuobjdump is None or shutil.which("nvdisasm", path=path) is None:
            cuobjdump = _installed(venv)
            path = os.pathsep.join([str(cuobjdump.parent), path])
        self.nvcc, self.cuobjdump, self.environment = str(nvcc), str(cuobjdump), {**os.environ, "PATH": path}

    def compile(self, source, binary):
        """Returns the report of ptxas."""
        return _finished(compile_cuda(self.nvcc, FLAGS, source, binary)).stderr

    def dump(self, what, binary):
        return _run([self.cuobjdump, what, str(binary)], self.environment).stdout


def _installed(venv):
    """cuobjdump's path in `venv`, made on first use beside its place, so that two runs may race."""
    if venv is None:
        print("check_kernel_loads.py: skipped: no cuobjdump and nvdisasm, and no --venv for them")
        sys.exit(SKIPPED)
    if not venv.exists():
        venv.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=venv.parent) as fresh:
            place = pathlib.Path(fresh) / "venv"
            try:
                _run([sys.executable, "-m", "venv", str(place)])
                _run([str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *PACKAGES])
                os.rename(place, venv)
            except (RuntimeError, OSError) as error:
                if not venv.exists():
                    print(f"check_kernel_loads.py: skipped: cannot install {', '.join(PACKAGES)}: {error}")
                    sys.exit(SKIPPED)
    return next(venv.rglob("bin/cuobjdump"))


def short_name(mangled):
    words = re.findall(r"\d([A-Za-z]+Kernel)", mangled) or re.findall(r"[A-Za-z]*Kernel", mangled)
    return words[0] if words else mangled


def _resident_blocks(registers, shared, threads):
    of_warp = (registers + 7) // 8 * 8 * 32
    warps = (threads + 31) // 32
    return min(REGISTERS // (of_warp * warps), THREADS // threads, BLOCKS, SHARED // (shared + SHARED_OF_BLOCK))


def _number(pattern, text):
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _threads(info):
    """The most threads of a block, as __launch_bounds__ says."""
    found = re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+0x([0-9a-f]+)", info)
    return int(found.group(1), 16) if found else 1024


def kernels_of(tools, source, folder):
    binary = folder / "kernels.o"
    report = tools.compile(source, binary)
    of_ptxas = re.split(r"Compiling entry function '([^']+)'", report)
    reports = dict(zip(of_ptxas[1::2], of_ptxas[2::2]))
    infos = re.split(r"\.nv\.info\.(\S+)\n", tools.dump("-elf", binary))
    threads = {name: _threads(info) for name, info in zip(infos[1::2], infos[2::2])}
    for mangled, code in kernel_sass.kernels(tools.dump("-sass", binary)):
        name, of_kernel = short_name(mangled), reports[mangled]
        expected = EXPECTED.get(name, OTHERS)
        has_table = "ManyJobs" in mangled or re.search(r"PK\w*Job", mangled) is not None
        found = kernel_sass.in_flight(code, has_table, expected.depth)
        registers = _number(r"Used (\d+) registers", of_kernel)
        shared = _number(r"(\d+) bytes smem", of_kernel)
        yield Kernel(name, registers, shared, _number(r"(\d+) bytes spill stores", of_kernel), threads[mangled],
                     _resident_blocks(registers, shared + expected.dynamic_shared, threads[mangled]), found.loads,
                     found.bytes)


def merged(kernels):
    """One for each name: the least in flight, the most registers and so on."""
    by_name = {}
    for kernel in kernels:
        known = by_name.setdefault(kernel.name, kernel)
        if kernel.kib() < known.kib():
            known.loads, known.bytes, known.blocks = kernel.loads, kernel.bytes, kernel.blocks
        known.registers = max(known.registers, kernel.registers)
        known.shared = max(known.shared, kernel.shared)
        known.spills = max(known.spills, kernel.spills)
    return sorted(by_name.values(), key=lambda kernel: kernel.name)


def all_kernels(tools, tree, findings):
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for path in tree.paths(".cu"):
            source = ROOT / path
            if not tree.on_disk:
                source = pathlib.Path(folder) / path
                source.write_text(tree.read(path), encoding="utf-8")
            try:
                found += kernels_of(tools, source, pathlib.Path(folder))
            except RuntimeError as error:
                findings.append(f"{path}: {error}")
    return merged(found)


def check_with(tools):
    def check(tree):
        findings = []
        for kernel in all_kernels(tools, tree, findings):
            least = EXPECTED.get(kernel.name, OTHERS).kib
            if kernel.kib() < least:
                findings.append(f"{kernel.name}: at least {least} KiB in flight in a multiprocessor, got "
                                f"{kernel.kib():g}: {kernel.loads} loads, {kernel.bytes} bytes a thread, "
                                f"{kernel.blocks} blocks of {kernel.threads}")
        return findings

    return check


def table(kernels):
    """Markdown."""
    columns = [("registers", lambda k: k.registers), ("spilled bytes", lambda k: k.spills),
               ("blocks a multiprocessor", lambda k: k.blocks), ("loads a thread", lambda k: k.loads),
               ("bytes a thread", lambda k: k.bytes), ("KiB a multiprocessor", lambda k: round(k.kib(), 1))]
    lines = ["| kernel | " + " | ".join(title for title, _ in columns) + " | bound |",
             "|---|" + "---|" * (len(columns) + 1)]
    for kernel in kernels:
        cells = [f"{figure(kernel):g}" for _, figure in columns]
        lines.append(f"| {kernel.name} | {' | '.join(cells)} | {EXPECTED.get(kernel.name, OTHERS).kib} |")
    return "\n".join(lines)


_JOB = """
struct Job { const float* x; float* y; long n; };
"""
_SERIAL = _JOB + """
__global__ void __launch_bounds__(256) ScaledCopyKernel(const Job* jobs) {
  const Job job = jobs[blockIdx.x];
  for (long i = threadIdx.x; i < job.n; i += 1024) {
    for (int k = 0; k < 4; ++k) job.y[i + k * 256] = job.x[i + k * 256];
  }
}
"""
_TOGETHER = _JOB + """
__global__ void __launch_bounds__(256) ScaledCopyKernel(const Job* jobs) {
  const Job job = jobs[blockIdx.x];
  for (long i = threadIdx.x; i < job.n; i += 1024) {
    float held[4];
    for (int k = 0; k < 4; ++k) held[k] = job.x[i + k * 256];
    for (int k = 0; k < 4; ++k) job.y[i + k * 256] = held[k];
  }
}
"""
_OUTSIDE = _JOB + """
__global__ void __launch_bounds__(256) ScaledCopyKernel(const Job* jobs) {
  const Job job = jobs[blockIdx.x];
  float held[8];
  for (int k = 0; k < 8; ++k) held[k] = job.x[threadIdx.x + k * 256];
  for (int k = 0; k < 8; ++k) job.y[threadIdx.x + k * 256] = held[k];
}
"""
CASES = [
    Case("one load at a time", {"a.cu": _SERIAL}, ["ScaledCopyKernel: at least 32 KiB .* got 8: 1 loads, 4 bytes"]),
    Case("four together", {"a.cu": _TOGETHER}, []),
    Case("not in the main loop, and the job's own fields", {"a.cu": _OUTSIDE}, ["ScaledCopyKernel: .* got 0: 0 loads"]),
    Case("does not compile", {"a.cu": "__global__ void BadKernel(\n"}, ["a.cu"]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", required=True, help="the compiler")
    parser.add_argument("--venv", type=pathlib.Path, help="where cuobjdump is installed if it is not found")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--self-test", action="store_true", help="check the lint itself")
    arguments = parser.parse_args()
    tools = Tools(arguments.nvcc, arguments.venv)
    findings = []
    if arguments.json:
        print(json.dumps([dataclasses.asdict(k) for k in all_kernels(tools, Tree(), findings)], indent=1))
    elif arguments.table:
        print(table(all_kernels(tools, Tree(), findings)))
    else:
        check = check_with(tools)
        findings = self_test(check, CASES) if arguments.self_test else check(Tree())
    for finding in findings:
        print(finding, file=sys.stderr if arguments.json or arguments.table else sys.stdout)
    if not (arguments.json or arguments.table):
        print(f"check_kernel_loads.py: {len(findings)} finding(s)")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
