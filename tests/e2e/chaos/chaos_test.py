#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults on real processes while a real model trains: the final weights have to be those of a run without faults.

Usage: chaos_test.py --binaries DIR [--kills N] [--seed N] [-k PATTERN]

  --binaries DIR  a build tree with precondor-server and precondor-digits
  --kills N       faults of each kind in one run (4; the promise is for 50)
  --seed N        of the instants and the victims; printed, so that a failure can be repeated
  -k PATTERN      only tests with that in their name
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from cluster import Cluster, Etcd, Failure, Training, say, wait_for

STEPS_A_FAULT = 40  # between two faults: the floor below which a run would be too quiet to mean anything
LEAD_IN = 20        # steps before the first


class ChaosTest(unittest.TestCase):
    binaries = None
    own_network = False
    kills = 4
    seed = 1
    undisturbed = {}  # weights by (steps, arguments)

    def setUp(self):
        self.random = random.Random(f"{self.seed} {self.id()}")
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def steps(self):
        return LEAD_IN + STEPS_A_FAULT * (self.kills + 1)

    def arguments(self, *more):
        return [f"--steps={self.steps()}", *more]

    def train(self, cluster, disturb, *more):
        """Trains, with `disturb(training)` at `kills` instants; the row of results."""
        with Training(self.binaries, cluster, self.folder.name, self.arguments(*more)) as training:
            for fault in range(self.kills):
                target = LEAD_IN + STEPS_A_FAULT * fault + self.random.randrange(STEPS_A_FAULT // 2)

                def reached():
                    if not training.running():
                        training.finish()
                        raise Failure(f"the run ended before fault {fault} of {self.kills}")
                    step = cluster.step()
                    return step is not None and step >= target

                wait_for(f"step {target}", reached)
                say(f"{self.id().split('.')[-1]}: fault {fault + 1} of {self.kills} at step {cluster.step()}")
                disturb(training)
            return training.finish()

    def expect_undisturbed_weights(self, row, *more):
        key = (self.steps(), more)
        if key not in ChaosTest.undisturbed:
            with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, durable=False) as cluster:
                with Training(self.binaries, cluster, folder, self.arguments(*more)) as training:
                    ChaosTest.undisturbed[key] = training.finish()
        expected = ChaosTest.undisturbed[key]
        self.assertEqual(row["weights_hash"], expected["weights_hash"], "other weights than without faults")
        self.assertEqual(row["final_loss"], expected["final_loss"])
        self.assertEqual(row["steps"], expected["steps"])

    def wait_until_still(self, cluster):
        """The coordinator answers, and the step that it answers does not grow any more."""
        seen = []

        def still():
            seen.append(cluster.step())
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        wait_for("the job to stand still", still)

    def cluster(self, **options):
        return Cluster(self.binaries, self.folder.name, **options)

    # --- shards ------------------------------------------------------------------------------------------------------
    def kill_shards(self, *more, **options):
        with self.cluster(**options) as cluster:
            row = self.train(cluster, lambda _: self.random.choice(cluster.shards).restart(), *more)
            self.assertEqual(sum(shard.starts for shard in cluster.shards), len(cluster.shards) + self.kills)
        self.expect_undisturbed_weights(row, *more)

    def test_killed_shards_direct(self):
        self.kill_shards("--exchange=direct")

    def test_killed_shards_delegate(self):
        self.kill_shards("--exchange=delegate")

    def test_killed_shards_with_snapshots(self):
        self.kill_shards(shard_arguments=["--snapshot-interval-steps=25"])

    def test_all_shards_killed_at_once(self):
        with self.cluster() as cluster:
            def disturb(_):
                for shard in cluster.shards:
                    shard.kill()
                for shard in cluster.shards:
                    shard.start()
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_paused_shards(self):
        with self.cluster() as cluster:
            def disturb(_):
                shard = self.random.choice(cluster.shards)
                before = cluster.step()
                shard.signal(signal.SIGSTOP)
                try:
                    self.wait_until_still(cluster)
                finally:
                    shard.signal(signal.SIGCONT)
                wait_for("the job to go on", lambda: (cluster.step() or 0) > before + 2)
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_terminated_shards(self):
        with self.cluster() as cluster:
            def disturb(_):
                shard = self.random.choice(cluster.shards)
                self.assertEqual(shard.terminate(), 0)
                shard.start()
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    # --- the coordinator ---------------------------------------------------------------------------------------------
    def test_killed_coordinator(self):
        with self.cluster(coordinator_arguments=["--lease-steps=8"]) as cluster:
            row = self.train(cluster, lambda _: cluster.coordinator.restart())
        self.expect_undisturbed_weights(row)

    def test_killed_leaders_of_coordinators_on_etcd(self):
        """The journal is in etcd: a coordinator that has nothing of its own comes back with everything."""
        if shutil.which("etcd") is None:
            self.skipTest("no etcd on this machine: deploy/install.sh --test installs it")
        with Etcd(self.folder.name) as etcd:
            with self.cluster(coordinator_arguments=["--lease-steps=8", f"--etcd-endpoints={etcd.address}",
                                                     "--etcd-lease-ms=2000"]) as cluster:
                def disturb(_):
                    cluster.coordinator.restart()
                row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_everything_killed_at_once(self):
        with self.cluster() as cluster:
            def disturb(_):
                for server in cluster.servers():
                    server.kill()
                for server in cluster.servers():
                    server.start()
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)


    # --- workers -----------------------------------------------------------------------------------------------------
    def test_killed_workers_go_on_from_their_own_checkpoints(self):
        checkpoints = pathlib.Path(self.folder.name) / "checkpoints"
        checkpoints.mkdir()

        def disturb(training):
            os.kill(self.random.choice(training.workers()), signal.SIGKILL)

        with self.cluster() as cluster:
            row = self.train(cluster, disturb, f"--worker-restarts={self.kills}", f"--checkpoint-dir={checkpoints}")
            self.assertGreater(cluster.coordinator.metric("precondor_rpcs_total"), 0)
        self.expect_undisturbed_weights(row)


    # --- network and disk --------------------------------------------------------------------------------------------
    def test_partitions(self):
        """Packets to a shard, or to all shards, are lost for a while: its answers come, and what it is told does not."""
        if not ChaosTest.own_network:
            self.skipTest("no network namespace of our own: needs root and unshare")

        def route(verb, host):
            subprocess.run(["ip", "route", verb, "blackhole", f"{host}/32", "table", "local"], check=True)

        with self.cluster(shard_host=lambda i: f"127.0.1.{i + 1}") as cluster:
            def disturb(_):
                hosts = self.random.choice([[cluster.shards[0].host], [shard.host for shard in cluster.shards]])
                before = cluster.step()
                for host in hosts:
                    route("add", host)
                try:
                    self.wait_until_still(cluster)
                finally:
                    for host in hosts:
                        route("del", host)
                wait_for("the job to go on", lambda: (cluster.step() or 0) > before + 2)
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_full_disks(self):
        """The shards' disks are full in no time: the job must not notice, and the metric must."""
        small = "mkdir -p $0 && mount -t tmpfs -o size=128k tmpfs $0 && exec \"$@\""
        if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
            self.skipTest("no mount namespace of our own: needs root and unshare")
        prefix = ["unshare", "-m", "sh", "-c", small]
        with self.cluster(shard_prefix=lambda folder: [*prefix, str(folder)]) as cluster:
            with Training(self.binaries, cluster, self.folder.name, self.arguments()) as training:
                wait_for("a shard to say that its log is stale",
                         lambda: not training.running() or
                         any(shard.metric("precondor_log_stale_status") for shard in cluster.shards))
                self.assertTrue(training.running(), "the run ended before a disk was full")
                row = training.finish()
        self.expect_undisturbed_weights(row)


def enter_own_network(arguments):
    """Starts this program again in a network of its own, where routes can be cut; False when the system forbids it."""
    if os.environ.get("CHAOS_OWN_NETWORK") == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], check=False).returncode != 0:
        return False
    if subprocess.run(["which", "ip"], check=False, stdout=subprocess.DEVNULL).returncode != 0:
        return False
    os.execvpe("unshare", ["unshare", "-n", sys.executable, *arguments], {**os.environ, "CHAOS_OWN_NETWORK": "1"})
    return False  # not reached


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("-k", dest="pattern")
    options = parser.parse_args()
    ChaosTest.binaries, ChaosTest.kills, ChaosTest.seed = options.binaries.resolve(), options.kills, options.seed
    ChaosTest.own_network = enter_own_network(sys.argv)
    say(f"chaos_test.py: {options.kills} faults a run, --seed={options.seed}")
    arguments = [sys.argv[0], "-v"] + (["-k", options.pattern] if options.pattern else [])
    unittest.main(argv=arguments)


if __name__ == "__main__":
    main()
