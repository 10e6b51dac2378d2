#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a phase of tests/gpu.sh (phases.py) with programs that are built already, writes each result at once
(results.py) and a report of what there is so far after each of them (report.py)."""

import argparse
import concurrent.futures
import os
import pathlib
import re
import signal
import sys
import threading
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in (".", "bench")]

# pylint: disable=wrong-import-position
from gpu import benchmark, judge, machine, phases, process, profiler, report, results
from gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED


class Programs:
    """The folder of programs: a pack's folder bin, or a build folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()

    def path(self, name):
        for place in ("bin", "tests/conformance", "tests/bench", "."):
            if (self.folder / place / name).is_file():
                return str(self.folder / place / name)
        return str(self.folder / "bin" / name)  # which the check reports as missing


class Runner:
    """Runs one phase of a call."""

    def __init__(self, arguments, folder):
        self.arguments = arguments
        self.imitation = arguments.imitation
        self.short = arguments.short or arguments.imitation
        self.programs = Programs(arguments.programs)
        self.environment = machine.environment()
        self.results = results.Results(folder)
        self.wanted = re.compile(arguments.filter)
        self.phase, self.deadline = None, 0.0
        # One writer at a time; reentrant for the signal handler, which may interrupt the thread that writes.
        self._writing = threading.RLock()

    def run(self, phase, seconds):
        """All checks of a phase that the filter takes, in `seconds`."""
        self.phase = phase.name
        began = time.monotonic()
        self.deadline = began + seconds * phases.OWN_SHARE
        facts = {"phase": phase.name, "seconds": seconds, "imitation": self.imitation, "filter": self.arguments.filter}
        self.results.add("start", **facts, checks=[], machine={})  # before programs and tools that may not answer
        checks = {name: work for name, work in self._checks(phase).items() if self.wanted.search(f"{phase.name}/{name}")}
        self.results.add("start", **facts, checks=list(checks), machine=machine.describe(self.programs.folder, self.imitation))
        self.write_report()
        print(f"== {phase.name}: {len(checks)} checks, at most {seconds:g} s", flush=True)
        if phase.cases:
            benchmark.run(self, [name for name, work in checks.items() if work is None])
            checks = {name: work for name, work in checks.items() if work is not None}
        with concurrent.futures.ThreadPoolExecutor(phase.jobs) as pool:
            for done in [pool.submit(self._one, name, work) for name, work in checks.items()]:
                done.result()
        self.results.add("end", phase=phase.name, seconds=time.monotonic() - began)
        self.write_report()

    def _checks(self, phase):
        """{name: what runs it; None for a case of cuda_bench} in the phase's order."""
        scripts = {script.name: lambda runner, script=script: benchmark.run_script(runner, script) for script in phase.scripts}
        if phase.cases or phase.scripts:
            return {**(dict.fromkeys(benchmark.cases(self)) if phase.cases else {}), **scripts}
        if phase.name == "profile":
            return {case: lambda _, case=case: self._profile(case) for case in phases.PROFILED}
        return {check.name: lambda _, check=check: self._suite(check) for check in phase.checks}

    def _one(self, name, work):
        left = self.left()
        if left <= 0:
            self.done(name, {"status": NOT_RUN, "reason": "the phase's time was over"}, 0)
            return
        began = time.monotonic()
        try:
            verdict = work(self)
        except Exception as error:  # pylint: disable=broad-exception-caught
            verdict = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
        self.done(name, verdict, time.monotonic() - began)

    def left(self):
        """Seconds of the phase."""
        return self.deadline - time.monotonic()

    def done(self, name, verdict, seconds):
        self.results.add("check", phase=self.phase, check=name, seconds=round(seconds, 2), **verdict)
        said = f": {verdict['reason']}" if "reason" in verdict else ""
        if verdict.get("failures"):
            said += f"; {', '.join(verdict['failures'][:5])}"
        print(f"{verdict['status']:8} {self.phase}/{name}{said} ({seconds:.1f} s)", flush=True)
        self.write_report()

    def row(self, check, row):
        self.results.add("row", phase=self.phase, check=check, **row)

    def write_report(self):
        with self._writing:
            report.write(self.results.folder, results.read([self.results.folder]))

    def _suite(self, check):
        if self.imitation and check.host_tests is None:
            return {"status": SKIPPED, "reason": phases.IMITATED}
        program = self.programs.path(phases.program_name(check, "_cuda_on_host" if self.imitation else "_cuda"))
        tests = check.host_tests if self.imitation else check.tests
        command = [program, f"--gtest_filter={tests}"]
        if check.tool:
            tool = machine.find_tool("compute-sanitizer")
            if tool is None:
                return {"status": SKIPPED, "reason": "compute-sanitizer was not found"}
            command = [tool, "--tool", check.tool, "--error-exitcode", str(judge.SANITIZER_ERROR), *command]
        seconds = min(check.seconds, self.left())
        status, text = process.run(command, seconds, f"{self.phase}/{check.name}", self.results, self.environment)
        return (judge.sanitizer if check.tool else judge.googletest)(status, text, seconds)

    def _profile(self, case):
        if self.imitation:
            return {"status": SKIPPED, "reason": phases.IMITATED}
        tool = machine.find_tool("ncu")
        if tool is None:
            return {"status": SKIPPED, "reason": "ncu (Nsight Compute) was not found"}
        seconds = min(phases.PROFILE_SECONDS, self.left())
        status, text = process.run(profiler.command(tool, self.programs.path("cuda_bench"), case, seconds), seconds,
                                   f"{self.phase}/{case}", self.results, self.environment)
        if status == judge.NO_DEVICE:
            return judge.googletest(status, text, seconds)
        found = profiler.kernels(text)
        for kernel in found:
            self.results.add("kernel", phase=self.phase, check=case, **kernel)
        if status is None:
            return {"status": FAILED, "reason": f"not done after {seconds:.4g} s", "kernels": len(found)}
        if status != 0 or not found:
            said = [line for line in text.splitlines() if line.startswith("==ERROR==")]
            reason = said[0].removeprefix("==ERROR== ") if said else judge.exit_reason(status)
            return {"status": FAILED, "reason": f"ncu: {reason}", "kernels": len(found)}
        return {"status": PASSED, "kernels": len(found)}


