#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains small models on real data with several optimizers, and compares their held-out losses. run.sh has the environment.

Each row of the JSON file is one training run, or one measurement of time. Existing rows are kept. One rule tunes every
method: seed 1 tries a middle rate, half and twice of it, and goes on in the direction of the best while that is at the edge, five
rates at most. The best rate then trains the other seeds. Rates rise for a tenth of the steps and then fall to 0 along a line.
Matrices have weight decay .01.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import re
import statistics
import time

import torch
from precondor import Fallback, Method
from precondor.torch import Preconditioner, Selection

import peers
import tasks

MOST_RATES = 5
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
EVALUATE_EVERY = 10
DIVERGED = 1e3
TURNS, STEPS_A_TURN = 6, 10  # the first turn is not counted


class Alone:
    """Optimizers without a server."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self, loss):
        for optimizer in self.optimizers:
            optimizer.step()

    def close(self):
        pass


class Ours(Alone):
    """Preconditioner, and the given optimizer or the one that it makes."""

    def __init__(self, model, rate, optimizer=None, **options):
        self._preconditioner = Preconditioner(model, "local", optimizer=optimizer, **options)
        super().__init__(optimizer or self._preconditioner.make_optimizer(rate, weight_decay=WEIGHT_DECAY))

    def step(self, loss):
        self._preconditioner.step(loss)
        super().step(loss)

    def close(self):
        self._preconditioner.close(end_session=True)


def groups(parameters):
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    return [{"params": chosen, "weight_decay": decay} for decay, chosen in (
        (WEIGHT_DECAY, [p for p in parameters if p.dim() > 1]), (0.0, [p for p in parameters if p.dim() < 2])) if chosen]


def adamw(model, rate, unused):
    return Alone(torch.optim.AdamW(groups(model.parameters()), lr=rate, betas=BETAS))


def sgd(model, rate, unused):
    return Alone(torch.optim.SGD(groups(model.parameters()), lr=rate, momentum=0.9))


def lamb(model, rate, unused):
    return Alone(peers.Lamb(groups(model.parameters()), lr=rate))


def muon(model, rate, task):
    hidden = {name: p for name, p in model.named_parameters() if p.dim() > 1 and name not in task.not_hidden}
    others = [p for name, p in model.named_parameters() if name not in hidden]
    return Alone(peers.Muon(hidden.values(), rate, WEIGHT_DECAY), torch.optim.AdamW(groups(others), lr=rate, betas=BETAS))


def soap(model, rate, unused):
    return Alone(peers.Soap(groups(model.parameters()), rate))


def kron(model, rate, unused):
    from kron_torch import Kron  # pylint: disable=import-outside-toplevel
    # A factor for each dimension of a convolution. By default it is merged to [3072, 3], and a step takes seconds.
    return Alone(Kron(groups(model.parameters()), lr=rate, merge_dims=False))


def with_muon(model, rate, task, **options):
    """The default, with these options of muon for all hidden linear layers."""
    not_hidden = {id(dict(model.named_parameters())[name]) for name in task.not_hidden}
    hidden = [re.escape(name) for name, module in model.named_modules()
              if type(module).__name__ in ("Linear", "Conv1D") and id(module.weight) not in not_hidden]
    return Ours(model, rate, layer_methods={"|".join(hidden): Method("muon", options)})


def mkor_h(fallback, model, rate, task):
    """A float: first order after this share of the steps."""
    fallback = Fallback("AT_STEP", at_step=int(fallback * task.steps)) if isinstance(fallback, float) else fallback
    return Ours(model, rate, method="mkor", exchange="DELEGATE", fallback=fallback)


def processor_seconds():
    """Returns those of this process and its children, of which the server is one."""
    ticks = 0
    for child in pathlib.Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        ticks += sum(map(int, pathlib.Path("/proc", child, "stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


# By name: how it is made, and its middle rate as a multiple of the task's.
METHODS = {
    "AdamW": (adamw, 0.5),
    "SGD": (sgd, 16),
    "LAMB": (lamb, 1),
    "Muon": (muon, 2),
    "SOAP": (soap, 2),
    "PSGD Kron": (kron, 0.25),
    "mkor": (lambda model, rate, task: Ours(model, rate, method="mkor"), 1),
    "mkor, LAMB": (lambda model, rate, task: Ours(model, rate, peers.Lamb(groups(model.parameters()), rate), method="mkor"), 1),
    "eva, LAMB": (lambda model, rate, task: Ours(model, rate, peers.Lamb(groups(model.parameters()), rate), method="eva"), 1),
    "kfac, LAMB": (lambda model, rate, task: Ours(model, rate, peers.Lamb(groups(model.parameters()), rate), method="kfac"), 1),
    **{f"mkor_h {fallback}": (functools.partial(mkor_h, fallback), 1) for fallback in (0.1, 0.25, 0.5, 0.75, 1.0)},
    "mkor_h LOSS_RATE": (functools.partial(mkor_h, Fallback("LOSS_RATE")), 1),
    "soap": (lambda model, rate, task: Ours(model, rate, method="soap", selection=Selection(embeddings="soap")), 2),
    "default": (lambda model, rate, task: Ours(model, rate), 2),
    "default, no input_factor": (with_muon, 2),
    "default, input_factor everywhere": (functools.partial(with_muon, input_factor=True), 2),
    "default, bf16": (lambda model, rate, task: Ours(model, rate, gradient_dtype="bf16"), 2),
    "default, fold_bias=False": (lambda model, rate, task: Ours(model, rate, selection=Selection(fold_bias=False)), 2),
}


class Training:
    """One run of a task. seconds: of its steps, without batches and evaluation; spent: of processors, at each evaluation."""

    def __init__(self, task, method, rate, seed):
        torch.manual_seed(seed)
        self._task, self._rate, self._seed = task, rate, seed
        self._model = task.make_model()
        self._method = METHODS[method][0](self._model, rate, task)
        self._step = 0
        self.seconds, self.held_out, self.spent = [], [], []

    def advance(self, steps):
        began_with = processor_seconds()
        for _ in range(steps):
            step, total = self._step, self._task.steps
            factor = min((step + 1) / (total / 10), 1.0, (total - step) / (total * 0.9))
            for optimizer in self._method.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._rate * factor
            batch = self._task.batch(step, self._seed)
            began = time.monotonic()
            self._model.zero_grad()
            loss = self._task.loss(self._model, batch)
            loss.backward()
            self._method.step(loss)
            self.seconds.append(time.monotonic() - began)
            self._step += 1
        self.spent.append(processor_seconds() - began_with + (self.spent[-1] if self.spent else 0.0))

    @torch.no_grad()
    def evaluate(self):
        self._model.eval()
        self.held_out.append(self._task.held_out(self._model).item())
        self._model.train()

    def close(self):
        self._method.close()


def train(task, method, rate, seed):
    """Held-out losses and processor seconds until then, one each EVALUATE_EVERY steps; fewer where training diverges."""
    training = Training(task, method, rate, seed)
    try:
        while len(training.seconds) < task.steps:
            training.advance(EVALUATE_EVERY)
            training.evaluate()
            if not training.held_out[-1] < DIVERGED:
                break
    finally:
        training.close()
    return training.held_out, training.spent


def times(task, methods):
    """The times of a step, as multiples of the first method's in the same turn: turns of a few steps of each, on the same cores."""
    runs = {method: Training(task, method, 1e-3, 1) for method in methods}
    try:
        ratios = {method: [] for method in methods}
        for turn in range(TURNS):
            for run in runs.values():
                run.advance(STEPS_A_TURN)
            spent = {method: sum(run.seconds[-STEPS_A_TURN:]) for method, run in runs.items()}
            for method in methods:
                if turn > 0:
                    ratios[method].append(spent[method] / spent[methods[0]])
        return ratios
    finally:
        for run in runs.values():
            run.close()


