#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the rows {name, value, unit, limit, ratio, target, pass, spread} that benchmark programs wrote, and judges them.

Inputs are JSON files: an object with a list `rows`. `value` is a median. `spread` is {q1, q3, n}, the quartiles over n
repetitions in the value's unit, or null where there was one; a program can leave it out.
"""

import argparse
import json
import re
import statistics
import sys


def row(name, value, unit, limit=None, ratio=None, quartiles=None):
    return {"name": name, "value": value, "unit": unit, "limit": limit, "ratio": ratio, "target": None, "pass": True,
            "spread": quartiles}


def spread(values):
    """The quartiles of repetitions, linear between the two nearest, as bench_rows.h has them; None of a single value."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": low, "q3": high, "n": len(values)}


def end_without(what):
    """Ends a program that lacks something, with the line that tests/gpu.sh reports as its reason."""
    print(f"no {what}", flush=True)
    sys.exit(0)


def require(torch, device, optimizer="AdamW"):
    """Ends a program that needs this device, or an optimizer of later releases of torch."""
    if device == "cuda" and not torch.cuda.is_available():
        end_without(f"device that torch {torch.__version__} can use")
    if not hasattr(torch.optim, optimizer):
        end_without(f"torch.optim.{optimizer} in torch {torch.__version__}")


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


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--filter", default=".", help="only rows whose name matches, and the machine's limits")
    parser.add_argument("--lenient", action="store_true", help="a missed target is no failure")
    arguments = parser.parse_args(arguments)
    rows = []
    for path in arguments.inputs:
        with open(path, encoding="utf-8") as file:
            rows += json.load(file)["rows"]
    rows = [r for r in rows if r["name"].startswith("limit/") or re.search(arguments.filter, r["name"])]
    print_table(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file, indent=1)
            file.write("\n")
    if all(r["name"].startswith("limit/") for r in rows):
        print("nothing was measured")
        return 1
    return 0 if arguments.lenient or all(r["pass"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