def start_up(programs, imitation):
    """None where the programs start on this machine, otherwise why the first that does not."""
    where, environment = Programs(programs), machine.environment()
    for name in phases.programs(imitation):
        word = "--list" if name.startswith("cuda_bench") else "--gtest_list_tests"
        said = _try([where.path(name), word], environment)
        if said is not None:
            return f"{name}: {said}"
    return None


def _try(command, environment):
    class Silent:
        """A log that keeps nothing."""

        def log(self, source, line):
            pass

    status, text = process.run(command, 60, "start", Silent(), environment)
    return None if status == 0 else (text.splitlines() or [f"exit status {status}"])[-1]


def verdict(folders):
    """The exit status and the last line."""
    summary = report.summarize(results.read(folders))
    if summary.failed or summary.unfinished:
        parts = [f"failed: {', '.join(summary.failed)}"] if summary.failed else []
        parts += [f"not finished: {', '.join(summary.unfinished)}"] if summary.unfinished else []
        return 1, "; ".join(parts)
    if not summary.passed:
        return 0, "nothing ran on a device: all skipped"
    where = f"passed on {summary.machine.get('device') or 'a device of unknown name'}"
    return 0, f"{where}, but skipped: {', '.join(summary.skipped)}" if summary.skipped else f"all {where}"


def _end_when_told(runner):
    """At SIGTERM and SIGINT: what has come so far stays, what runs is ended and counts as not run."""
    def end(number, _):
        runner.results.frozen = True
        process.Program.kill_all()
        runner.write_report()
        print(f"ended by signal {number}; report: {runner.results.folder / results.REPORT}", flush=True)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=".", help="a pack's folder, or a build folder")
    parser.add_argument("--phase", choices=[*phases.PHASES, "report"])
    parser.add_argument("--list-phases", metavar="LIST", help="only list these phases, each with what timeout needs")
    parser.add_argument("--out", type=pathlib.Path, help="where results go")
    parser.add_argument("--results", type=pathlib.Path, action="append", default=[], help="report: another call's folder")
    parser.add_argument("--docs", type=pathlib.Path, help="report: the page whose table is written")
    parser.add_argument("--filter", default="", help="only checks PHASE/NAME in which this expression is found")
    parser.add_argument("--short", action="store_true", help="the benchmark in short")
    parser.add_argument("--imitation", action="store_true", help="programs over the host's imitation of CUDA")
    parser.add_argument("--limit", type=float, help="seconds for the phase in place of its own")
    parser.add_argument("--starts", action="store_true", help="only try whether the programs start here")
    parser.add_argument("--list-programs", action="store_true", help="only list what has to be built")
    arguments = parser.parse_args()
    if arguments.list_programs:
        print("\n".join(phases.programs(arguments.imitation)))
        return 0
    if arguments.starts:
        said = start_up(arguments.programs, arguments.imitation)
        print(f"the programs in {arguments.programs} " + ("start" if said is None else f"do not start: {said}"))
        return 0 if said is None else 1
    if arguments.list_phases:
        try:
            found = phases.choose(arguments.list_phases, arguments.limit)
        except ValueError as error:
            parser.exit(2, f"tests/gpu.sh: --phase: {error}\n")
        for phase, seconds in found:
            print(phase.name, f"{seconds * phases.TERM_SHARE:g} {seconds * (1 - phases.TERM_SHARE):g}")
        return 0
    if arguments.out is None or arguments.phase is None:
        parser.error("expected --phase NAME and --out DIR")
    folders = [*arguments.results, arguments.out]
    if arguments.phase == "report":
        if not any((folder / results.RESULTS).exists() for folder in folders):
            parser.error(f"expected {results.RESULTS} in one of: {' '.join(map(str, folders))}")
        arguments.out.mkdir(parents=True, exist_ok=True)
        report.write(arguments.out, results.read(folders))
        if arguments.docs:
            report.write_page(arguments.docs, results.read(folders))
        print((arguments.out / results.REPORT).read_text(encoding="utf-8"))
        status, last = verdict(folders)
    else:
        runner = Runner(arguments, arguments.out)
        _end_when_told(runner)
        runner.run(*phases.choose(arguments.phase, arguments.limit)[0])
        runner.results.close()
        status, last = verdict([arguments.out])
    print(f"report: {arguments.out / results.REPORT}")
    print(last)
    return status


if __name__ == "__main__":
    sys.exit(main())