class Rows:
    """The JSON file: a list of rows, written after each."""

    def __init__(self, path):
        self._path = path
        self.rows = json.loads(path.read_text()) if path.exists() else []

    def find(self, **key):
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def add(self, row):
        self.rows.append(row)
        self._path.write_text("[\n" + ",\n".join(json.dumps(one) for one in self.rows) + "\n]\n")
        print(*(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
                if not isinstance(value, (list, dict))), row.get("held_out", [""])[-1], flush=True)

    def final(self, **key):
        """The last held-out loss of a run, which is made if it is missing."""
        if not self.find(**key):
            task = tasks.TASKS[key["task"]]()
            held_out, spent = train(task, key["method"], key["rate"], key["seed"])
            self.add({**key, "held_out": [round(loss, 6) if loss < DIVERGED else DIVERGED for loss in held_out],
                      "spent": [round(seconds, 2) for seconds in spent]})
        held_out = self.find(**key)[0]["held_out"]
        return held_out[-1]


def best_rate(losses):
    """The best of losses by rate, and whether it is at the edge."""
    best = min(losses, key=losses.get)
    return best, best in (min(losses), max(losses))


def tune(rows, task, method):
    """The best rate with seed 1."""
    middle = tasks.RATES[task] * METHODS[method][1]
    losses = {rate: rows.final(task=task, method=method, rate=rate, seed=1) for rate in (middle, middle / 2, 2 * middle)}
    while len(losses) < MOST_RATES:
        best, at_edge = best_rate(losses)
        if not at_edge:
            break
        rate = best / 2 if best == min(losses) else 2 * best
        losses[rate] = rows.final(task=task, method=method, rate=rate, seed=1)
    return best_rate(losses)[0]


