# SPDX-License-Identifier: Apache-2.0
"""Rows: those of cuda_bench, case by case, and those of Python programs.

All cases run in one process, which reports each case at its end. If a case ends the process (a wrong answer in a step, a fault
of the device) or does not end in its time, the case has failed and a new process goes on with the next.
"""

import json
import pathlib
import sys
import time

import gpu_targets  # of tests/bench
import rows
from gpu import judge, machine, phases, process, results
from gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED

TESTS = pathlib.Path(__file__).resolve().parents[1]
STEP, PEER = "step/cuda/", "step/torch/"


def _command(runner, *words):
    program = runner.programs.path("cuda_bench_on_host" if runner.imitation else "cuda_bench")
    return [program, *words, *(["--short"] if runner.short else [])]


def cases(runner):
    """The names of all cases; a program that cannot say is one case, which fails."""
    status, text = process.run(_command(runner, "--list"), min(60, runner.left()), f"{runner.phase}/list", runner.results, runner.environment)
    return text.split() if status == 0 and text else ["cuda_bench"]


class _Case:
    """The case that the process is at."""

    def __init__(self, name, seconds):
        self.name, self.began, self.deadline = name, time.monotonic(), time.monotonic() + seconds


def run(runner, names):
    """Runs the cases and records each with its rows."""
    left = list(names)
    while left:
        if runner.left() <= 0:
            for name in left:
                runner.done(name, {"status": NOT_RUN, "reason": "the phase's time was over"}, 0)
            return
        left = _run_process(runner, left)


def _run_process(runner, names):
    """Runs one process over the cases. Returns the cases that are left for another process."""
    left, current, measured = list(names), None, 0
    began = time.monotonic()
    source = f"{runner.phase}/{names[0]}"
    try:
        program = process.Program(_command(runner, "--lines", f"--only={','.join(names)}"), source, runner.results,
                                  runner.environment)
    except OSError as error:
        for name in left:
            runner.done(name, {"status": FAILED, "reason": str(error)}, 0)
        return []
    start_by = began + phases.BENCH_START_SECONDS

    def deadline():
        return min(runner.deadline, current.deadline if current else start_by)

    for line in program.lines(deadline):
        message = _message(line)
        if message is None:
            continue
        if "begin" in message:
            current, measured = _Case(message["begin"], phases.bench_seconds(message["begin"])), 0
        elif "end" in message and current:
            error = message["error"]
            verdict = {"status": PASSED, "rows": measured} if error is None else {"status": FAILED, "reason": error}
            left.remove(current.name)
            runner.done(current.name, verdict, time.monotonic() - current.began)
            current, start_by = None, time.monotonic() + phases.BENCH_START_SECONDS
        elif "name" in message and current:
            measured += 1
            runner.row(current.name, message)
    if not left:
        return []
    return _blame(runner, program, current, left, len(left) < len(names), began)


def _message(line):
    if not line.startswith("{"):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _blame(runner, program, current, left, has_ended_one, began):
    """The process ended before its last case. The case that had begun has failed; if none had, and no other case has ended,
    the first case has failed. Returns the cases that are left."""
    status, text = program.status, "\n".join(program.last)
    if status == judge.NO_DEVICE:
        verdict = judge.googletest(status, text, 0)
        for name in left:
            runner.done(name, {"status": SKIPPED, "reason": verdict["reason"]}, 0)
        return []
    name = current.name if current else left[0]
    if current is None and has_ended_one:
        return left  # it ended between two cases, as after a fault of the device: another process goes on
    since = current.began if current else began
    seconds = time.monotonic() - since
    last = [line for line in program.last if line and not line.startswith("{")]
    reason = f"not done after {seconds:.4g} s" if status is None else judge.exit_reason(status)
    if last:
        reason += f": {last[-1]}"
    runner.done(name, {"status": FAILED, "reason": reason}, seconds)
    return [other for other in left if other != name]


def run_script(runner, script):
    """Runs a Python program on the device, or with --imitation in short on the CPU, and records its rows."""
    words = ["--device", "cpu" if runner.imitation else "cuda", *(["--short"] if runner.short else [])]
    seconds = min(script.seconds, runner.left())
    packages = runner.programs.folder / "python"  # of a pack
    environment = {**machine.environment(), "PYTHONUNBUFFERED": "1"}
    if packages.is_dir():
        environment["PYTHONPATH"] = str(packages)
    status, text = process.run([sys.executable, "-B", str(TESTS / script.path), *script.words, *words], seconds,
                               f"{runner.phase}/{script.name}", runner.results, environment)
    lines = text.splitlines()
    found = [message for message in map(_message, lines) if message and "name" in message]
    for row in found:
        runner.row(script.name, row)
        if not runner.short:  # whose layers are not those of the peer
            _compare(runner, script, row)
    if status != 0:
        reason = f"not done after {seconds:.4g} s" if status is None else judge.exit_reason(status)
        return {"status": FAILED, "reason": ": ".join([reason, *lines[-1:]]), "rows": len(found)}
    missing = next((line for line in lines if line.startswith("no ")), None)
    if not found:
        return {"status": SKIPPED, "reason": missing} if missing else {"status": FAILED, "reason": "it wrote no row"}
    return {"status": PASSED, "rows": len(found)}


def _compare(runner, script, peer):
    """Rows for our steps over that of a peer."""
    kind = peer["name"].removeprefix(PEER)
    for name, ours in _our_steps(runner).items():
        of_ours = next((one for beginning, one in phases.PEERS.items() if name.startswith(beginning)), None)
        if of_ours == kind and "/" not in name:
            ratio, most = ours / peer["value"], gpu_targets.MOST_OF_TORCH[gpu_targets.peer_of(name)]
            runner.row(script.name, {**rows.row(f"{STEP}{name}/to_torch", ratio, "x"), "target": most, "pass": ratio <= most})


def _our_steps(runner):
    """{name: ms} of the steps measured so far."""
    measured = [r for r in results.read([runner.results.folder]) if r["record"] == "row"]
    return {r["name"].removeprefix(STEP): r["value"] for r in measured if r["name"].startswith(STEP) and r["unit"] == "ms"}
