#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server of the process's own: precondor.server.LocalServer, and Preconditioner(model, "local") where there is torch."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np
import precondor as p
from precondor import server

try:
    import torch
    from precondor.torch import Preconditioner
except ImportError:
    torch = None

DEADLINE_S = 60


def ends(pid):
    """Whether the process, which need not be a child, has ended within the deadline."""
    try:
        process = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], DEADLINE_S)[0])
    finally:
        os.close(process)


def kill(one):
    """Kills a LocalServer, and waits for its end."""
    os.kill(one.pid, signal.SIGKILL)
    ends(one.pid)


def answer_of(address):
    with p.Client(address) as client:
        session = client.open_session(p.SessionSpec("local", [p.Layer("fc", 2, 3)], "identity"))
        with session.join() as worker:
            total = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1).result().gradient.sum()
        session.close()
    return total


def run(program, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, **options)


# Starts a server, says where, and goes on until it is killed or reads a line.
HOLDER = """
import sys
from precondor import server
one = server.LocalServer()
print(one.pid, one.address, flush=True)
sys.stdin.readline()
"""

RANK = """
import sys
import torch, torch.distributed as dist
from precondor.torch import Preconditioner
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if size > 1:
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
pre = Preconditioner(model, "local", method="mkor", optimizer=optimizer, inv_freq=2)
torch.manual_seed(10 + rank)
for step in range(12):
    x = torch.randn(16, 6)
    optimizer.zero_grad()
    loss = (model(x) - x[:, :4].sin()).square().mean()
    loss.backward()
    result = pre.step(loss)
    optimizer.step()
print(result.decisions["0"], sum(float(w.double().sum()) for w in model.parameters()))
pre.close()
"""


class LocalServerTest(unittest.TestCase):

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self._before = tempfile.tempdir
        tempfile.tempdir = self._folder.name

    def tearDown(self):
        tempfile.tempdir = self._before
        self._folder.cleanup()

    def test_it_answers_and_close_leaves_nothing(self):
        with server.LocalServer(["--memory-limit=1GiB"]) as one:
            self.assertTrue(one.address.startswith("unix:"))
            self.assertEqual(answer_of(one.address), 6.0)
            self.assertTrue(one.running())
        self.assertTrue(ends(one.pid))
        self.assertFalse(one.running())
        self.assertEqual(os.listdir(self._folder.name), [])
        one.close()

    def test_a_bad_option_is_told(self):
        for arguments, pattern in ((["--memory-limt=3"], r"got \['--memory-limt=3'\]: .*unknown option .*the nearest is"),
                                   (["--listen=127.0.0.1:0"], "no option --listen, which LocalServer sets itself, got '--listen"),
                                   (["--port_file=x"], "no option --port-file"), (["--role=shard"], "no option --role"),
                                   (["--exit-with-pid=1"], "no option --exit-with-pid"), ("--threads=1", r"Write \['--threads=1'\]"),
                                   ([3], "expected a sequence of str"), (None, "expected a sequence of str")):
            with self.subTest(arguments=arguments), self.assertRaisesRegex(p.InvalidArgumentError, f"^arguments: .*{pattern}"):
                server.LocalServer(arguments)
        with self.assertRaisesRegex(p.UnavailableError, "got its end with status 1, see its log"):
            server.LocalServer(["--data-dir=/dev/null/x"])
        self.assertEqual(os.listdir(self._folder.name), [])

    def test_nothing_waits_for_one_that_has_ended(self):
        with server.LocalServer() as one, p.Client(one.address) as client:
            session = client.open_session(p.SessionSpec("local", [p.Layer("fc", 2, 3)], "identity"))
            worker = self.enterContext(session.join())
            self.assertFalse(server.has_ended(one.address))
            kill(one)
            self.assertTrue(server.has_ended(one.address))
            for address in ("127.0.0.1:1", "unix:/nonexistent/socket", "unix:"):  # where a server may come back
                self.assertFalse(server.has_ended(address))
            for call in (session.close, worker.leave):
                with self.assertRaisesRegex(p.UnavailableError, "session local: the local server at unix:.* has ended"):
                    call()

    @unittest.skipIf(torch is None, "no torch")
    def test_a_preconditioner_calls_none_that_has_ended(self):
        for fails in (False, True):
            model = torch.nn.Linear(3, 2)
            model(torch.ones(4, 3)).sum().backward()
            pre = Preconditioner(model, "local", method="identity")
            pre.step(1.0)
            kill(server.shared())
            with mock.patch.object(p.Client, "close_session") as close, mock.patch.object(p.Worker, "flush") as flush:
                if fails:
                    with self.assertRaises(KeyError), pre:
                        raise KeyError
                else:
                    pre.__exit__(None)
                self.assertEqual((close.called, flush.called), (False, False))

    def test_shared_is_one_a_process(self):
        one = server.shared()
        self.assertIs(server.shared(), one)
        one.close()
        other = server.shared()
        self.assertIsNot(other, one)
        other.close()

    def test_it_ends_with_the_process_however_that_ends(self):
        for kill in (False, True):
            environment = {**os.environ, "TMPDIR": self._folder.name}
            holder = run(HOLDER, stdin=subprocess.PIPE, env=environment)
            pid, address = holder.stdout.readline().split()
            self.assertEqual(answer_of(address), 6.0)
            if kill:
                holder.send_signal(signal.SIGKILL)
            holder.stdin.close()
            holder.wait(timeout=DEADLINE_S)
            holder.stdout.close()
            self.assertTrue(ends(pid), f"the server outlives a process that {kill=}")
            self.assertFalse(os.path.exists(address.removeprefix("unix:")))
        # What a killed process has left goes with the next server's start.
        self.assertEqual(len(os.listdir(self._folder.name)), 1)
        with server.LocalServer():
            self.assertEqual(len(os.listdir(self._folder.name)), 1)

    def test_a_forked_child_leaves_it_alone(self):
        with server.LocalServer() as one:
            child = os.fork()
            if child == 0:
                one.close()
                os._exit(0 if not one.running() else 1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(answer_of(one.address), 6.0)

    def test_the_module_runs_the_server(self):
        version = subprocess.run([sys.executable, "-m", "precondor.server", "--version"], capture_output=True, text=True,
                                 check=True)
        self.assertEqual(version.stdout.split()[0], "precondor-server")

    @unittest.skipIf(torch is None, "no torch")
    def test_ranks_share_the_first_ones(self):
        for size in (1, 2):
            store = os.path.join(self._folder.name, f"store{size}")
            ranks = [run(RANK, str(rank), str(size), store) for rank in range(size)]
            answers = {rank.communicate(timeout=300)[0] for rank in ranks}
            self.assertEqual([rank.returncode for rank in ranks], [0] * size)
            [answer] = answers  # ranks have the same weights
            self.assertTrue(answer.startswith("PRECONDITIONED"), answer)


if __name__ == "__main__":
    unittest.main()
