#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares methods on the digits: trains rows of ROWS through a service with the learning rates there, and shows what came out.

deploy/quickstart.sh starts a service and this script.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVALUATE_EVERY = 10
TASKS = {"classifier": "64-64-64-10", "autoencoder": "64-48-24-8-24-48-64"}
# The loss that a task is compared by, and its place in a point of a curve. Over-fitting limits the classifier's held-out loss.
CRITERIA = {"classifier": ("training loss", 3), "autoencoder": ("loss", 1)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A method with the statistics that it is fed, and its base optimizer."""
    label: str            # of the table
    method: str
    rates: tuple = ()     # the best of one grid for the autoencoder and the classifier, where the table has the row
    statistics: str = ""  # none: it takes no statistics
    options: tuple = ()
    optimizer: str = "adamw"  # plain: the method's answers have a length of their own

    def flags(self):
        return [f"--method={self.method}", *(f"--option={option}" for option in self.options), f"--optimizer={self.optimizer}",
                *([f"--statistics={self.statistics}"] if self.statistics else [])]


LOW_RANK = ("rule=EXACT_DAMPED", "representation=LOW_RANK", "rank=16")
# The factors begin as the first statistics instead of I, beside which these models' output gradients are nothing.
KFAC = ("scaling=NORM_RESCALE", "factor_decay=piecewise(0, 1: 0.95)", "pi_split=true", "damping=0.00003")
ROWS = {
    "none": Row("AdamW alone", "identity", (.016, .016)),
    "mean-lowrank": Row("AdamW + mkor, means, rank 16", "mkor", (.032, .008), "mean", LOW_RANK),
    "signed-lowrank": Row("AdamW + mkor, rank 16", "mkor", (.032, .016), "signed", LOW_RANK),
    "soap": Row("soap", "soap", (.032, .016), optimizer="plain"),
    "kron": Row("kron", "kron", optimizer="plain"),
    "muon": Row("muon", "muon", optimizer="plain"),
    "eva": Row("eva", "eva", statistics="mean", options=("scaling=NORM_RESCALE",)),
    "kfac": Row("kfac", "kfac", statistics="signed", options=KFAC),
    "kfac-covariance": Row("kfac, covariances", "kfac", statistics="covariance", options=KFAC),
}


def number(text):
    """None where it is not finite."""
    return float(text) if math.isfinite(float(text)) else None


def read_run(path, text):
    """A run, from what digits_trainer wrote with --csv and what it printed."""
    with open(path, encoding="ascii") as file:
        lines = list(csv.DictReader(file))
    by_step = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    steps = list(by_step.values())
    modes = [{line["mode"] for line in step} for step in steps]
    if any(len(mode) != 1 for mode in modes):
        raise SystemExit(f"digits.py: the modes of two workers differ: {modes}")
    curve = [[int(line["step"]) + 1, *(number(line[name]) for name in ("held_out_loss", "held_out_accuracy", "training_loss"))]
             for line in lines if line["held_out_loss"]]
    return {"steps": len(steps), "curve": curve, "final_loss": curve[-1][1], "modes": [mode.pop() for mode in modes],
            "weights_hash": re.findall(r"weights (\w{16})$", text, re.MULTILINE)[-1],
            "seconds": [max(float(line["seconds"]) for line in step) for step in steps],
            **{name: [sum(int(line[name]) for line in step) for step in steps] for name in ("statistics_bytes", "gradient_bytes")}}


def train(program, flags):
    """Returns the results of one run, and the line that the program printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.csv"
        command = [program, *flags, f"--csv={path}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"digits.py: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")
        text = done.stdout.strip()
        return read_run(path, text), text


def stretches(run):
    """A run's steps in a row in one mode, and what they took."""
    begin = 0
    for mode, steps in itertools.groupby(run["modes"]):
        count = len(list(steps))
        used = {name: sum(run[name][begin:begin + count]) for name in ("seconds", "statistics_bytes", "gradient_bytes")}
        yield {"first_step": begin, "mode": mode, "steps": count, "seconds": used["seconds"],
               "bytes_per_step": {"statistics": used["statistics_bytes"] / count, "gradients": used["gradient_bytes"] / count}}
        begin += count


def row_of(task, name, runs):
    """The runs of one row on a task, with seeds 1 ... N, as an entry of the report."""
    modes = [list(stretches(run)) for run in runs]
    steps = sum(run["steps"] for run in runs)
    row = {"task": task, "row": name, "label": ROWS[name].label, "method": ROWS[name].method,
           "statistics": ROWS[name].statistics.upper() or "NONE", "base_optimizer": ROWS[name].optimizer,
           "steps": runs[0]["steps"], "seeds": list(range(1, len(runs) + 1)),
           "curves": [run["curve"] for run in runs], "final_loss": [run["final_loss"] for run in runs],
           "weights_hash": [run["weights_hash"] for run in runs], "modes": modes,
           "first_order_from": [next((s["first_step"] for s in seed if s["mode"] == "FIRST_ORDER"), None) for seed in modes],
           "seconds": statistics.fmean(sum(run["seconds"]) for run in runs),
           "bytes_per_step": {name: sum(sum(run[f"{field}_bytes"]) for run in runs) / steps
                              for name, field in (("statistics", "statistics"), ("gradients", "gradient"))}}
    if task == "classifier":
        row["final_accuracy"] = [run["curve"][-1][2] for run in runs]
    return row


def compare_with_adamw(rows):
    """Adds the first evaluated step at which a seed's loss is no more than what AdamW alone ends with from that seed."""
    for row in rows:
        alone = next(r for r in rows if (r["task"], r["row"]) == (row["task"], "none"))
        place = CRITERIA[row["task"]][1]
        row["steps_to_adamw_final"] = [
            next((point[0] for point in curve if point[place] is not None and point[place] <= target[-1][place]), None)
            for curve, target in zip(row["curves"], alone["curves"])]


def aligned(lines):
    """The first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join("  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) + "\n"
                   for line in lines)


def report(rows):
    """The tables, of the first seed."""
    out = []
    for task, group in itertools.groupby(rows, key=lambda row: row["task"]):
        group = list(group)
        lines = [("method", "held-out loss", f"steps to AdamW's final {CRITERIA[task][0]}", "speed-up")]
        for row in group:
            steps = row["steps_to_adamw_final"][0]
            lines.append((row["label"], f"{row['final_loss'][0]:.4f}" if row["final_loss"][0] is not None else "diverged",
                          f"{steps}" if steps else "never", f"{row['steps'] / steps:.1f}x" if steps else "-"))
        out.append(f"{task} {TASKS[task]} on 1,438 images of handwritten digits, {group[0]['steps']} steps\n" + aligned(lines))
    first = rows[0]
    out.append("Speed-up: AdamW's steps, divided by the steps after which a method is no worse than AdamW at its end (looked at every"
               f" {EVALUATE_EVERY}).\nIt counts steps, not time: all rows go through the service, AdamW's too.\n"
               f"{first['workers']} workers, {first['shards']} shards, {first['exchange']}. Learning rates: the best of one grid for every"
               " method.\n")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(known):
        def parse(text):
            chosen = list(known) if text == "all" else text.split(",")
            unknown = [name for name in chosen if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"expected all or some of {','.join(known)}, got {unknown[0]}")
            return chosen
        return parse
    parser.add_argument("--coordinator", metavar="HOST:PORT", required=True)
    parser.add_argument("--shards", type=int, default=1, help="of the service, for the report")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build/dev", help="the build tree")
    parser.add_argument("--tasks", type=names(TASKS), default=list(TASKS), help="classifier, autoencoder, or all (all)")
    compared = [name for name, row in ROWS.items() if row.rates]
    parser.add_argument("--methods", type=names(compared), default=["none", "signed-lowrank", "soap"],
                        help=f"{', '.join(compared)}, or all (none,signed-lowrank,soap)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, seeds 1 ... N (1); the tables show the first")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the rows there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the program that runs

    program = arguments.binaries / "tests/e2e/trainer/digits_trainer"
    workers, exchange = 4, "DIRECT"
    rows, planned = [], list(itertools.product(arguments.tasks, arguments.methods))
    for place, (task, name) in enumerate(planned, 1):
        rate = ROWS[name].rates[task == "classifier"]
        runs = []
        for seed in range(1, arguments.seeds + 1):
            run, text = train(program, [f"--coordinator={arguments.coordinator}", f"--task={task}", *ROWS[name].flags(),
                                        f"--learning-rate={rate}", f"--seed={seed}", f"--workers={workers}", f"--exchange={exchange}"])
            print(f"training, row {place} of {len(planned)}: {text}", flush=True)
            runs.append(run)
        rows.append(row_of(task, name, runs) | {"learning_rate": rate, "workers": workers, "shards": arguments.shards, "exchange": exchange})
    compare_with_adamw(rows)
    print("\n" + report(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
