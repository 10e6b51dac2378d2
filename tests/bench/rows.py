#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns what benchmark programs wrote into rows {name, value, unit, limit, ratio, target, pass, spread}.

Inputs are JSON files: Google Benchmark's output (medians over repetitions are taken here; the limit of a row is the
time that the machine's measured FMA peak and memory stream allow for its flops and bytes), or an object with a list
`rows`, taken as it is. In the first kind `ratio` is the fraction of the limit that was reached, 1 being best, and a row
passes when its result was right. A benchmark that failed is a row that does not pass, with its `error`.

`value` is a median; `spread` is {q1, q3, n}, the quartiles over n repetitions, in the value's unit, or null where there
was one. Programs that write rows themselves can leave `spread` out.
"""

import argparse
import json
import math
import re
import statistics
import sys

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def row(name, value, unit, limit=None, ratio=None, quartiles=None):
    return {"name": name, "value": value, "unit": unit, "limit": limit, "ratio": ratio, "target": None, "pass": True,
            "spread": quartiles}


def spread(values):
    """The quartiles of repetitions, linear between the two nearest, as bench_rows.h has them; None of a single value."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": low, "q3": high, "n": len(values)}


def limit_seconds(counters, peak, streams):
    """The time that peak and stream (the one with the nearest working set) allow; None when neither applies."""
    times = []
    if peak and counters.get("flops"):
        times.append(counters["flops"] / peak)
    if streams and counters.get("bytes"):
        working_set = counters.get("working_set", 0)
        nearest = min(streams, key=lambda s: abs(math.log((s[0] + 1) / (working_set + 1))))
        times.append(counters["bytes"] / nearest[1])
    return max(times, default=None)


def google_rows(document):
    groups = {}
    failed = {}
    for run in document["benchmarks"]:
        name = run.get("run_name", run["name"])
        if run.get("error_occurred"):
            failed[name] = run.get("error_message", "failed")
        elif run.get("run_type", "iteration") == "iteration":
            groups.setdefault(name, []).append(run)
    repetitions = {name: [r["real_time"] * SECONDS[r["time_unit"]] for r in group] for name, group in groups.items()}
    seconds = {name: statistics.median(times) for name, times in repetitions.items()}
    peak = None
    streams = []
    for name, time in seconds.items():
        counters = groups[name][0]
        if name == "limit/fma_f32":
            peak = counters["flops"] / time
        elif name.startswith("limit/stream"):
            streams.append((counters["working_set"], counters["bytes"] / time))

    rows = []
    for name, time in seconds.items():
        counters = groups[name][0]
        if name == "limit/fma_f32":
            rates = [counters["flops"] / each / 1e9 for each in repetitions[name]]
            rows.append(row(name, peak / 1e9, "GFLOP/s", quartiles=spread(rates)))
        elif name.startswith("limit/"):
            rates = [counters["bytes"] / each / 1e9 for each in repetitions[name]]
            rows.append(row(name, counters["bytes"] / time / 1e9, "GB/s", quartiles=spread(rates)))
        else:
            limit = limit_seconds(counters, peak, streams)
            rows.append(row(name, time * 1e6, "us", limit and limit * 1e6, limit and limit / time,
                            spread([each * 1e6 for each in repetitions[name]])))
    for name, message in failed.items():
        rows.append({**row(name, None, "us"), "pass": False, "error": message})
    return sorted(rows, key=lambda r: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", r["name"])])


def number(value):
    return "" if value is None else f"{value:.4g}"


def spread_text(record):
    quartiles = record.get("spread")
    return f"{number(quartiles['q1'])} ... {number(quartiles['q3'])} of {quartiles['n']}" if quartiles else ""


def print_table(rows):
    head = ("name", "value", "unit", "quartiles", "limit", "ratio", "target", "pass")
    lines = [head] + [(r["name"], number(r["value"]), r["unit"], spread_text(r), number(r["limit"]), number(r["ratio"]),
                       number(r["target"]), "yes" if r["pass"] else "NO") for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for failure in (r for r in rows if "error" in r):
        print(f"{failure['name']}: {failure['error']}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--filter", default=".", help="only rows whose name matches, and the machine's limits")
    parser.add_argument("--lenient", action="store_true", help="only errors count as failures, not missed targets")
    arguments = parser.parse_args()
    rows = []
    for path in arguments.inputs:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        rows += document["rows"] if "rows" in document else google_rows(document)
    rows = [r for r in rows if r["name"].startswith("limit/") or re.search(arguments.filter, r["name"])]
    print_table(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file, indent=1)
            file.write("\n")
    if all(r["name"].startswith("limit/") for r in rows):
        print("nothing was measured")
        sys.exit(1)
    bad = [r for r in rows if "error" in r or not (r["pass"] or arguments.lenient)]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
