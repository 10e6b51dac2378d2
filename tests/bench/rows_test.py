#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""rows.py: limits, medians, failures."""

import unittest

import rows


def run(name, real_time, **counters):
    return {"name": name, "run_name": name, "run_type": "iteration", "real_time": real_time, "time_unit": "us", **counters}


LIMITS = [run("limit/fma_f32", 10, flops=1e6),  # 1e11 FLOP/s
          run("limit/stream/kib:1", 1, bytes=1e5, working_set=1024),  # 1e11 B/s
          run("limit/stream/kib:1024", 10, bytes=1e5, working_set=1 << 20)]  # 1e10 B/s


class RowsTest(unittest.TestCase):
    def rows(self, *runs):
        return {r["name"]: r for r in rows.google_rows({"benchmarks": LIMITS + list(runs)})}

    def test_median_of_repetitions(self):
        found = self.rows(run("a", 1), run("a", 100), run("a", 3))["a"]
        self.assertAlmostEqual(found["value"], 3)
        self.assertIsNone(found["limit"])
        self.assertTrue(found["pass"])

    def test_quartiles_over_repetitions(self):
        found = self.rows(*(run("a", time) for time in (5, 1, 4, 2, 3)))["a"]["spread"]
        self.assertEqual((found["n"], round(found["q1"], 9), round(found["q3"], 9)), (5, 2, 4))
        self.assertIsNone(self.rows(run("a", 1))["a"]["spread"])

    def test_compute_limit(self):
        found = self.rows(run("a", 40, flops=1e6))["a"]
        self.assertAlmostEqual(found["limit"], 10)
        self.assertAlmostEqual(found["ratio"], 0.25)

    def test_the_slower_limit_counts(self):
        self.assertAlmostEqual(self.rows(run("a", 40, flops=1e6, bytes=3e6, working_set=2000))["a"]["limit"], 30)

    def test_stream_of_the_nearest_working_set(self):
        self.assertAlmostEqual(self.rows(run("a", 40, bytes=1e5, working_set=900000))["a"]["limit"], 10)

    def test_a_failed_benchmark_does_not_pass(self):
        found = self.rows({**run("a", 0), "error_occurred": True, "error_message": "wrong result"})["a"]
        self.assertFalse(found["pass"])
        self.assertEqual(found["error"], "wrong result")


if __name__ == "__main__":
    unittest.main()
