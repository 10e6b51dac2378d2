#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server of the process's own: precondor.server.LocalServer, and Preconditioner(model, "local") where there is torch."""

import fcntl
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from unittest import mock

import numpy as np
import precondor as p
from precondor import _cuda_libraries, server

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
    """Kills a LocalServer's coordinator once too often, and waits for the end of all its processes."""
    pids = one.pids
    with mock.patch.object(server, "_MOST_RESTARTS", 0):
        os.kill(one.pid, signal.SIGKILL)
        for pid in pids:
            ends(pid)


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
print(*one.pids, one.address, flush=True)
sys.stdin.readline()
"""

# Joins as a rank that waits, and says how that ends.
WAITER = """
import sys
import numpy as np
import precondor
with precondor.Client(sys.argv[1], precondor.ClientOptions(result_timeout=3600)) as client, client.join("local", 1) as worker:
    try:
        worker.precondition(1, 0, np.ones((2, 3), np.float32), 1).result()
    except precondor.UnavailableError as error:
        print(error)
"""

UNUSED = """
import torch
from precondor.torch import Preconditioner
model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(3, 2)})
with Preconditioner(model, "local", method="identity") as pre:
    for step in range(5):
        model["used"](torch.ones(4, 3)).sum().backward()
        assert pre.step(1.0).decisions == {"used": "IDENTITY", "unused": "SKIP"}
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
        with self.assertRaisesRegex(p.UnavailableError, "got its end with status 1: .*cannot start"):
            server.LocalServer(["--data-dir=/dev/null/x"])
        self.assertEqual(os.listdir(self._folder.name), [])

    def test_servers_find_the_cuda_libraries_of_every_folder_of_packages(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [*sys.path, folder]):
            there = pathlib.Path(folder) / "nvidia/cu13/lib"
            there.mkdir(parents=True)
            self.assertIn(str(there), _cuda_libraries.folders())
            path = _cuda_libraries.with_search_path({"LD_LIBRARY_PATH": "/a", "B": "c"})
            self.assertEqual((path["B"], path["LD_LIBRARY_PATH"].split(":")), ("c", ["/a", *_cuda_libraries.folders()]))
            _cuda_libraries.preload()  # nothing is there, and no error
        self.assertNotIn(str(there), _cuda_libraries.folders())

    def test_options_of_the_environment_are_other_servers(self):
        for name, value in (("ROLE", "shard"), ("METRICS_LISTEN", "nowhere"), ("MEMORY_LIMT", "1GiB"), ("CONFIG", "/nothing")):
            with self.subTest(name=name), mock.patch.dict(os.environ, {f"PRECONDOR_{name}": value}):
                with server.LocalServer() as one:
                    self.assertEqual(answer_of(one.address), 6.0)
                with self.assertRaisesRegex(p.InvalidArgumentError, "unknown option .*thred"):
                    server.LocalServer(["--thred=1"])

    def test_metrics_are_the_coordinators(self):
        port = os.path.join(self._folder.name, "port")
        with server.LocalServer(["--metrics-listen=127.0.0.1:0", f"--metrics-port-file={port}"]):
            with open(port, encoding="ascii") as text, urllib.request.urlopen(f"http://127.0.0.1:{int(text.read())}/metrics") as page:
                self.assertIn(b'role="coordinator"', page.read())

    def test_a_folder_that_no_socket_can_be_in(self):
        for name in ("a,b", "x" * 80, "100%?#é "):
            with self.subTest(name=name):
                tempfile.tempdir = os.path.join(self._folder.name, name)
                os.mkdir(tempfile.tempdir)
                with server.LocalServer() as one:
                    self.assertEqual(answer_of(one.address), 6.0)
                self.assertFalse(os.path.exists(one.address.removeprefix("unix:")))

    def test_the_folder_of_a_server_that_runs_stays(self):
        """Also where its process has no number here: another PID namespace has it, and a container shares the folder."""
        folder = os.path.join(self._folder.name, f"precondor-{os.getuid()}-{2**22 + 1}-x")  # beyond all numbers of Linux
        os.mkdir(folder)
        with open(os.path.join(folder, "lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a server's process has it
            with server.LocalServer():
                self.assertTrue(os.path.exists(folder))
        with server.LocalServer():
            self.assertFalse(os.path.exists(folder))

    def test_a_process_that_looks_at_a_lock_takes_it_from_nobody(self):
        folder = pathlib.Path(self._folder.name)
        looking = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, os.close, (looking,)).start()
        held = server._locked(folder, "lock")
        self.assertTrue(server._is_locked(folder / "lock"))
        os.close(held)
        self.assertFalse(server._is_locked(folder / "lock"))

    def test_nothing_waits_for_one_that_has_ended(self):
        """Neither in the process whose server it was, where the error says how it has ended, nor in another one."""
        one = server.LocalServer()
        self.addCleanup(one.close)
        with p.Client(one.address, p.ClientOptions(rpc_timeout=3600, result_timeout=3600)) as client:
            session = client.open_session(p.SessionSpec("local", [p.Layer("fc", 2, 3)], "identity", world_size=2))
            other = run(WAITER, one.address)
            worker = self.enterContext(session.join(0))
            answer = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1)
            self.assertFalse(answer.wait(0.2))  # rank 1 sends none
            self.assertFalse(server.has_ended(one.address))
            kill(one)
            self.assertTrue(server.has_ended(one.address))
            for address in ("127.0.0.1:1", "unix:/nonexistent/socket", "unix:"):  # where a server may come back
                self.assertFalse(server.has_ended(address))
            for call in (answer.result, worker.flush, session.close, lambda: worker.close(leave=True), session.join, lambda: p.Client(one.address)):
                with self.assertRaisesRegex(p.UnavailableError, "^the local server at unix:.* has ended by SIGKILL, and its sessions"):
                    call()
            told, _ = other.communicate(timeout=DEADLINE_S)
            self.assertRegex(told, "^the local server at unix:.* has ended, and its sessions with it")

    @unittest.skipIf(torch is None, "no torch")
    def test_a_step_does_not_wait_for_one_that_has_ended(self):
        model = torch.nn.Linear(3, 2)
        pre = Preconditioner(model, "local", method="identity", client=p.ClientOptions(result_timeout=3600, lease_timeout=3600))
        self.addCleanup(pre.close)
        kill(server.shared())
        model(torch.ones(4, 3)).sum().backward()
        with self.assertRaisesRegex(p.UnavailableError, "has ended by SIGKILL"):
            pre.step(1.0)  # joins
        pre = Preconditioner(model, "local", method="identity", client=p.ClientOptions(result_timeout=3600, lease_timeout=3600))
        self.addCleanup(pre.close)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            pre.step(1.0)
        model(torch.ones(4, 3)).sum().backward()
        kill(server.shared())
        with self.assertRaisesRegex(p.UnavailableError, "has ended by SIGKILL"):
            pre.step(1.0)

    @unittest.skipIf(torch is None, "no torch")
    def test_a_layer_that_is_not_used_is_told_once(self):
        program = run(UNUSED, stderr=subprocess.PIPE)
        _, told = program.communicate(timeout=DEADLINE_S)
        self.assertEqual(program.returncode, 0, told)
        self.assertEqual([line for line in told.splitlines() if "step skipped" in line and "layer=unused" in line][1:], [])
        self.assertIn("step skipped session=local", told)

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

    @unittest.skipIf(torch is None, "no torch")
    def test_training_goes_on_when_a_shard_is_killed(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        x, y = torch.randn(64, 16), torch.randn(64, 8)
        pre = self.enterContext(Preconditioner(model, "local"))
        optimizer = pre.make_optimizer(0.01)

        def train(steps):
            for _ in range(steps):
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                self.assertEqual(set(pre.step(loss).decisions.values()), {"PRECONDITIONED"})
                optimizer.step()
            return loss.item()

        before = train(5)
        own, pids = server.shared(), set()
        for _ in range(server._MOST_RESTARTS):
            pids.add(own.pids[1])
            with self.assertLogs("precondor", "WARNING") as told:
                os.kill(own.pids[1], signal.SIGKILL)
                with self.assertWarnsRegex(UserWarning, "a server has lost updates of 2 layers"):
                    after = train(3)
            self.assertRegex(told.output[0], "a shard of the local server has ended by SIGKILL, and is started again")
        self.assertEqual(len(pids | {own.pids[1]}), server._MOST_RESTARTS + 1)
        self.assertLess(after, before)
        os.kill(own.pids[1], signal.SIGKILL)  # too often: the reason is not an accident
        with self.assertRaisesRegex(p.UnavailableError, "has ended by SIGKILL"):
            train(1)
        self.assertFalse(own.running())

    def test_a_coordinator_that_is_killed_goes_on_with_its_sessions(self):
        layer = p.Layer("fc", 2, 3)
        with server.LocalServer() as one, p.Client(one.address) as client:
            session = client.open_session(p.SessionSpec("local", [layer], "identity"))
            with session.join() as worker:
                for turn in range(2):
                    killed = one.pid
                    with self.assertLogs("precondor", "WARNING") as told:
                        os.kill(killed, signal.SIGKILL)
                        steps = range(300 * turn, 300 * (turn + 1))  # beyond the lease: the workers wait for the coordinator
                        for step in steps:
                            answer = worker.precondition(step, 0, np.ones((2, 3), np.float32), 1).result()
                            worker.report_step(step, 1.0, 1, 0.1)
                            self.assertEqual(answer.gradient.sum(), 6.0)
                    self.assertEqual(told.output, ["WARNING:precondor:the coordinator of the local server has ended by SIGKILL, and is started again"])
                    self.assertNotEqual(one.pid, killed)
                    self.assertTrue(one.running())
                    self.assertFalse(server.has_ended(one.address))
            session.close()
            self.assertEqual(answer_of(one.address), 6.0)

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
            *pids, address = holder.stdout.readline().split()
            self.assertEqual(answer_of(address), 6.0)
            if kill:
                holder.send_signal(signal.SIGKILL)
            holder.stdin.close()
            holder.wait(timeout=DEADLINE_S)
            holder.stdout.close()
            self.assertTrue(all(map(ends, pids)), f"the server outlives a process that {kill=}")
            self.assertFalse(os.path.exists(address.removeprefix("unix:")))
        # The files of a killed process go with the next server's start.
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


if __name__ == "__main__":
    unittest.main()
