#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs of client/python/examples/two_lines train: alone, under torchrun and compiled; so do the lines of the README.

A killed job leaves no server.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

import test_program
from cluster import wait_for
from examples_test import EXAMPLES, ROOT, TIMEOUT_S, launcher, run

# The README's lines leave these out: a model and a batch, and at the dots a loop.
BEFORE = """
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
x = torch.randn(64, 8)
y = torch.tanh(x[:, :4])
"""
LOOP = """
for step in range(101):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
    """
# A rank that trains until it is ended.
ENDLESS = """
import torch
from precondor.torch import Preconditioner
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 4))
pre = Preconditioner(model, "local")
optimizer = pre.make_optimizer(lr=0.01)
while True:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 6)).square().mean()
    loss.backward()
    pre.step(loss)
    optimizer.step()
    print("step\\n", end="", flush=True)  # one write: the ranks share a pipe, and torchrun gives them no buffer
"""


def servers_in(folder):
    """The processes that listen in `folder`: their pids, and the pids of those whose servers they are."""
    found = {}
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        if f"--listen=unix:{folder}/" in arguments:
            found[int(file.parent.name)] = int(re.search(r"--exit-with-pid=(\d+)", arguments)[1])
    return found


class TwoLinesTest(unittest.TestCase):
    def expect_learning(self, program, *arguments, ranks=1):
        done = run(EXAMPLES / "two_lines" / program, *arguments, ranks=ranks)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
        self.assertEqual(len(losses), 6, done.stdout)
        self.assertLess(losses[-1], 0.3 * losses[0])

    def test_plain_loop(self):
        self.expect_learning("plain_loop.py")

    def test_the_lines_of_the_readme_as_they_stand(self):
        lines, _ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        made, step = lines.split("...\n")
        with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as program:
            program.write(BEFORE + made + LOOP + step)
            program.flush()
            self.expect_learning(program.name)

    def test_ddp(self):
        self.expect_learning("ranks.py", ranks=2)

    def test_fully_sharded(self):
        self.expect_learning("ranks.py", "--fully-shard", ranks=2)

    def test_compiled(self):
        self.expect_learning("plain_loop.py", "--compile", "aot_eager")

    def test_a_job_whose_first_rank_is_killed_leaves_no_server(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        program = pathlib.Path(folder, "endless.py")
        program.write_text(ENDLESS, encoding="utf-8")
        with subprocess.Popen([sys.executable, "-B", *launcher(2), str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, env={**os.environ, "TMPDIR": folder}) as job:
            self.addCleanup(job.kill)
            for _ in range(10):
                self.assertEqual(job.stdout.readline(), "step\n")
            servers = servers_in(folder)
            self.assertEqual(len(servers), 2, servers)  # a coordinator and a shard
            shard, = (pid for pid in servers if b"--role=shard" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(shard, signal.SIGKILL)  # it comes back
            for _ in range(100):
                self.assertEqual(job.stdout.readline(), "step\n")
            self.assertNotEqual(set(servers_in(folder)), set(servers))
            first, = set(servers.values())
            os.kill(first, signal.SIGKILL)
            job.stdout.read()  # until each rank has ended
        self.assertNotEqual(job.returncode, 0)
        wait_for("the job's server to end", lambda: not servers_in(folder), TIMEOUT_S)


if __name__ == "__main__":
    test_program.run()
