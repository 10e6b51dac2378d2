#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch when processes end: trainers that go on from a checkpoint, servers that are killed, Ctrl-C.

"Bitwise" is compared with a run that nothing happens to.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

import torch

import precondor
import test_program
from cluster import Cluster, wait_for
from torch_training import train_with_checkpoints

HERE = pathlib.Path(__file__).resolve().parent
torch.set_num_threads(1)
DEADLINE_S = 60
EXCHANGES = ("DIRECT", "REPLAY", "PULL_FACTORS")


class FaultsTest(unittest.TestCase):
    binaries = None
    expected = {}  # last weights of a run that nothing happens to, by exchange

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir()

    def cluster(self, name="cluster", **options):
        folder = self.folder / name
        folder.mkdir()
        return self.enterContext(Cluster(self.binaries, folder, **options))

    def train(self, cluster, session="job", **options):
        return train_with_checkpoints(cluster.coordinator.address, session, self.checkpoints, **options)

    def undisturbed(self, cluster, exchange="DIRECT"):
        if exchange not in self.expected:
            self.expected[exchange], _ = train_with_checkpoints(cluster.coordinator.address, "undisturbed", self.folder,
                                                                exchange=exchange)
            (self.folder / "checkpoint-0.pt").unlink()
        return self.expected[exchange]

    def expect_bitwise(self, cluster, weights, exchange):
        test_program.expect_close(weights, self.undisturbed(cluster, exchange))

    def program(self, cluster, **options):
        return subprocess.Popen([sys.executable, "-B", HERE / "torch_training.py", cluster.coordinator.address, "job",
                                 self.checkpoints, json.dumps(options)], stdin=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    # --- trainers -------------------------------------------------------------------------------------------------------

    def test_a_trainer_that_is_killed_goes_on_bitwise(self):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                cluster = self.cluster(exchange)
                for step, place in ((5, "before"), (7, "after")):
                    self.assertEqual(self.program(cluster, die=[step, place], exchange=exchange).wait(DEADLINE_S), 9)
                    self.assertEqual(torch.load(self.checkpoints / "checkpoint-0.pt")["pre"]["step"], step)
                self.expect_bitwise(cluster, self.train(cluster, exchange=exchange)[0], exchange)
                (self.checkpoints / "checkpoint-0.pt").unlink()

    def test_going_back_beyond_what_the_servers_keep_is_refused(self):
        cluster = self.cluster()
        self.train(cluster, steps=4, end=False)
        kept = (self.checkpoints / "checkpoint-0.pt").read_bytes()
        self.train(cluster, steps=9, end=False)
        (self.checkpoints / "checkpoint-0.pt").write_bytes(kept)
        for _ in range(2):  # the second time the job is at that step already
            with self.assertRaisesRegex(precondor.FailedPreconditionError, "beyond step 4.*snapshot_paths.*exact=False"):
                self.train(cluster)
        self.assertEqual(len(self.train(cluster, load={"exact": False})[1]), 8)

    def test_factors_in_a_checkpoint_for_each_method(self):
        for method in ("mkor", "soap", "muon"):
            with self.subTest(method=method):
                cluster = self.cluster(method, durable=False)
                self.train(cluster, steps=5, end=False, factors=True, method=method)
                path = self.checkpoints / "checkpoint-0.pt"
                kept = path.read_bytes()
                expected, _ = self.train(cluster, method=method)  # ends the session
                path.write_bytes(kept)
                weights, results = self.train(cluster, method=method)
                self.assertEqual(results[0].step, 5)
                test_program.expect_close(weights, expected)
                path.unlink()

    def test_a_session_that_the_servers_have_lost(self):
        cluster = self.cluster()
        self.train(cluster, steps=4)  # ends the session
        for _ in range(2):
            with self.assertRaisesRegex(precondor.FailedPreconditionError, "servers have no factors of it.*exact=False"):
                self.train(cluster)
        self.assertEqual(len(self.train(cluster, load={"exact": False})[1]), 8)

    def test_a_trainer_and_a_shard_that_are_lost_together(self):
        for method in ("soap", "mkor"):
            with self.subTest(method=method):
                cluster = self.cluster(method)
                self.train(cluster, steps=6, end=False, method=method)
                cluster.shards[0].kill()
                shutil.rmtree(cluster.shards[0].folder / "data")
                cluster.shards[0].start()
                with self.assertWarnsRegex(UserWarning, "updates"):
                    results = self.train(cluster, method=method)[1]
                self.assertEqual(results[0].step, 6)
                self.assertTrue(results[0].updates_lost)
                self.assertFalse(any(result.updates_lost for result in results[1:]))
                (self.checkpoints / "checkpoint-0.pt").unlink()

    def test_a_state_of_something_else(self):
        cluster = self.cluster()
        self.train(cluster, steps=2, end=False)
        with self.assertRaisesRegex(precondor.FailedPreconditionError, "state is of session job.*without factors=True.*exact=False"):
            self.train(cluster, session="other")
        path = self.checkpoints / "checkpoint-0.pt"
        kept = path.read_bytes()
        self.assertEqual(len(self.train(cluster, session="another", load={"exact": False})[1]), 10)
        path.write_bytes(kept)
        saved = torch.load(path)
        name, d_out, *rest = saved["pre"]["layers"][0]
        saved["pre"]["layers"][0] = (name, d_out + 1, *rest)
        torch.save(saved, path)
        with self.assertRaisesRegex(precondor.InvalidArgumentError, rf"layer 0.group0: \('0.group0', {d_out + 1}"):
            self.train(cluster)
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "no snapshot goes with step 2.*checkpoint_due"):
            saved["pre"]["layers"][0] = (name, d_out, *rest)
            torch.save(saved, path)
            self.train(cluster, load={"snapshot_paths": ["x"]})

    def test_returns_to_a_snapshot_bitwise(self):
        """Trainer and servers end some steps after a snapshot; new servers get its files."""
        first = self.cluster("first", coordinator_arguments=["--lease-steps=2"])
        program = pathlib.Path(self.binaries) / "client/cpp/tools/precondorctl"

        def control(action):
            return subprocess.run([program, f"--server={first.coordinator.address}", "snapshot", action, "job", "--json"],
                                  capture_output=True, check=True).stdout

        self.train(first, steps=9, only_due=True, end=False, before_step=lambda step: step == 3 and control("create"))
        state = torch.load(self.checkpoints / "checkpoint-0.pt")["pre"]
        self.assertGreater(state["snapshot_id"], 0)
        self.assertLess(state["step"], 9)

        def complete():
            listed = json.loads(control("list"))["session_snapshots"]
            return any(one["step"] == state["step"] and one["state"] == "complete" for one in listed)

        wait_for("the snapshot to be complete", complete)
        expected = self.undisturbed(first)
        for server in first.servers():
            server.kill()
        second = self.cluster("second", shards=1)
        load = {"snapshot_paths": [self.folder / "first" / f"shard{i}" / "data" for i in range(2)]}
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "precondorctl.*nowhere"):
            self.train(second, load={**load, "precondorctl": "nowhere"})
        for paths in (str(self.folder / "nothing"), self.folder / "nothing", [self.folder / "nothing"]):
            with self.assertRaisesRegex(precondor.FailedPreconditionError, f"snapshot restore job.*--snapshot-path={self.folder}/nothing: "):
                self.train(second, load={"snapshot_paths": paths})
        weights, results = self.train(second, load=load)
        self.assertEqual(results[0].step, state["step"])
        test_program.expect_close(weights, expected)

    # --- servers --------------------------------------------------------------------------------------------------------

    def test_servers_that_are_killed_in_a_step_and_come_back(self):
        cluster = self.cluster()
        restarts = []

        def before_step(step):
            for at, server in ((3, cluster.shards[0]), (5, cluster.coordinator), (6, cluster.shards[1])):
                if step == at:
                    server.kill()
                    restarts.append(threading.Thread(target=server.start))
                    restarts[-1].start()

        for exchange, overlap in [("DIRECT", True), *((exchange, False) for exchange in EXCHANGES)]:
            with self.subTest(exchange=exchange, overlap=overlap):
                weights, _ = self.train(cluster, f"job-{exchange}-{overlap}", before_step=before_step, exchange=exchange,
                                        overlap=overlap)
                self.expect_bitwise(cluster, weights, exchange)
                (self.checkpoints / "checkpoint-0.pt").unlink()
        for restart in restarts:
            restart.join()
        self.assertEqual(len(restarts), 3 * (1 + len(EXCHANGES)))

    def test_servers_that_stay_away(self):
        cluster = self.cluster()

        def before_step(step):
            if step == 3:
                for server in cluster.servers():
                    server.kill()

        with self.assertRaisesRegex(precondor.DeadlineExceededError, "step 3"):
            self.train(cluster, before_step=before_step, client=precondor.ClientOptions(result_timeout=1.0))

    # --- Ctrl-C ---------------------------------------------------------------------------------------------------------

    def test_control_c_ends_a_step_that_waits(self):
        cluster = self.cluster()
        program = self.program(cluster, steps=10**6)
        wait_for("a checkpoint", lambda: (self.checkpoints / "checkpoint-0.pt").exists())
        cluster.shards[0].signal(signal.SIGSTOP)  # so that it waits in step
        program.send_signal(signal.SIGINT)
        self.assertEqual(program.wait(DEADLINE_S), -signal.SIGINT)
        cluster.shards[0].signal(signal.SIGCONT)
        step = torch.load(self.checkpoints / "checkpoint-0.pt")["pre"]["step"]
        self.assertEqual(self.train(cluster, steps=step + 2)[1][0].step, step)

    def test_control_c_leaves_no_rank_behind(self):
        for exchange in ("DIRECT", "DELEGATE"):
            with self.subTest(exchange=exchange):
                cluster = self.cluster(exchange)
                ranks = [self.program(cluster, steps=10**6, exchange=exchange, rank=rank, world_size=2) for rank in range(2)]
                self.addCleanup(lambda ranks=ranks: [rank.kill() for rank in ranks])
                wait_for("a checkpoint", lambda: (self.checkpoints / "checkpoint-1.pt").exists())
                for rank in ranks:  # as a terminal does
                    rank.send_signal(signal.SIGINT)
                for rank in ranks:
                    self.assertNotEqual(rank.wait(DEADLINE_S), 0)
                for file in self.checkpoints.iterdir():
                    file.unlink()


def use_the_servers_arithmetic():
    """Cluster starts servers without an environment: what this one tells OpenBLAS would have REPLAY's workers round otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    if len(environment) < len(os.environ):
        os.execve(sys.executable, [sys.executable, "-B", *sys.argv], environment)


if __name__ == "__main__":
    use_the_servers_arithmetic()
    FaultsTest.binaries = test_program.parse("--binaries").binaries
    test_program.run()
