# SPDX-License-Identifier: Apache-2.0
"""Nsight Compute's answer as one record a kernel: its time, and what keeps it from being faster."""

import csv
import re

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
LAUNCHES = 30  # most steps have as many
WRITE_SECONDS = 4  # for the answer, which Nsight Compute writes when the program has ended
TIME = "gpu__time_duration.sum"
DRAM = re.compile(r"^(dram__throughput|gpu__dram_throughput)\.avg\.pct_of_peak_sustained_elapsed$")
TENSOR = re.compile(r"^sm__(inst_executed_)?pipe_tensor.*pct_of_peak_sustained_(active|elapsed)$")
STALL = re.compile(r"average_\w*issue_stalled_(?!\w*not_issued)(\w+?)(?:_per_\w+)?\.ratio$")
SCALE = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}  # to us


def command(tool, program, case, seconds):
    """Profiles one step of `case`: what `program` runs between cudaProfilerStart and cudaProfilerStop. The clocks stay as
    they are. The program is ended in time for the answer on the launches until then, within `seconds`."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    return [tool, "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(LAUNCHES),
            "--target-processes", "all", *sections, "timeout", "--foreground", f"{max(1, seconds - WRITE_SECONDS):g}", program, "--profile", f"--only={case}"]


def _number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def short_name(name):
    """A kernel's name without its namespaces, parameters and what it was instantiated with."""
    name = re.sub(r"\(anonymous namespace\)::|<?unnamed>::|\w+::|^void ", "", name)
    return re.sub(r"[(<].*$", "", name)


def kernels(text):
    """One dictionary a kernel, the longest first: kernel, launches, us (of all launches), dram and tensor (per cent of the
    peak, by time), stalls (the three heaviest reasons with their warps). A figure that the profiler has not is None."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return []
    names, units, *launches = csv.reader(lines)
    column = {name: i for i, name in enumerate(names)}
    if "Kernel Name" not in column or TIME not in column:
        return []
    scale = SCALE.get(units[column[TIME]], 1e-3)
    found = {}
    for launch in launches:
        if len(launch) != len(names) or _number(launch[column[TIME]]) is None:
            continue
        found.setdefault(short_name(launch[column["Kernel Name"]]), []).append(launch)
    rows = [_kernel(name, group, column, scale) for name, group in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


def _kernel(name, launches, column, scale):
    weights = [_number(launch[column[TIME]]) for launch in launches]

    def mean(which):
        """By time, over the launches that have it; where several columns fit, the greatest."""
        values = []
        for title in filter(which, column):
            pairs = [(_number(launch[column[title]]), weight) for launch, weight in zip(launches, weights)]
            pairs = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
            if pairs:
                values.append(sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs))
        return max(values, default=None)

    stalls = {}
    for title in column:
        match = STALL.search(title)
        if match:
            warps = mean(lambda other, title=title: other == title)
            if warps is not None:
                stalls[match[1]] = max(warps, stalls.get(match[1], 0))
    heaviest = sorted(stalls.items(), key=lambda item: -item[1])[:3]
    return {"kernel": name, "launches": len(launches), "us": sum(weights) * scale, "dram": mean(DRAM.match),
            "tensor": mean(TENSOR.match), "stalls": [[reason, warps] for reason, warps in heaviest]}
