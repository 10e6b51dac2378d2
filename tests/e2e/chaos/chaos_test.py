#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults on real processes while a real model trains: the final weights have to be those of a run without faults.

Usage: chaos_test.py --binaries DIR [--kills N] [--seed N] [--method NAME] [-k PATTERN]

  --binaries DIR  a build tree with precondor-server and digits_trainer
  --kills N       faults of each kind in one run (4; the promise is for 50)
  --seed N        of the instants and the victims; printed, so that a failure can be repeated
  --method NAME   signed-lowrank (of mkor), muon or soap, for all tests; without it the seed chooses one for each
  -k PATTERN      only tests with that in their name
"""

import contextlib
import errno
import os
import pathlib
import subprocess

from cluster import Etcd, Training, restart_all, stopped, wait_for
from faults import LEAD_IN, FaultTest, argument_parser, checker, run


class ChaosTest(FaultTest):
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
            row = self.train(cluster, lambda _: restart_all(cluster.shards))
        self.expect_undisturbed_weights(row)

    def test_paused_shards(self):
        with self.cluster() as cluster:
            def disturb(_):
                shard = self.random.choice(cluster.shards)
                before = cluster.step()
                with stopped(shard.process.pid):
                    self.await_standstill(cluster)
                self.await_progress(cluster, before)
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_terminated_shards(self):
        """The job goes on until a drain cuts its streams, half a second and more: hundreds of steps for each fault."""
        steps = f"--steps={self.steps() + 400 * self.kills}"
        with self.cluster() as cluster:
            def disturb(_):
                shard = self.random.choice(cluster.shards)
                self.assertEqual(shard.terminate(), 0)
                before = cluster.step()
                shard.start()
                self.await_progress(cluster, before)
            row = self.train(cluster, disturb, steps)
        self.expect_undisturbed_weights(row, steps)

    def test_terminated_shards_in_the_middle_of_a_step(self):
        """A step that lacks a worker cannot be finished: the drain's deadline ends it, and the next process begins it anew."""
        with self.cluster(shard_arguments=["--drain-deadline-ms=300"]) as cluster:
            def disturb(training):
                shard, worker = self.random.choice(cluster.shards), self.random.choice(training.workers())
                before = cluster.step()
                with stopped(worker):
                    self.await_standstill(cluster)
                    self.assertEqual(shard.terminate(), 0)
                    shard.start()
                self.await_progress(cluster, before)
            row = self.train(cluster, disturb, ranks=True)
        self.expect_undisturbed_weights(row)

    # --- the coordinator ---------------------------------------------------------------------------------------------
    def test_killed_coordinator(self):
        with self.cluster(coordinator_arguments=["--lease-steps=8"]) as cluster:
            row = self.train(cluster, lambda _: cluster.coordinator.restart())
        self.expect_undisturbed_weights(row)

    def test_killed_leaders_of_coordinators_on_etcd(self):
        """The journal is in etcd: a coordinator that has nothing of its own comes back with everything."""
        with Etcd(self.folder.name) as etcd:
            with self.cluster(coordinator_arguments=["--lease-steps=8", f"--etcd-endpoints={etcd.address}",
                                                     "--etcd-lease-ms=2000"]) as cluster:
                row = self.train(cluster, lambda _: cluster.coordinator.restart())
        self.expect_undisturbed_weights(row)

    def test_etcd_silent_for_longer_than_the_lease(self):
        """No coordinator leads then: the process ends, and its successor keeps all leases that it had granted."""
        with Etcd(self.folder.name) as etcd:
            # A lease must not carry the run to its end.
            with self.cluster(coordinator_arguments=["--lease-steps=2", f"--etcd-endpoints={etcd.address}",
                                                     "--etcd-lease-ms=2000"]) as cluster:
                def disturb(training):
                    before = cluster.step()
                    with self.unhealthy(checker.COORDINATOR):
                        with stopped(etcd.process.pid):
                            wait_for("the coordinator to end", lambda: cluster.coordinator.process.poll() is not None)
                            if not training.running():
                                training.finish()
                                self.fail("the run ended before its coordinator")
                        cluster.coordinator.start()
                        self.await_progress(cluster, before)  # etcd takes a moment
                row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    def test_everything_killed_at_once(self):
        with self.cluster() as cluster:
            row = self.train(cluster, lambda _: restart_all(cluster.servers()))
        self.expect_undisturbed_weights(row)

    # --- workers -----------------------------------------------------------------------------------------------------
    def test_killed_workers_go_on_from_their_own_checkpoints(self):
        def disturb(training):
            training.restart(self.random.randrange(training.WORKERS))

        with self.cluster() as cluster:
            row = self.train(cluster, disturb, ranks=True)
            self.assertGreater(cluster.coordinator.metric("precondor_rpcs_total"), 0)
        self.expect_undisturbed_weights(row)

    def test_paused_workers_are_named(self):
        with self.cluster(shard_arguments=["--slow-worker-ms=200"]) as cluster:
            def disturb(training):
                workers = training.workers()
                rank = self.random.randrange(len(workers))
                before = cluster.step()
                with stopped(workers[rank]):
                    wait_for(f"the shards to name rank {rank}",
                             lambda: any(shard.metric("precondor_lagging_workers") == 1 and
                                         shard.metric("precondor_lagging_rank_number") == rank
                                         for shard in cluster.shards))
                    shown = [session["shard"] for shard in cluster.shards for session in shard.status()["sessions"]]
                    self.assertIn((1, [rank]), [(one["lagging_workers"], one["lagging_ranks"]) for one in shown])
                self.await_progress(cluster, before)
            row = self.train(cluster, disturb, ranks=True)
            logs = "".join((shard.folder / "log").read_text() for shard in cluster.shards)
            self.assertIn("workers hold all others up", logs)
        self.expect_undisturbed_weights(row)

    # --- disk --------------------------------------------------------------------------------------------------------
    def small_disk(self, size):
        """A command that executes what follows with a disk of its own as the folder."""
        if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
            self.skipTest("no mount namespace of our own: needs root and unshare")
        small = f"mkdir -p $0 && mount -t tmpfs -o size={size} tmpfs $0 && exec \"$@\""
        return lambda folder: ["unshare", "-m", "sh", "-c", small, str(folder)]

    def test_full_disks(self):
        """The shards' disks are full in no time: the job must not notice, and the metric must."""
        with self.cluster(shard_prefix=self.small_disk("128k")) as cluster:
            with Training(self.binaries, cluster, self.folder.name, self.arguments(), row=self.row) as training:
                lacking = "precondor_log_stale_status" if self.row == "signed-lowrank" else "precondor_gradients_missing_status"
                wait_for("a shard to say what its journal lacks",
                         lambda: not training.running() or any(shard.metric(lacking) for shard in cluster.shards))
                self.assertTrue(training.running(), "the run ended before a disk was full")
                row = training.finish()
        self.expect_undisturbed_weights(row)

    def test_a_drain_that_cannot_write_says_what_is_lost(self):
        """Its disk is full, and no journal has the gradients: the job goes on with an older state, and is told."""
        self.row = "muon"
        steps = f"--steps={self.steps() + 500}"
        with self.cluster(shards=1, shard_prefix=self.small_disk("1m"),
                          shard_arguments=["--gradient-journal-bytes=0", "--drain-deadline-ms=2000", "--snapshot-interval-steps=0"]) as cluster, \
                self.training(cluster, self.arguments("--exchange=delegate", steps)) as training:
            self.await_step(cluster, training, LEAD_IN)
            shard = cluster.shards[0]
            with contextlib.suppress(OSError), open(f"/proc/{shard.process.pid}/root{shard.folder}/data/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
            self.assertEqual(shard.terminate(), 1)
            log = shard.log_tail()
            self.assertRegex(log, "ERROR factors are lost reason=.*older factors: digits-")
            shard.start()  # its disk is another one
            self.assertEqual(training.finish()["steps"], self.steps() + 500)
            self.assertRegex(training.errors.read_text(), "a shard has lost [0-9]+ updates of layer 0")

    def test_full_disk_of_the_coordinator(self):
        """It grants no more steps, says so, and goes on by itself when there is room again."""
        # A grant a step: after each fault enough is written to fill what is left of the journal's last page, about 50
        # bytes at a time.
        steps = f"--steps={self.steps() + 100 * self.kills}"
        with self.cluster(coordinator_prefix=self.small_disk("1m"), coordinator_arguments=["--lease-steps=1"]) as cluster:
            def disturb(training):
                with self.unhealthy(checker.COORDINATOR):
                    fill_for_a_while(training)

            def fill_for_a_while(training):
                process = cluster.coordinator.process
                # Its disk is seen through its eyes alone.
                filler = pathlib.Path(f"/proc/{process.pid}/root{cluster.coordinator.folder}/data/filler")
                with open(filler, "wb", buffering=0) as file:
                    while True:
                        try:
                            file.write(bytes(1024))
                        except OSError as error:
                            self.assertEqual(error.errno, errno.ENOSPC)
                            break
                failing = "precondor_journal_failing_status"
                wait_for("the coordinator to say that its journal fails",
                         lambda: cluster.coordinator.metric(failing) or not training.running())
                self.assertTrue(training.running(), "the run ended before the disk was full")
                self.await_standstill(cluster)
                before = cluster.step()
                filler.unlink()
                self.await_progress(cluster, before)
                wait_for("the coordinator to be well again", lambda: cluster.coordinator.metric(failing) == 0)
            row = self.train(cluster, disturb, steps)
            self.assertEqual(cluster.coordinator.starts, 1)
        self.expect_undisturbed_weights(row, steps)


if __name__ == "__main__":
    run("chaos_test.py", argument_parser(__doc__).parse_args())
