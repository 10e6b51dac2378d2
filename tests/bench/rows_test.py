#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""rows.py: quartiles, and the rows that make it fail."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

import rows


class RowsTest(unittest.TestCase):
    def run_rows(self, *arguments):
        """Returns the exit status and the output of rows.py for a passing row, one that misses its target, and a limit of the machine."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
            path = pathlib.Path(folder, "rows.json")
            missed = {**rows.row("update/slow", 2, "us"), "target": 1, "pass": False}
            path.write_text(json.dumps({"rows": [rows.row("update/fast", 1, "us"), missed, rows.row("limit/read", 9, "GB/s")]}), "utf-8")
            return rows.main([str(path), *arguments]), printed.getvalue()

    def test_quartiles_over_repetitions(self):
        self.assertEqual(rows.spread([5, 1, 4, 2, 3]), {"q1": 2, "q3": 4, "n": 5})
        self.assertIsNone(rows.spread([1]))

    def test_a_missed_target_fails_unless_targets_mean_nothing(self):
        self.assertEqual(self.run_rows()[0], 1)
        self.assertEqual(self.run_rows("--lenient")[0], 0)

    def test_a_filter_keeps_the_limits_of_the_machine(self):
        status, printed = self.run_rows("--filter", "fast")
        self.assertEqual(status, 0)
        self.assertNotIn("update/slow", printed)
        self.assertIn("limit/read", printed)

    def test_limits_alone_are_no_measurement(self):
        self.assertEqual(self.run_rows("--filter", "nothing")[0], 1)


if __name__ == "__main__":
    unittest.main()
