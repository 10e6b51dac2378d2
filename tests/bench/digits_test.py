#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""digits.py's search of learning rates, and what it makes of the runs."""

import argparse
import math
import pathlib
import tempfile
import unittest

import digits

NONE = digits.Candidate("autoencoder", "none", "adamw")
MKOR = digits.Candidate("autoencoder", "signed-lowrank", "adamw")


def run_of(losses, modes=()):
    used = [10] * len(modes)
    return {"steps": 30, "final_loss": losses[-1], "weights_hash": "0", "modes": list(modes),
            "curve": [[10 * (i + 1), loss, 0, 0] for i, loss in enumerate(losses)],
            "seconds": used, "statistics_bytes": used, "gradient_bytes": [3 * b for b in used]}


def row_of(candidate, runs):
    return digits.row_of(candidate, runs) | {"learning_rate": .016, "workers": 4, "shards": 2, "exchange": "DIRECT"}


class Search(unittest.TestCase):
    def choose(self, loss, grid):
        asked = []

        def losses_of(work):
            asked.extend(rate for _, rate in work)
            return [loss(rate) for _, rate in work]
        return digits.choose_rates(losses_of, [NONE], grid)[NONE], asked

    def test_stays_within_the_grid_when_its_middle_is_best(self):
        self.assertEqual(self.choose(lambda rate: abs(rate - 2), [1, 2, 4]), (2, [1, 2, 4]))

    def test_goes_beyond_the_grid_while_its_end_is_best_but_not_for_ever(self):
        self.assertEqual(self.choose(lambda rate: -rate, [1, 2]), (32, [1, 2, 4, 8, 16, 32]))
        self.assertEqual(self.choose(lambda rate: rate, [1, 2]), (1 / 16, [1, 2, 1 / 2, 1 / 4, 1 / 8, 1 / 16]))
        self.assertEqual(self.choose(lambda rate: abs(rate - 8), [1, 2]), (8, [1, 2, 4, 8, 16]))

    def test_a_loss_that_is_missing_is_the_worst(self):
        self.assertEqual(digits.median([None, 1, 2]), 2)
        self.assertEqual(digits.median([None, None, 1]), math.inf)

    def test_rates_come_back_from_their_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rates.txt"
            digits.write_rates(path, {NONE: .016, MKOR: .0005}, argparse.Namespace(rate_seeds=3, grid=[.5]))
            self.assertEqual(digits.read_rates(path), {NONE: .016, MKOR: .0005})

    def test_the_file_of_the_tree_has_what_the_quickstart_takes(self):
        rates = digits.read_rates(digits.RATES)
        for task in digits.TASKS:
            for row, known in digits.ROWS.items():
                self.assertIn(digits.Candidate(task, row, known.optimizer or "adamw").rate_key(), rates)


class Report(unittest.TestCase):
    def rows(self):
        rows = [row_of(NONE, [run_of([.5, .4, .3]), run_of([.5, .4, .2])]),
                row_of(MKOR, [run_of([.4, .3, .1]), run_of([.5, None, .25])])]
        digits.compare_with_adamw(rows)
        return rows

    def test_compares_seed_by_seed_with_adamw(self):
        self.assertEqual([row["steps_to_adamw_final"] for row in self.rows()], [[30, 30], [20, None]])

    def test_tables_show_what_a_row_has(self):
        rows = self.rows()
        self.assertRegex(digits.report(rows, "x"), r"AdamW \+ mkor, rank 16 .*0.1750 \(0.1000-0.2500\).* never \(20-never\)")
        one = [row_of(NONE, [run_of([.5, .4, .3])]), row_of(MKOR, [run_of([.4, .3, .1])])]
        digits.compare_with_adamw(one)
        self.assertRegex(digits.report(one, "x"), r"AdamW \+ mkor, rank 16 +0.1000 +20 +1.5x\n")

    def test_divides_a_run_at_each_change_of_mode(self):
        row = row_of(MKOR, [run_of([.1], ["SECOND_ORDER"] * 2 + ["FIRST_ORDER"]) | {"steps": 3}])
        self.assertEqual(row["first_order_from"], [2])
        self.assertEqual(row["modes"], [[
            {"first_step": 0, "mode": "SECOND_ORDER", "steps": 2, "seconds": 20, "bytes_per_step": {"statistics": 10, "gradients": 30}},
            {"first_step": 2, "mode": "FIRST_ORDER", "steps": 1, "seconds": 10, "bytes_per_step": {"statistics": 10, "gradients": 30}}]])
        self.assertEqual(row["bytes_per_step"], {"statistics": 10, "gradients": 30})


if __name__ == "__main__":
    unittest.main()
