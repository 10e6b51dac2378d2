#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tries what the end of a server does to a job that trains: one table, method x exchange x fault, each cell of which is tried.

Usage: restart_table_test.py --binaries DIR [--all] [--seed N] [-k PATTERN]     tries the cells and prints what came
       restart_table_test.py --check PAGE | --write PAGE                        holds a page's table against PROMISES

  --binaries DIR  a build tree with precondor-server, digits_trainer and digits_rank
  --all           all methods, and the rolling restart; without it muon and soap, which the default recipe has
  --seed N        of the instants and the victims; printed, so that a failure can be repeated
  -k PATTERN      only cells with that in their name, such as soap_2_direct
"""

import argparse
import dataclasses
import itertools
import pathlib
import random
import re
import sys
import tempfile
import unittest

from cluster import Cluster, Failure, Training, say, wait_for

EXACT = "exact"
TOLD = "goes on, told"
ENDS = "all ranks end with STATE_LOST"

STATISTICS = {"mkor": "signed-lowrank", "eva": "eva", "kfac": "kfac"}  # rows of digits.ROWS, by method
GRADIENTS = {"muon": "muon", "soap": "soap", "kron": "kron", "kfac COVARIANCE": "kfac-covariance"}
DEFAULTS = ("muon", "soap")  # of the recipe of precondor.torch
JOBS = ((1, "direct"), (2, "direct"), (2, "delegate"))
FAULTS = ("kill", "drain", "rolling")
STORAGE = {"kept": "`--data-dir`", "unjournalled": "`--gradient-journal-bytes=0`", "none": "no `--data-dir`"}

FIRST_FAULT, LAST_FAULT = 20, 60  # steps between which a server ends
STEPS_AFTER = 40
STEPS_A_DRAIN = 1000  # that a job goes on at least until a drain cuts its streams, half a second


@dataclasses.dataclass(frozen=True)
class Cell:
    method: str
    world_size: int
    exchange: str
    fault: str
    storage: str

    def name(self):
        return f"{self.method.replace(' ', '_')}_{self.world_size}_{self.exchange}_{self.fault}_{self.storage}"

    def promises(self):
        """The outcomes of which one has to come."""
        keeps = self.storage == "kept" or (self.storage == "unjournalled" and (self.method in STATISTICS or self.fault != "kill"))
        if keeps:
            return (EXACT,)
        # The ranks' last answers can be of different steps; a shard that lacks them cannot make them again.
        return (TOLD, ENDS) if self.exchange == "direct" and self.world_size > 1 else (TOLD,)

    def steps(self):
        drains = {"kill": 0, "drain": 1, "rolling": 2}[self.fault]
        return LAST_FAULT + STEPS_AFTER + STEPS_A_DRAIN * drains


def page_table():
    """The promises in Markdown; methods and jobs with equal promises share a line."""
    columns = [(storage, faults) for storage in STORAGE for faults in ((FAULTS,) if storage != "unjournalled" else (FAULTS[:1], FAULTS[1:]))]
    words = {"kill": "kill -9", "drain": "SIGTERM", "rolling": "rolling restart"}
    lines = {}
    for methods, (world_size, exchange) in itertools.product((STATISTICS, GRADIENTS), JOBS):
        cells = []
        for storage, faults in columns:
            promises = {Cell(method, world_size, exchange, fault, storage).promises() for method in methods for fault in faults}
            assert len(promises) == 1, "the columns of the table mix promises"
            cells.append(", or ".join(promises.pop()))
        job = f"{world_size} {exchange.upper()}"
        lines.setdefault((", ".join(methods), tuple(cells)), []).append(job)
    head = ["method", "ranks, exchange", *(f"{STORAGE[storage]}: {', '.join(words[fault] for fault in faults)}" for storage, faults in columns)]
    table = [head, ["---"] * len(head), *([methods, "; ".join(jobs), *cells] for (methods, cells), jobs in lines.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


MARKS = ("<!-- restart_table_test.py -->", "<!-- end -->")


def page_with_table(text):
    before, mark, rest = text.partition(MARKS[0])
    if not mark:
        raise SystemExit(f"the page has no {MARKS[0]}")
    return f"{before}{MARKS[0]}\n{page_table()}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


class RestartTableTest(unittest.TestCase):
    binaries = None
    seed = 1
    undisturbed = {}  # hashes of weights, by job and steps
    came = {}  # what came of a cell

    def train(self, cell, cluster, folder):
        ranks = cell.exchange == "direct" and cell.world_size > 1  # each a process, of which each has an end of its own
        return Training(self.binaries, cluster, folder, [f"--steps={cell.steps()}", f"--exchange={cell.exchange}"], ranks=ranks,
                        world_size=cell.world_size, row={**STATISTICS, **GRADIENTS}[cell.method])

    def undisturbed_hash(self, cell):
        key = (cell.method, cell.world_size, cell.exchange, cell.steps())
        if key not in self.undisturbed:
            with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, durable=False) as cluster, \
                    self.train(cell, cluster, folder) as training:
                self.undisturbed[key] = training.finish()["weights_hash"]
        return self.undisturbed[key]

    def disturb(self, cell, cluster, training, chance):
        def await_step(target):
            def reached():
                step = cluster.step()
                return not training.running() or (step is not None and step >= target)

            wait_for(f"step {target}", reached)
            if not training.running():
                raise Failure(f"the job ended before step {target}: {training.errors.read_text()}")

        await_step(chance.randrange(FIRST_FAULT, LAST_FAULT))
        shards = chance.sample(cluster.shards, len(cluster.shards))
        for shard in shards if cell.fault == "rolling" else shards[:1]:
            if cell.fault == "kill":
                shard.kill()
            else:
                self.assertEqual(shard.terminate(), 0, shard.log_tail())
            self.assertTrue(training.running(), "the job ended before the shard was away")
            before = cluster.step() or 0
            shard.start()
            wait_for("the job to go on, or to end",
                     lambda before=before: not training.running() or (cluster.step() or 0) > before + 2)

    def outcome(self, cell, cluster, training):
        """Returns what came, and the updates that the workers have been told are lost."""
        ends = training.ends()
        text = training.errors.read_text()
        told = sum(map(int, re.findall(r"a shard has lost (\d+) updates", text)))
        logs = "".join((shard.folder / "log").read_text() for shard in cluster.shards)
        logged = sum(map(int, re.findall(r"factor updates are lost .* updates=(\d+)", logs)))
        if any(ends):
            self.assertNotIn(0, ends, f"some ranks have ended, others not: {text}")
            self.assertEqual(text.count("STATE_LOST"), len(ends), f"ends of another kind: {text}")
            return ENDS, told
        self.assertEqual(told, logged, f"{text}; the shards' logs have other numbers: {logs}")
        row = training.finish()
        self.assertEqual(row["steps"], cell.steps())
        if row["weights_hash"] == self.undisturbed_hash(cell):
            self.assertEqual(told, 0, f"exact, and yet: {text}")
            return EXACT, told
        self.assertGreater(told, 0, f"other weights, and no worker was told: {text}")
        return TOLD, told

    def try_cell(self, cell):
        chance = random.Random(f"{self.seed} {cell.name()}")
        arguments = ["--gradient-journal-bytes=0"] if cell.storage == "unjournalled" else []
        with tempfile.TemporaryDirectory() as folder, \
                Cluster(self.binaries, folder, durable=cell.storage != "none", shard_arguments=arguments) as cluster, \
                self.train(cell, cluster, folder) as training:
            self.disturb(cell, cluster, training, chance)
            outcome, lost = self.outcome(cell, cluster, training)
        self.came[cell] = f"{outcome}, {lost} updates lost" if outcome == TOLD else outcome
        self.assertIn(outcome, (*cell.promises(), EXACT))

    @classmethod
    def add_cells(cls, methods, faults):
        for method, job, fault, storage in itertools.product(methods, JOBS, faults, STORAGE):
            cell = Cell(method, *job, fault, storage)
            setattr(cls, f"test_{cell.name()}", lambda self, cell=cell: self.try_cell(cell))

    @classmethod
    def tearDownClass(cls):
        say("| method | ranks, exchange | fault | " + " | ".join(STORAGE.values()) + " |\n" + "|---" * 6 + "|")
        for key in dict.fromkeys((cell.method, cell.world_size, cell.exchange, cell.fault) for cell in cls.came):
            came = (cls.came.get(Cell(*key, storage), "") for storage in STORAGE)
            say(f"| {key[0]} | {key[1]} {key[2].upper()} | {key[3]} | {' | '.join(came)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("-k", dest="pattern")
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    page = options.check or options.write
    if page is not None:
        text = page.read_text(encoding="utf-8")
        if options.write is not None:
            page.write_text(page_with_table(text), encoding="utf-8")
        elif text != page_with_table(text):
            sys.exit(f"{page} has another table: {__file__} --write {page} writes this one\n{page_table()}")
        return
    if options.binaries is None:
        parser.error("expected --binaries, --check or --write")
    RestartTableTest.binaries, RestartTableTest.seed = options.binaries.resolve(), options.seed
    say(f"restart_table_test.py: --seed={options.seed}")
    RestartTableTest.add_cells([*STATISTICS, *GRADIENTS] if options.all else DEFAULTS, FAULTS if options.all else FAULTS[:2])
    unittest.main(argv=[sys.argv[0], "-v"] + (["-k", options.pattern] if options.pattern else []))


if __name__ == "__main__":
    main()
