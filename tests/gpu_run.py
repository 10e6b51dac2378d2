#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what tests/gpu.sh has built: CTest's label gpu, parts of it under compute-sanitizer, the benchmark, and beside
that the same step in torch where torch finds the device.

A suite that finds no device ends as skipped, with its reason; so does compute-sanitizer where it is not found or
refuses the device. What each program printed lies in BUILD/gpu-logs.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

from bench import step_rows

SKIPPED = 77  # exit status of programs without a device
BENCH = "cuda_bench"
TORCH = "torch"
STEP = "step/cuda/"
TORCH_TARGET = 10  # times a step in torch
# (tool, suite, --gtest_filter): every kernel of ours once, and not the libraries' for long.
SANITIZED = [
    ("memcheck", "backend_conformance_test_cuda", "-*GivesTheSameBits*:*ConditionOneE*"),
    ("memcheck", "symmetric_conformance_test_cuda", "*"),
    ("memcheck", "rounded_products_conformance_test_cuda", "*"),
    ("racecheck", "backend_conformance_test_cuda", "*Element*:*Reductions*:*Packed*:*Gather*:*FillNormal*:*InPlace*"),
    ("racecheck", "symmetric_conformance_test_cuda", "*ByTheDefinition*:*FusedIs*:*ExpandsToTheBit*:*ShermanMorrison*"),
]


def output_of(command):
    """What `command` prints, or None where it cannot run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def gpu_suites(build):
    """The tests of the label gpu as CTest has them: {name: (command, seconds)}."""
    listed = subprocess.run(["ctest", "--test-dir", build, "-L", "^gpu$", "--show-only=json-v1"],
                            capture_output=True, text=True, check=True).stdout
    suites = {}
    for test in json.loads(listed)["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        # A program that is not built yet has no command.
        suites[test["name"]] = (test.get("command"), properties.get("TIMEOUT", 600))
    return suites


def run_logged(command, log, seconds):
    """The exit status, None where `seconds` were not enough, and the text that was printed."""
    with open(log, "wb") as out:
        try:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
                                    timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        except OSError as error:
            out.write(f"{error}\n".encode())
            status = 127
    return status, log.read_text(errors="replace")


def judge(status, text, seconds):
    """{status, reason?, passed, failed, skipped} of a GoogleTest program, the last three its tests' numbers."""
    counts = {}
    for key in ("PASSED", "FAILED", "SKIPPED"):
        found = re.search(rf"^\[  {key} *\] (\d+) tests?[.,]", text, re.MULTILINE)
        counts[key.lower()] = int(found[1]) if found else 0
    if status is None:
        return {"status": "failed", "reason": f"not done after {seconds:g} s", **counts}
    if status == SKIPPED:
        reason = re.search(r"^skipped: (.*)", text, re.MULTILINE)
        return {"status": "skipped", "reason": reason[1] if reason else "exit status 77", **counts}
    if status != 0:
        return {"status": "failed", "reason": f"exit status {status}", **counts}
    if counts["passed"] == 0:  # all skipped themselves, or a filter left none
        reason = re.search(r"Skipped\n(.*)", text)
        return {"status": "skipped", "reason": reason[1].strip() if reason else "no test ran", **counts}
    return {"status": "passed", **counts}


