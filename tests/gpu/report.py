# SPDX-License-Identifier: Apache-2.0
"""The report over results (results.py): what passed, what failed, what did not finish, and all that was measured. It can
be written at any moment; a later result of a check or row takes the place of an earlier one."""

import dataclasses
import importlib
import os
import pathlib

from gpu import phases, results
from gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED
from rows import number, spread_text  # of tests/bench

NOT_MEASURED = "not measured"


@dataclasses.dataclass
class PhaseState:
    """The state of one phase; a phase without a start has not begun."""
    name: str
    seconds: float | None = None  # its limit
    checks: list = dataclasses.field(default_factory=list)  # names, of all its starts
    results: dict = dataclasses.field(default_factory=dict)  # by name
    running: bool = False  # its last start has no end

    def count(self, status):
        return sum(result["status"] == status for result in self.results.values())

    def unfinished(self):
        """The checks without a result."""
        return [name for name in self.checks if self.results.get(name, {"status": NOT_RUN})["status"] == NOT_RUN]

    def state(self):
        if not self.checks and self.seconds is None:
            return "not begun"
        return "**unfinished**" if self.running or self.unfinished() else "finished"


@dataclasses.dataclass
class Summary:
    phases: dict  # {name: PhaseState}, in the table's order
    rows: dict  # by name
    kernels: dict  # {check: {name: kernel}}
    machine: dict
    imitation: bool = False  # a phase ran over the host's imitation of CUDA

    def _named(self, status):
        return [f"{phase.name}/{name}" for phase in self.phases.values() for name, result in phase.results.items()
                if result["status"] == status]

    @property
    def failed(self):
        return self._named(FAILED)

    @property
    def passed(self):
        return self._named(PASSED)

    @property
    def skipped(self):
        return self._named(SKIPPED)

    @property
    def unfinished(self):
        """Checks, and phases that ended before they could say which there are."""
        names = [f"{phase.name}/{name}" for phase in self.phases.values() for name in phase.unfinished()]
        return names + [phase.name for phase in self.phases.values() if phase.running and not phase.unfinished()]


def summarize(records):
    summary = Summary({name: PhaseState(name) for name in phases.PHASES}, {}, {}, {})
    for record in records:
        kind, phase = record["record"], summary.phases.get(record.get("phase"))
        if phase is None:
            continue
        if kind == "start":
            phase.seconds, phase.running = record["seconds"], True
            phase.checks += [name for name in record["checks"] if name not in phase.checks]
            summary.machine = record["machine"] or summary.machine
            summary.imitation = summary.imitation or record["imitation"]
        elif kind == "check":
            phase.results[record["check"]] = record
        elif kind == "row":
            summary.rows[record["name"]] = record
        elif kind == "kernel":
            found = summary.kernels.setdefault(record["check"], {})
            found[record["kernel"]] = record
        elif kind == "end":
            phase.running = False
    return summary


def _table(head, lines):
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(line) + " |" for line in cells]


def _phase_table(summary):
    lines = []
    for phase in summary.phases.values():
        rest = phase.unfinished()
        lines.append((phase.name, phase.state(), phase.count(PASSED), phase.count(FAILED), phase.count(SKIPPED), len(rest),
                      "" if phase.seconds is None else f"{phase.seconds:g} s"))
    return _table(("phase", "state", "passed", "failed", "skipped", "not run", "limit"), lines)


def _check_list(summary):
    """Returns the checks that failed, were skipped or did not run, with the reasons; checks of a phase that have one reason are one
    line."""
    lines = {}
    for phase in summary.phases.values():
        for name, result in phase.results.items():
            if result["status"] == FAILED:
                tests = "".join(f"; {test}" for test in result.get("failures", [])[:20])
                lines.setdefault(("**failed**", phase.name, result["reason"] + tests), []).append(name)
            elif result["status"] == SKIPPED:
                lines.setdefault(("skipped", phase.name, result["reason"]), []).append(name)
        for name in phase.unfinished():
            reason = phase.results.get(name, {}).get("reason", "the run ended before it")
            lines.setdefault(("**not run**", phase.name, reason), []).append(name)
    return [f"- {what} {phase}/{', '.join(names)}: {reason}" for (what, phase, reason), names in lines.items()] or ["- nothing"]


def _bits(summary):
    held, broken = set(), set()
    for phase in summary.phases.values():
        for result in phase.results.values():
            held |= set(result.get("bits", {}).get("held", []))
            broken |= set(result.get("bits", {}).get("broken", []))
    lines = [f"- broken: {name}" for name in sorted(broken)] + [f"- held: {name}" for name in sorted(held - broken)]
    return lines or ["- none was tested"]


def _row_line(row):
    met = "" if row["target"] is None else "met" if row["pass"] else "**missed**"
    return (row["name"], number(row["value"]), row["unit"], spread_text(row), number(row["limit"]), number(row["ratio"]),
            number(row["target"]), met)


