#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs of client/python/examples/two_lines train: alone, under torchrun and compiled.

Exits with 77 where torch is missing, and says so; on torch 1.13 fully_shard and torch.compile are skipped.
"""

import os
import re
import subprocess
import sys
import unittest

from examples_test import EXAMPLES, TIMEOUT_S, TORCHRUN, free_port

import torch


class TwoLinesTest(unittest.TestCase):
    def expect_learning(self, program, *arguments, ranks=1):
        launcher = [] if ranks == 1 else [*TORCHRUN, str(ranks), "--master_addr", "127.0.0.1", "--master_port", free_port()]
        done = subprocess.run([sys.executable, "-B", *launcher, str(EXAMPLES / "two_lines" / program), *arguments],
                              capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
        self.assertEqual(len(losses), 6, done.stdout)
        self.assertLess(losses[-1], 0.3 * losses[0])

    def test_plain_loop(self):
        self.expect_learning("plain_loop.py")

    def test_ddp(self):
        self.expect_learning("ddp.py", ranks=2)

    @unittest.skipIf(torch.__version__.startswith("1."), "needs torch 2.6")
    def test_fully_sharded(self):
        self.expect_learning("fully_sharded.py", ranks=2)

    @unittest.skipIf(torch.__version__.startswith("1."), "needs torch 2.4")
    def test_compiled(self):
        self.expect_learning("compiled.py", "--backend", "aot_eager")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