class Runner:
    def __init__(self, build, short):
        self.build = build
        self.short = short
        self.logs = build / "gpu-logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.suites = gpu_suites(build)

    def run(self, name, command, seconds):
        status, text = run_logged(command, self.logs / f"{name}.log", seconds)
        verdict = {"name": name, **judge(status, text, seconds)}
        said = f": {verdict['reason']}" if "reason" in verdict else f", {verdict['passed']} tests"
        print(f"{verdict['status']:8} {name}{said}", flush=True)
        if verdict["status"] == "failed":
            print("\n".join(text.splitlines()[-40:]), flush=True)
        return verdict, text

    def run_suites(self):
        return [self.run(name, command, seconds)[0] for name, (command, seconds) in self.suites.items()]

    def run_sanitizers(self):
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None:
            print("skipped  compute-sanitizer: not found")
            return [{"name": "compute-sanitizer", "status": "skipped", "reason": "not found"}]
        verdicts = []
        for check, suite, tests in SANITIZED:
            program = self.suites[suite][0]
            command = [tool, "--tool", check, "--error-exitcode", "99", *program, f"--gtest_filter={tests}"]
            verdict, text = self.run(f"{check}.{suite}", command, 600)
            if "Device not supported" in text:
                verdict.update(status="skipped", reason="compute-sanitizer does not support this device")
            verdicts.append(verdict)
        return verdicts

    def run_bench(self):
        rows = self.logs / "bench.json"
        rows.unlink(missing_ok=True)
        command = [self.build / "tests/bench" / BENCH, f"--json={rows}"] + (["--short"] if self.short else [])
        status, text = run_logged(command, self.logs / "bench.log", 900)
        if status == 0:
            return {"name": BENCH, "status": "passed"}, json.loads(rows.read_text())["rows"]
        verdict = judge(status, text, 900)
        print(f"{verdict['status']:8} {BENCH}: {verdict['reason']}")
        if verdict["status"] == "failed":
            print(text)
        return {"name": BENCH, "status": verdict["status"], "reason": verdict["reason"]}, []

    def run_torch(self, rows):
        """The step of cuda_bench's rows in torch on the same device, and how many times as long it takes."""
        if not rows:
            return {"name": TORCH, "status": "skipped", "reason": f"no rows of {BENCH}"}, []
        steps = {row["name"].removeprefix(STEP): row["value"] for row in rows
                 if row["name"].startswith(STEP) and row["unit"] == "ms"}
        try:
            child, said = step_rows.start_torch(sys.executable, device="cuda")
            if child is None:
                print(f"skipped  {TORCH}: {said}")
                return {"name": TORCH, "status": "skipped", "reason": said}, []
            child.ask("make", 1 if self.short else step_rows.BLOCKS)
            child.ask("step", 1)  # warms up
            seconds = statistics.median(float(child.ask("step", 1)) for _ in range(1 if self.short else 9))
            child.close()
        except SystemExit as error:
            print(f"failed   {TORCH}: {error}")
            return {"name": TORCH, "status": "failed", "reason": str(error)}, []
        found = step_rows.Rows()
        found.add(f"{STEP}torch", seconds * 1e3, "ms")
        for name, milliseconds in steps.items() if not self.short else ():  # shorter layers than torch's
            found.add(f"{STEP}torch_to_{name}", seconds * 1e3 / milliseconds, "x", TORCH_TARGET)
        return {"name": TORCH, "status": "passed", "version": said}, found.rows


def describe_device():
    """The first device that nvidia-smi lists."""
    listed = output_of(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if not listed:
        return {"name": "unknown: no nvidia-smi", "driver": None, "memory": None}
    name, driver, memory = listed.splitlines()[0].split(", ")
    return {"name": name, "driver": driver, "memory": memory}


def describe_tree(build):
    """The commit, or, in a copy without .git, the one that was packed with the packages."""
    commit = output_of(["git", "rev-parse", "HEAD"])
    if commit:
        return commit + (" and changes" if output_of(["git", "status", "--porcelain"]) else "")
    packed = pathlib.Path(f"{build}-deps") / "revision"
    return f"packed at {packed.read_text().strip()}" if packed.exists() else None


def cuda_version(build):
    nvcc = re.search(r"^CUDAToolkit_NVCC_EXECUTABLE:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE)
    found = re.search(r"release \S+, V(\S+)", output_of([nvcc[1], "--version"]) or "") if nvcc else None
    return found[1] if found else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path, help="the report")
    parser.add_argument("--short", action="store_true", help="no compute-sanitizer, the benchmarks in short")
    parser.add_argument("--list", action="store_true", help="print the programs to build, and stop")
    arguments = parser.parse_args()
    runner = Runner(arguments.build_dir, arguments.short)
    if not runner.suites:
        sys.exit("gpu_run.py: no test has the label gpu: the build found no CUDA toolkit (nvcc), see what cmake said")
    if arguments.list:
        print("\n".join([*runner.suites, BENCH]))
        return

    suites = runner.run_suites()
    on_device = any(s["status"] != "skipped" for s in suites)
    sanitizers = runner.run_sanitizers() if on_device and not arguments.short else []
    bench, rows = runner.run_bench()
    torch, torch_rows = runner.run_torch(rows)
    rows += torch_rows
    report = {
        "device": describe_device() if on_device else None,
        "cuda": cuda_version(arguments.build_dir),
        "revision": describe_tree(arguments.build_dir),
        "suites": suites,
        "sanitizers": sanitizers,
        "bench": bench,
        "torch": torch,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"report: {arguments.json}")
    for row in rows:
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.3g} of the limit"
        missed = "" if row["pass"] else f"; misses {row['target']:g}"
        print(f"{row['name']}: {row['value']:.4g} {row['unit']}{ratio}{missed}")
    results = suites + sanitizers + [bench, torch]
    failed = [r["name"] for r in results if r["status"] == "failed"]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    if not on_device:
        print("nothing ran on a device")
    else:
        print(f"all passed on {report['device']['name']}" +
              "".join(f"; {r['name']} skipped: {r['reason']}" for r in results if r["status"] == "skipped"))


if __name__ == "__main__":
    main()
