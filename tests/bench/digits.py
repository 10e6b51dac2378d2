#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares methods on the digits example: trains every row of the table through a service, and shows what came out.

deploy/quickstart.sh starts a service and this script; docs/develop/lab/digits.md says what is compared and describes the JSON.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RATES = ROOT / "tests/bench/digits_rates.txt"
GRID = [0.004, 0.008, 0.016, 0.032, 0.064]
EXTENSIONS = 4   # doublings beyond an end of the grid, at most
EVALUATE_EVERY = 10
TASKS = {"classifier": "64-64-64-10", "autoencoder": "64-48-24-8-24-48-64"}
# The loss that a task is compared by, and its place in a point of a curve. Over-fitting limits the classifier's held-out loss.
CRITERIA = {"classifier": ("training loss", 3), "autoencoder": ("loss", 1)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A method with the statistics that it is fed."""
    label: str            # of the table, beside the base optimizer
    method: str
    statistics: str = ""  # none: it takes no statistics
    options: tuple = ()
    optimizer: str = ""   # the only one that the row runs on: its answers have a length of their own
    fallback: str = "never"
    rate_of: str = ""     # the row whose learning rate this one takes

    def flags(self):
        return [f"--method={self.method}", *(f"--option={option}" for option in self.options),
                *([f"--statistics={self.statistics}"] if self.statistics else [])]


LOW_RANK = ("rule=EXACT_DAMPED", "representation=LOW_RANK", "rank=16")
DENSE = ("rule=EXACT_DAMPED", "representation=DENSE")
# The factors begin as the first statistics instead of I, beside which these models' output gradients are nothing (docs/develop/lab/digits.md).
KFAC = ("scaling=NORM_RESCALE", "factor_decay=piecewise(0, 1: 0.95)", "pi_split=true", "damping=0.00003")
ROWS = {
    "none": Row("", "identity"),
    "reference": Row("mkor REFERENCE, dense", "mkor", "mean", ("rule=REFERENCE", "representation=DENSE")),
    "blend": Row("mkor BLEND, dense", "mkor", "signed", ("rule=BLEND", "representation=DENSE")),
    "mean": Row("mkor, means, dense", "mkor", "mean", DENSE),
    "mean-lowrank": Row("mkor, means, rank 16", "mkor", "mean", LOW_RANK),
    "signed": Row("mkor, dense", "mkor", "signed", DENSE),
    "signed-lowrank": Row("mkor, rank 16", "mkor", "signed", LOW_RANK),
    "kron": Row("kron", "kron", optimizer="plain"),
    "soap": Row("soap", "soap", optimizer="plain"),
    "muon": Row("muon", "muon", optimizer="plain"),
    "eva": Row("eva", "eva", "mean", ("scaling=NORM_RESCALE",)),
    "kfac": Row("kfac", "kfac", "signed", KFAC),
    "kfac-covariance": Row("kfac, covariances", "kfac", "covariance", KFAC),
    "mkor-h": Row("mkor-h, rank 16", "mkor", "signed", LOW_RANK, fallback="loss-rate", rate_of="signed-lowrank"),
}
NAMES = {"adamw": "AdamW", "lamb": "LAMB", "sgd": "SGD", "plain": "SGD"}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row on one task with one base optimizer."""
    task: str
    row: str
    optimizer: str

    def flags(self, rate, seed):
        return [f"--task={self.task}", *ROWS[self.row].flags(), f"--optimizer={self.optimizer}",
                f"--learning-rate={rate:.17g}", f"--seed={seed}"]

    def label(self):
        row = ROWS[self.row]
        if row.optimizer:
            return row.label
        return f"{NAMES[self.optimizer]} + {row.label}" if row.label else f"{NAMES[self.optimizer]} alone"

    def rate_key(self):
        return Candidate(self.task, ROWS[self.row].rate_of or self.row, self.optimizer)


def said(command):
    """Returns the output of a program."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"digits.py: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


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
        text = said([program, *flags, f"--csv={path}"])
        return read_run(path, text), text


def median(values):
    """A missing value counts as worst: the loss was not finite, or the step never came."""
    return statistics.median(math.inf if value is None else value for value in values)


def progress(title):
    """A function of (done, planned) that prints a line for each tenth of the way."""
    said = -1

    def say(done, planned):
        nonlocal said
        if done * 10 // planned != said:
            said = done * 10 // planned
            print(f"{title}: {said * 10} %, {done} of {planned} runs", flush=True)
    return say


def choose_rates(losses_of, candidates, grid):
    """The rate with the smallest loss for each candidate. While it is an end of what was tried, the next power of two beyond is
    tried too. `losses_of` gives the loss of each (candidate, rate) of a list."""
    tried = {candidate: {} for candidate in candidates}
    waiting = {candidate: list(grid) for candidate in candidates}
    for extension in range(EXTENSIONS + 1):
        work = [(candidate, rate) for candidate in candidates for rate in waiting[candidate]]
        if not work:
            break
        for (candidate, rate), loss in zip(work, losses_of(work)):
            tried[candidate][rate] = loss
        for candidate, losses in tried.items():
            best = min(sorted(losses), key=losses.get)
            beyond = [best / 2] if best == min(losses) else [best * 2] if best == max(losses) else []
            waiting[candidate] = beyond if waiting[candidate] and extension < EXTENSIONS else []
    return {candidate: min(sorted(losses), key=losses.get) for candidate, losses in tried.items()}


def search_rates(program, candidates, arguments):
    """By training in one process, which takes the course that training through the service takes."""
    seeds = range(1, arguments.rate_seeds + 1)
    say = progress("learning rates")
    common = common_flags(arguments)
    done = planned = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        def losses_of(work):
            nonlocal done, planned
            futures = [pool.submit(said, [program, *candidate.flags(rate, seed), *common])
                       for candidate, rate in work for seed in seeds]
            planned += len(futures)
            try:
                for _ in concurrent.futures.as_completed(futures):
                    done += 1
                    say(done, planned)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            losses = [number(future.result()) for future in futures]
            return [median(losses[i:i + len(seeds)]) for i in range(0, len(losses), len(seeds))]
        return choose_rates(losses_of, candidates, arguments.grid)


def read_rates(path):
    rates = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            task, row, optimizer, rate = line.split()
            rates[Candidate(task, row, optimizer)] = float(rate)
    return rates


def write_rates(path, rates, arguments):
    lines = ["# Learning rates that tests/bench/digits.py --search chose: for each task, row and base optimizer the smallest median",
             f"# held-out loss of {arguments.rate_seeds} seeds on the grid {', '.join(f'{rate:g}' for rate in arguments.grid)}, doubled or halved"
             " further while an end is best."]
    lines += [f"{key.task} {key.row} {key.optimizer} {rate:g}" for key, rate in sorted(rates.items(), key=lambda item: str(item[0]))]
    path.write_text("\n".join(lines) + "\n")


def stretches(run):
    """A run's steps in a row in one mode, and what they took."""
    begin = 0
    for mode, steps in itertools.groupby(run["modes"]):
        count = len(list(steps))
        used = {name: sum(run[name][begin:begin + count]) for name in ("seconds", "statistics_bytes", "gradient_bytes")}
        yield {"first_step": begin, "mode": mode, "steps": count, "seconds": used["seconds"],
               "bytes_per_step": {"statistics": used["statistics_bytes"] / count, "gradients": used["gradient_bytes"] / count}}
        begin += count


def row_of(candidate, runs):
    """The runs of one candidate, with seeds 1 ... N, as one row of the report."""
    modes = [list(stretches(run)) for run in runs]
    steps = sum(run["steps"] for run in runs)
    row = {"task": candidate.task, "row": candidate.row, "label": candidate.label(), "method": ROWS[candidate.row].method,
           "statistics": ROWS[candidate.row].statistics.upper() or "NONE", "base_optimizer": candidate.optimizer,
           "steps": runs[0]["steps"], "seeds": list(range(1, len(runs) + 1)),
           "curves": [run["curve"] for run in runs], "final_loss": [run["final_loss"] for run in runs],
           "weights_hash": [run["weights_hash"] for run in runs], "modes": modes,
           "first_order_from": [next((s["first_step"] for s in seed if s["mode"] == "FIRST_ORDER"), None) for seed in modes],
           "seconds": statistics.fmean(sum(run["seconds"]) for run in runs),
           "bytes_per_step": {name: sum(sum(run[f"{field}_bytes"]) for run in runs) / steps
                              for name, field in (("statistics", "statistics"), ("gradients", "gradient"))}}
    if candidate.task == "classifier":
        row["final_accuracy"], row["final_training_loss"] = ([run["curve"][-1][place] for run in runs] for place in (2, 3))
    return row


def compare_with_adamw(rows):
    """Adds the first evaluated step at which a seed's loss is no more than what AdamW alone ends with from that seed."""
    for row in rows:
        adamw = [r for r in rows if (r["task"], r["row"], r["base_optimizer"]) == (row["task"], "none", "adamw")]
        place = CRITERIA[row["task"]][1]
        row["steps_to_adamw_final"] = [
            next((point[0] for point in curve if point[place] is not None and point[place] <= target[-1][place]), None)
            for curve, target in zip(row["curves"], adamw[0]["curves"])] if adamw else []


def spread(values, digits):
    """Median (smallest-largest)."""
    def text(value):
        return "never" if value == math.inf else f"{value:.{digits}f}"
    known = [math.inf if value is None else value for value in values]
    return text(median(known)) + (f" ({text(min(known))}-{text(max(known))})" if len(known) > 1 else "")


def aligned(lines):
    """The first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join("  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) + "\n"
                   for line in lines)


def short_table(task, rows):
    """The table of one seed, which a newcomer reads."""
    lines = [("method", "held-out loss", f"steps to AdamW's final {CRITERIA[task][0]}", "speed-up")]
    for row in rows:
        steps = row["steps_to_adamw_final"][0] if row["steps_to_adamw_final"] else None
        lines.append((row["label"], f"{row['final_loss'][0]:.4f}" if row["final_loss"][0] is not None else "diverged",
                      f"{steps}" if steps else "never", f"{row['steps'] / steps:.1f}x" if steps else "-"))
    return aligned(lines)


def wide_table(task, rows):
    lines = [("method", "lr", "held-out loss", "accuracy", "training loss", f"steps to AdamW's {CRITERIA[task][0]}",
              "statistics B/step", "gradient B/step", "s/run", "first order from")]
    for row in rows:
        lines.append((row["label"], f"{row['learning_rate']:g}", spread(row["final_loss"], 4),
                      spread(row["final_accuracy"], 3) if "final_accuracy" in row else "-",
                      spread(row["final_training_loss"], 5) if "final_training_loss" in row else "-",
                      spread(row["steps_to_adamw_final"], 0) if row["steps_to_adamw_final"] else "-",
                      f"{row['bytes_per_step']['statistics']:.0f}", f"{row['bytes_per_step']['gradients']:.0f}",
                      f"{row['seconds']:.2f}", spread(row["first_order_from"], 0)))
    return aligned(lines)


def report(rows, origin_of_rates):
    one_seed = len(rows[0]["seeds"]) == 1
    out = []
    for task, group in itertools.groupby(rows, key=lambda row: row["task"]):
        group = list(group)
        out.append(f"{task} {TASKS[task]} on 1,438 images of handwritten digits, {group[0]['steps']} steps\n" +
                   (short_table if one_seed else wide_table)(task, group))
    first = rows[0]
    out.append((f"Speed-up: AdamW's steps, divided by the steps after which a method is no worse than AdamW at its end (looked at every"
                f" {EVALUATE_EVERY}).\nIt counts steps, not time: all rows go through the service, AdamW's too.\n" if one_seed else
                f"Median (smallest-largest) of {len(first['seeds'])} seeds, looked at every {EVALUATE_EVERY} steps. B/step: payload of all workers,"
                " gradients both ways.\n") +
               f"{first['workers']} workers, {first['shards']} shards, {first['exchange']}; {len(first['seeds'])} seed"
               f"{'' if one_seed else 's'}. Learning rates: {origin_of_rates}.\n")
    return "\n".join(out)


def common_flags(arguments):
    return [f"--workers={arguments.workers}", *([f"--steps={arguments.steps}"] if arguments.steps else [])]


def candidates_of(arguments):
    """A row that comes with a base optimizer is there once."""
    return [Candidate(task, row, ROWS[row].optimizer or optimizer) for task in arguments.tasks
            for optimizer in arguments.optimizers for row in arguments.methods
            if not ROWS[row].optimizer or optimizer == arguments.optimizers[0]]


def rates_of(candidates, arguments):
    """The learning rate of each candidate, and where it is from."""
    keys = list(dict.fromkeys(candidate.rate_key() for candidate in candidates))
    if arguments.learning_rate:
        return dict.fromkeys(keys, arguments.learning_rate), f"{arguments.learning_rate:g} for all"
    if arguments.search:
        program = arguments.binaries / "tests/e2e/digits_in_process"
        rates = search_rates(program, keys, arguments)
        if arguments.write_rates:
            write_rates(arguments.write_rates, rates, arguments)
        return rates, (f"searched for every row on the grid {', '.join(f'{rate:g}' for rate in arguments.grid)},"
                       f" {arguments.rate_seeds} seeds, in process")
    rates = read_rates(RATES)
    missing = [f"{key.task} {key.row} {key.optimizer}" for key in keys if key not in rates]
    if missing:
        raise SystemExit(f"digits.py: no learning rate in {RATES.relative_to(ROOT)} for {missing[0]}: use --search or --learning-rate")
    return rates, f"{RATES.relative_to(ROOT)}, the best of one grid for every method (--full searches again)"


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
    parser.add_argument("--methods", type=names(ROWS), default=["none", "signed-lowrank", "soap"],
                        help=f"{', '.join(ROWS)}, or all (none,signed-lowrank,soap)")
    parser.add_argument("--optimizers", type=names(NAMES), default=["adamw"], help=f"{', '.join(NAMES)}, or all (adamw)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, seeds 1 ... N (1)")
    parser.add_argument("--learning-rate", type=float, help=f"for all rows, instead of {RATES.relative_to(ROOT)}")
    parser.add_argument("--search", action="store_true", help="search the learning rates, in process")
    parser.add_argument("--grid", type=lambda text: [float(rate) for rate in text.split(",")], default=GRID)
    parser.add_argument("--rate-seeds", type=int, default=3, help="runs of each rate in the search (3)")
    parser.add_argument("--write-rates", metavar="FILE", type=pathlib.Path, help="write what the search chose")
    parser.add_argument("--exchange", default="direct", help="of digits_trainer (direct)")
    parser.add_argument("--fallback", help="of digits_trainer, for all rows but none (each row's own)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the rows there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the program that runs

    candidates = candidates_of(arguments)
    rates, origin = rates_of(candidates, arguments)
    program = arguments.binaries / "tests/e2e/trainer/digits_trainer"
    rows = []
    for place, candidate in enumerate(candidates, 1):
        rate = rates[candidate.rate_key()]
        fallback = arguments.fallback if arguments.fallback and candidate.row != "none" else ROWS[candidate.row].fallback
        runs = []
        for seed in range(1, arguments.seeds + 1):
            run, text = train(program, [f"--coordinator={arguments.coordinator}", *candidate.flags(rate, seed),
                                        *common_flags(arguments), f"--exchange={arguments.exchange}", f"--fallback={fallback}"])
            print(f"training, row {place} of {len(candidates)}: {text}", flush=True)
            runs.append(run)
        rows.append(row_of(candidate, runs) | {"learning_rate": rate, "fallback": fallback, "workers": arguments.workers,
                                               "shards": arguments.shards, "exchange": arguments.exchange.upper()})
    compare_with_adamw(rows)
    print("\n" + report(rows, origin))
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
