#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python programs of tests/gpu.sh's phases, in short on the CPU."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "bench")]

# pylint: disable=wrong-import-position
from gpu import report, results

ROWS = {
    "steps": {"step/torch/muon", "step/torch/muon_llama_1b", "step/torch/mkor"},
    "server": {"server/muon/ring", "server/muon/socket", "server/mkor/statistics", "server/mkor/without", "server/mkor/beyond"},
    "train": {"train/steps", "train/precondor/answers",
              *(f"train/{kind}/{what}" for kind in ("adamw", "muon", "precondor") for what in ("loss", "step"))},
}


class ScriptsTest(unittest.TestCase):
    def test_each_writes_its_rows(self):
        for phase, wanted in ROWS.items():
            with self.subTest(phase), tempfile.TemporaryDirectory() as out:
                done = subprocess.run([sys.executable, "-B", str(TESTS / "gpu/run.py"), "--imitation", "--phase", phase, "--out", out,
                                       "--filter", "^steps/step/torch|^server/|^train/"], check=False, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                log = (pathlib.Path(out) / results.LOG).read_text(encoding="utf-8")
                summary = report.summarize(results.read([out]))
                self.assertEqual(summary.failed, [], log)
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertLessEqual(wanted, set(summary.rows), log)
                self.assertEqual([name for name, row in summary.rows.items() if not row["value"]], [])


if __name__ == "__main__":
    unittest.main()
