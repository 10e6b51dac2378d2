#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu.sh from end to end over the host's imitation of CUDA: an unpacked pack in an otherwise empty folder, run with
an empty environment. Takes the build folder that has the programs."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "bench")]

# pylint: disable=wrong-import-position
from gpu import phases, report, results

# A part of each phase: what takes a few seconds each.
FILTER = "^(smoke/rounded|steps/|server/|profile/|conformance/device_memory|sanitize/)"


class ImitationTest(unittest.TestCase):
    build = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "bin").mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TESTS / "gpu", self.folder / "tests/gpu", ignore=ignored)
        shutil.copytree(TESTS / "bench", self.folder / "tests/bench", ignore=ignored)
        shutil.copy(TESTS / "gpu.sh", self.folder / "tests")
        (self.folder / "revision").write_text("the tested one\n", encoding="utf-8")
        for name in phases.programs(imitation=True):
            found = [path for path in self.build.glob(f"tests/*/{name}") if path.is_file()]
            if found:
                (self.folder / "bin" / name).symlink_to(found[0])

    def gpu_sh(self, *words):
        """The exit status and what is printed."""
        done = subprocess.run(["env", "-i", "/bin/bash", "tests/gpu.sh", *words], cwd=self.folder, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout

    def test_all_phases(self):
        for phases_of_a_call in ("lease", "train", "conformance,sanitize"):
            status, said = self.gpu_sh("--imitation", "--phase", phases_of_a_call, "--out", "out", "--filter", FILTER)
            self.assertEqual(status, 0, said)
            self.assertIn("passed on the host's imitation of CUDA", said.splitlines()[-1])
        summary = report.summarize(results.read([self.folder / "out"]))
        for phase in summary.phases.values():
            self.assertEqual((phase.state(), phase.count("failed")), ("finished", 0), phase.name)
        self.assertIn("conformance/device_memory", summary.passed)
        self.assertEqual(summary.machine["revision"], "the tested one")
        # Every row that was timed has a spread; what is counted once has none.
        rows = summary.rows.values()
        self.assertTrue({"limit/cuda/copy", "step/cuda/dense_bf16", "step/cuda/low_rank_8"} <= set(summary.rows))
        self.assertEqual([row["name"] for row in rows if row["unit"] in ("us", "ms", "GB/s") and not row["spread"]], [])
        self.assertTrue(all(row["limit"] for row in rows if row["unit"] == "ms" and row["name"].startswith("step/cuda/")))
        names = sorted(path.name for path in (self.folder / "out").iterdir())
        self.assertEqual(names, [results.LOG, results.REPORT, results.RESULTS])
        # Another report over these results is equal.
        first = (self.folder / "out" / results.REPORT).read_text(encoding="utf-8")
        self.assertEqual(self.gpu_sh("--phase", "report", "--out", "out")[0], 0)
        self.assertEqual((self.folder / "out" / results.REPORT).read_text(encoding="utf-8"), first)

    def test_help_and_bad_arguments(self):
        self.assertIn("--phase LIST", self.gpu_sh("--help")[1])
        for words in ((), ("--phase",), ("--phase", "none"), ("--bogus",)):
            status, said = self.gpu_sh(*words)
            self.assertEqual(status, 2, said)
            self.assertTrue(re.search(r"expected|needs a value|unknown|invalid", said), said)


if __name__ == "__main__":
    ImitationTest.build = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
