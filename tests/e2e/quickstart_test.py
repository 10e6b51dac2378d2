#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs deploy/quickstart.sh and holds its results to what the project promises.

Usage: quickstart_test.py --binaries DIR
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Share of AdamW's steps after which its final loss is reached, at most.
PROMISES = {("autoencoder", "signed-lowrank"): 1 / 3, ("autoencoder", "mean-lowrank"): 0.4, ("autoencoder", "soap"): 1 / 3,
            ("classifier", "signed-lowrank"): 0.55, ("classifier", "soap"): 0.4}
# One image of the 359 held out, and a little: the resolution of an accuracy.
ACCURACY_RESOLUTION = 1.01 / 359


class Results(unittest.TestCase):
    runs = others = []  # of two invocations

    def find(self, runs, **wanted):
        found = [r for r in runs if all(r[k] == v for k, v in wanted.items())]
        self.assertEqual(len(found), 1, f"rows with {wanted}")
        return found[0]

    def test_rows_are_complete(self):
        for run in self.runs + self.others:
            count = len(run["seeds"])
            self.assertGreaterEqual(count, 1)
            self.assertEqual([len(run["final_loss"]), len(run["steps_to_adamw_final"])], [count, count])
            self.assertEqual((run["workers"], run["shards"]), (4, 2))
            self.assertGreater(run["seconds"], 0)

    def test_bytes_on_the_wire_are_those_of_the_arithmetic(self):
        widths = {"autoencoder": [64, 48, 24, 8, 24, 48, 64], "classifier": [64, 64, 64, 10]}
        for run in self.runs + self.others:
            shapes = [(d_out, d_in + 1) for d_in, d_out in zip(widths[run["task"]], widths[run["task"]][1:])]
            workers = run["workers"]
            # f32, there and back, by every worker.
            gradients = 2 * 4 * sum(m * n for m, n in shapes) * workers
            self.assertAlmostEqual(run["bytes_per_step"]["gradients"], gradients, delta=0.001 * gradients)
            # f16, q vectors a side, at the first ten steps and every tenth.
            vectors = {"NONE": 0, "MEAN": 1, "SIGNED": -(-16 // workers)}[run["statistics"]]
            steps = sum(1 for step in range(run["steps"]) if step < 10 or step % 10 == 0)
            expected = 2 * vectors * workers * sum(m + n for m, n in shapes) * steps / run["steps"]
            self.assertAlmostEqual(run["bytes_per_step"]["statistics"], expected, delta=0.001 * expected + 1e-9)

    def test_every_promise_has_a_run(self):
        self.assertLessEqual(set(PROMISES), {(run["task"], run["row"]) for run in self.runs + self.others})

    def test_is_better_than_first_order(self):
        for runs, ((task, row), share) in itertools.product((self.runs, self.others), PROMISES.items()):
            if (task, row) not in {(r["task"], r["row"]) for r in runs}:
                continue
            run, adamw = self.find(runs, task=task, row=row), self.find(runs, task=task, row="none")
            steps = [float("inf") if s is None else s for s in run["steps_to_adamw_final"]]
            with self.subTest(task=task, row=row, steps=steps):
                self.assertLessEqual(statistics.median(steps), share * adamw["steps"])
                self.assertLess(statistics.median(run["final_loss"]), statistics.median(adamw["final_loss"]))
                if task == "classifier":
                    self.assertGreaterEqual(statistics.median(run["final_accuracy"]),
                                            statistics.median(adamw["final_accuracy"]) - ACCURACY_RESOLUTION)


def run_quickstart(binaries, results, *flags):
    command = [ROOT / "deploy/quickstart.sh", "--binaries", binaries, "--json", results, *flags]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        sys.exit(f"quickstart.sh ended with {done.returncode}")
    processes = re.findall(r"is process (\d+) on 127\.0\.0\.1:\d+", done.stdout)
    if len(processes) != 3:
        sys.exit(f"expected a coordinator and two shards, got {len(processes)} processes")
    left = [p for p in processes if os.path.exists(f"/proc/{p}")]
    if left:
        sys.exit(f"still running: {left}")
    return done.stdout


def check_table(text, runs):
    """A newcomer sees for each row the loss, the steps and the speed-up that the JSON has."""
    for run in runs:
        steps = run["steps_to_adamw_final"][0]
        cells = [re.escape(run["label"]), f"{run['final_loss'][0]:.4f}", str(steps), rf"{run['steps'] / steps:.1f}x"]
        if not re.search(r"^" + r"\s+".join(cells) + "$", text, re.MULTILINE):
            sys.exit(f"the table has no line {cells}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    binaries = parser.parse_args().binaries.resolve()
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "runs.json"
        text = run_quickstart(binaries, results)
        Results.runs = json.loads(results.read_text())["runs"]
        check_table(text, Results.runs)
        run_quickstart(binaries, results, "--", "--seeds=2", "--tasks=autoencoder", "--methods=none,mean-lowrank")
        Results.others = json.loads(results.read_text())["runs"]
    unittest.main(argv=[sys.argv[0]])


if __name__ == "__main__":
    main()