def steps_to(loss, held_out):
    """Steps until held-out losses are as low as `loss`, on a line between evaluations; inf: never."""
    for place, value in enumerate(held_out):
        if value <= loss:
            before = held_out[place - 1] if place else value
            part = 1.0 if before == value else (before - loss) / (before - value)
            return EVALUATE_EVERY * (place + part)
    return math.inf


def seconds_at(step, spent):
    """Processor seconds until a step, on a line between evaluations."""
    if step == math.inf:
        return step
    place = min(int(step // EVALUATE_EVERY), len(spent) - 1)
    before = spent[place - 1] if place else 0.0
    return before + (step / EVALUATE_EVERY - place) * (spent[place] - before)


def table(rows, task):
    """Lines of Markdown: one for each method that has rows of the task."""
    lines = ["| method | rate | rates | seeds | held-out loss, median (range) | steps to AdamW's final | step's time, AdamW's = 1 | "
             "time to AdamW's final, AdamW's = 1 | processor seconds to it | of the run |", "|---|---|---|---|---|---|---|---|---|---|"]
    chosen = {}
    for method in METHODS:
        losses = {row["rate"]: row["held_out"][-1] for row in rows.find(task=task, method=method, seed=1)}
        if losses:
            rate, at_edge = best_rate(losses)
            chosen[method] = f"{rate:g}{'*' * at_edge} | {len(losses)}", rows.find(task=task, method=method, rate=rate)
    ratios = next((row["ratios"] for row in rows.find(task=task, what="times")), {})
    baseline = {run["seed"]: run["held_out"] for run in chosen.get("AdamW", ("", []))[1]}
    for method, (rates, runs) in chosen.items():
        finals = [run["held_out"][-1] for run in runs]
        spread = f" ({min(finals):.4f} - {max(finals):.4f})" if len(finals) > 1 else ""
        reached = [(steps_to(baseline[run["seed"]][-1], run["held_out"]), run.get("spent")) for run in runs if run["seed"] in baseline]
        step = statistics.median(step for step, _ in reached) if reached else 0.0
        ratio = statistics.median(ratios[method]) if method in ratios else 0.0
        share = ratio * step / (EVALUATE_EVERY * len(next(iter(baseline.values())))) if reached and ratio else 0.0
        to_it = statistics.median(seconds_at(*one) for one in reached) if reached and all(spent for _, spent in reached) else 0.0
        spent = statistics.median(run["spent"][-1] for run in runs) if all("spent" in run for run in runs) else 0.0
        cells = [f"{value:.{places}f}".replace("inf", "never") if value else ""
                 for value, places in ((step, 0), (ratio, 2), (share, 2), (to_it, 1), (spent, 1))]
        lines.append(f"| {method} | {rates} | {len(finals)} | {statistics.median(finals):.4f}{spread} | {' | '.join(cells)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="file of existing rows, to which new rows are added")
    parser.add_argument("--task", nargs="+", choices=tasks.TASKS, default=list(tasks.TASKS))
    parser.add_argument("--method", nargs="+", choices=METHODS, help="all but mkor_h, LAMB and variants of the default",
                        default=[method for method in METHODS if not re.search("mkor_h|LAMB|default, ", method)])
    parser.add_argument("--seeds", type=int, default=3, help="of the best rate (%(default)s)")
    parser.add_argument("--times", action="store_true", help="measure steps' times too, where no other job runs")
    parser.add_argument("--table", action="store_true", help="print the tables in Markdown, and train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(arguments.json)
    for task in arguments.task:
        if arguments.table:
            print(f"\n## {task}", *table(rows, task), sep="\n")
            continue
        for method in arguments.method:
            rate = tune(rows, task, method)
            for seed in range(2, arguments.seeds + 1):
                rows.final(task=task, method=method, rate=rate, seed=seed)
        if arguments.times and not rows.find(task=task, what="times"):
            rows.add({"task": task, "what": "times", "ratios": times(tasks.TASKS[task](), arguments.method)})


if __name__ == "__main__":
    main()