def rows_table(summary):
    return _table(("row", "median", "unit", "quartiles", "limit", "of the limit", "target", ""),
                  [_row_line(row) for row in summary.rows.values()])


def _targets():
    """tests/bench/gpu_targets.py, the claims of docs/develop/lab/kernels.md; None in a tree without it."""
    try:
        return importlib.import_module("gpu_targets")
    except ModuleNotFoundError as error:
        if error.name != "gpu_targets":
            raise
        return None


def _of_device(values, device):
    """Returns the value of a claim for this device, where it has one for each: by the first word of the device's name there,
    as H100 of "H100 SXM"."""
    if not isinstance(values, dict):
        return values
    return next((value for name, value in values.items() if name.split()[0] in (device or "")), None)


def _target_line(claim, summary):
    row, device = summary.rows.get(claim["name"]), summary.machine.get("device")
    target, limit = _of_device(claim.get("target"), device), _of_device(claim.get("limit"), device)
    if row and row["limit"] and claim.get("factor"):  # from the limit that this run measured
        target = row["limit"] * claim["factor"]
    cells = (claim.get("claim", claim["name"]), claim["name"], claim.get("unit", ""), _figure(limit), _figure(target))
    if not row:
        return (*cells, NOT_MEASURED, "", "", "")
    met = target is None or (row["value"] <= target if claim.get("at_most") else row["value"] >= target)
    return (*cells, number(row["value"]), spread_text(row), number(row["limit"]),
            "" if target is None else "met" if met else "**missed**")


def _figure(value):
    return number(value) if isinstance(value, (int, float)) else value or ""


def targets_table(summary):
    """A line for each claim, with its measured row. Where a target is a multiple of a limit, the measured limit counts."""
    return _table(("claim", "row", "unit", "computed limit", "target", "measured", "quartiles", "measured limit", ""),
                  [_target_line(claim, summary) for claim in _targets().ROWS])


def _kernel_lines(summary):
    """The heaviest kernels of all profiled cases, each once."""
    found = {}
    for case, kernels in summary.kernels.items():
        for name, kernel in kernels.items():
            if name not in found or kernel["us"] > found[name][1]["us"]:
                found[name] = (case, kernel)
    heaviest = sorted(found.values(), key=lambda item: -item[1]["us"])[:phases.HEAVIEST]
    lines = []
    for case, kernel in heaviest:
        stalls = ", ".join(f"{reason} {number(warps)}" for reason, warps in kernel["stalls"])
        lines.append((kernel["kernel"], case, kernel["launches"], number(kernel["us"]), number(kernel["dram"]),
                      number(kernel["tensor"]), stalls))
    return _table(("kernel", "in", "launches", "us", "DRAM %", "tensor %", "stalls, warps an issue"), lines)


def text(records):
    """The whole report."""
    summary = summarize(records)
    lines = ["# Results of tests/gpu.sh", ""]
    lines += [f"- {name}: {value or 'unknown'}" for name, value in summary.machine.items()] or ["- nothing has begun"]
    lines += ["", "## Phases", *_phase_table(summary)]
    lines += ["", "## Failed, skipped, not run", *_check_list(summary)]
    lines += ["", "## Promises of equal bits", *_bits(summary)]
    if summary.rows:
        times = "Times say nothing of a device." if summary.imitation else "Time is the device's, between two CUDA events."
        lines += ["", "## Rows", times, "", *rows_table(summary)]
    if _targets():
        lines += ["", "## Targets", *targets_table(summary)]
    if summary.kernels:
        lines += ["", "## Heaviest kernels", *_kernel_lines(summary)]
    return "\n".join(lines) + "\n"


def write(folder, records):
    """report.md in `folder`, whole at every moment."""
    path = pathlib.Path(folder) / results.REPORT
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text(records), encoding="utf-8")
    temporary.replace(path)


def write_page(page, records):
    """The table of claims in a page, between the marks of tests/bench/gpu_targets.py, with what was measured."""
    summary, targets = summarize(records), _targets()
    if targets is None:
        raise SystemExit(f"{page}: expected tests/bench/gpu_targets.py, which knows the page's table, found none")
    if summary.imitation:
        raise SystemExit(f"{page}: expected results of a device, got some of the host's imitation of CUDA")
    content = page.read_text(encoding="utf-8")
    head, begin, rest = content.partition(targets.BEGIN)
    _, end, tail = rest.partition(targets.END)
    if not begin or not end:
        raise SystemExit(f"{page}: expected the lines {targets.BEGIN.strip()} and {targets.END.strip()}")
    table = targets.markdown({name: row["value"] for name, row in summary.rows.items()})
    page.write_text(head + begin + table + end + tail, encoding="utf-8")
