#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults of all kinds in one run, one after the other in random order, while a real model trains.

Usage: mixed_test.py --binaries DIR [--kills N] [--seed N] [--method NAME] [-k PATTERN]

  --binaries DIR  a build tree with precondor-server and digits_trainer
  --kills N       times that each kind of fault comes (4)
  --seed N        of the instants, the victims and the order; printed, so that a failure can be repeated
  --method NAME   signed-lowrank (of mkor), muon or soap, for all tests; without it the seed chooses one for each
  -k PATTERN      only tests with that in their name

As root, servers have small disks of their own, which are full for a while.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from cluster import Etcd, Switch, restart_all, stopped, wait_for
from faults import STEPS_A_FAULT, FaultTest, argument_parser, checker, run

CLOCK_STEPS = 3  # times that each server's clock is set
CLOCK_RANGE_S = 2 * 24 * 3600  # forwards and back
DISK_BYTES = 96 << 20
DISK_FAILS, CLOCK_OFFSET = 0, 1  # places of the numbers of preloaded_faults.cc
PATIENCE_S = 3  # longer than a worker waits for the answer to a report before it goes on
STEPS_BESIDE = 40  # that go by while a fault is looked at
STEPS_A_LEADER = 200  # until the one that led is back
STEPS_A_BAD_DISK = 200  # until a shard's snapshot has what its logs lack
LACKING = ("precondor_log_stale_status", "precondor_gradients_missing_status")


class MixedTest(FaultTest):
    disks = False

    # --- faults: each is over when its function returns --------------------------------------------------------------------
    def kill_shard(self, cluster, _):
        self.random.choice(cluster.shards).restart()

    def kill_coordinator(self, cluster, _):
        cluster.coordinator.restart()

    def kill_everything(self, cluster, _):
        restart_all(cluster.servers())

    def stop_shard(self, cluster, _):
        with stopped(self.random.choice(cluster.shards).process.pid):
            self.await_standstill(cluster)

    def stop_coordinator(self, cluster, _):
        """Workers come to the end of their lease, for seconds after which they no longer wait for an answer to each report."""
        def steps():
            return [shard.metric("precondor_shard_step_number") for shard in cluster.shards]

        seen, since = None, 0

        def still():
            nonlocal seen, since
            now = steps()
            if now != seen or None in now:
                seen, since = now, time.monotonic()
            return time.monotonic() > since + PATIENCE_S

        with stopped(cluster.coordinator.process.pid):
            wait_for("the job to stand still", still)

    def kill_worker(self, _, training):
        training.restart(self.random.randrange(training.WORKERS))

    def stop_worker(self, cluster, training):
        with stopped(self.random.choice(training.workers())):
            self.await_standstill(cluster)

    def replace_stopped_worker(self, cluster, training):
        rank = self.random.randrange(training.WORKERS)
        epoch = wait_for("the epoch", lambda: cluster.coordinator.metric("precondor_epoch_number"))
        with stopped(training.workers()[rank]):
            replaced = training.replace(rank)
            self.addCleanup(replaced.kill)
            wait_for("another epoch", lambda: (cluster.coordinator.metric("precondor_epoch_number") or 0) > epoch)
        self.assertNotEqual(replaced.wait(60), 0, "a worker whose rank another one has cannot go on")

    def cut_off_coordinator(self, cluster, training):
        """From a shard, in one direction or both; a worker that joins then waits."""
        directions = self.random.choice([*[(one,) for one in Switch.DIRECTIONS], Switch.DIRECTIONS])
        with self.random.choice(cluster.ways).cut(directions):
            training.restart(self.random.randrange(training.WORKERS))
            wait_for("the coordinator to miss the shard", lambda: cluster.coordinator.metric("precondor_unreachable_shards"))
            self.await_standstill(cluster)

    def fill_disk(self, cluster, training):
        @contextlib.contextmanager
        def full(server):
            filler = server.folder / "data" / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            yield
            filler.unlink()

        self.bad_disk(full, cluster, training)

    def fail_disk(self, cluster, training):
        @contextlib.contextmanager
        def failing(server):
            logged = (server.folder / "log").stat().st_size
            self.preload(server.folder, DISK_FAILS, 1)
            yield
            wait_for("the server to say that its disk fails",
                     lambda: b"Input/output error" in (server.folder / "log").read_bytes()[logged:])
            self.preload(server.folder, DISK_FAILS, 0)

        self.bad_disk(failing, cluster, training)

    @staticmethod
    def faults_file(folder):
        return folder.with_suffix(".faults")

    def preload(self, folder, which, value):
        """Sets a number of the faults that are preloaded into the server of this folder."""
        with open(self.faults_file(folder), "r+b") as file:
            file.seek(8 * which)
            file.write(value.to_bytes(8, "little", signed=True))

    def bad_disk(self, fault, cluster, training):
        server = self.random.choice(cluster.servers())
        with self.unhealthy(checker.COORDINATOR if server is cluster.coordinator else server.address):
            self.bad_disk_of(server, fault, cluster, training)

    def step(self, cluster):
        return wait_for("the coordinator's step", lambda: max(cluster.step() or 0, 0))

    def bad_disk_of(self, server, fault, cluster, training):
        before, logged = self.step(cluster), (server.folder / "log").stat().st_size

        def said(line):
            return (server.folder / "log").read_bytes()[logged:].count(line)

        with fault(server):
            if server is cluster.coordinator:  # what is in its last page goes on a little
                wait_for("the coordinator to say that it cannot write, or the job to go on",
                         lambda: server.metric("precondor_journal_failing_status") or (cluster.step() or 0) > before + 10)
            else:
                self.await_step(cluster, training, before + 5)
        if any(server.metric(name) for name in LACKING):
            with stopped(training.workers()[0]):  # the job waits, or seconds of its steps go by
                wait_for("the shard to open its logs again", lambda: said(b"INFO log can be written again") == said(b"ERROR log cannot be written") > 0)
        wait_for("all servers to write again, and a snapshot that has what the logs lack", lambda: not any(
            one.metric(name) for one in cluster.servers() for name in (*LACKING, "precondor_journal_failing_status")))

    def set_clocks(self, cluster, _):
        for server in cluster.servers():
            self.preload(server.folder, CLOCK_OFFSET, self.random.randint(-CLOCK_RANGE_S, CLOCK_RANGE_S) * 10**9)

    # --- runs ----------------------------------------------------------------------------------------------------------------
    def server_prefix(self, data):
        """Gives a server its disk, which stays when it is killed, and its clock."""
        disk = []
        if self.disks:
            mount = f"mkdir -p $0 && {{ mountpoint -q $0 || mount -t tmpfs -o size={DISK_BYTES} tmpfs $0; }} && exec \"$@\""
            disk = ["sh", "-c", mount, data]
            self.addCleanup(subprocess.run, ["umount", "--lazy", data], check=False)
        self.faults_file(data.parent).write_bytes(bytes(16))
        return [*disk, "env", f"LD_PRELOAD={self.binaries / 'tests/e2e/libpreloaded_faults.so'}",
                f"FAULTS_FILE={self.faults_file(data.parent)}"]

    def test_faults_of_all_kinds(self):
        kinds = [self.kill_shard, self.kill_coordinator, self.kill_everything, self.stop_shard, self.stop_coordinator,
                 self.kill_worker, self.stop_worker, self.replace_stopped_worker, self.cut_off_coordinator, self.fail_disk]
        kinds += [self.fill_disk] if self.disks else []
        kinds += [self.set_clocks] * CLOCK_STEPS
        order = kinds * self.kills
        self.random.shuffle(order)
        bad_disks = sum(one in (self.fill_disk, self.fail_disk) for one in order)
        steps = f"--steps={self.steps() + len(order) * (STEPS_A_FAULT + STEPS_BESIDE) + STEPS_A_BAD_DISK * bad_disks}"
        self.kills = len(order)
        with self.cluster(coordinator_arguments=["--lease-steps=4"], shard_prefix=self.server_prefix,
                          coordinator_prefix=self.server_prefix, switched=True) as cluster:
            for server in cluster.servers():
                maps = pathlib.Path("/proc") / str(server.process.pid) / "maps"
                self.assertIn("preloaded_faults", maps.read_text())

            def disturb(training):
                before, fault = cluster.step() or 0, order.pop()
                print(fault.__name__, file=sys.stderr, flush=True)
                fault(cluster, training)
                self.await_progress(cluster, before)

            row = self.train(cluster, disturb, steps, ranks=True)
        self.expect_undisturbed_weights(row, steps)

    def test_two_coordinators(self):
        """The one that leads is killed, or stopped for so long that the other one leads, and then goes on beside it."""
        self.kills *= 2
        steps = f"--steps={self.steps() + self.kills * STEPS_A_LEADER}"
        with Etcd(self.folder.name) as etcd, \
                self.cluster(coordinator_arguments=["--lease-steps=4", f"--etcd-endpoints={etcd.address}", "--etcd-lease-ms=2000"]) as cluster:
            other = cluster.make_coordinator("other")
            self.addCleanup(other.close)
            other.start()
            stops = [False, True] * (self.kills // 2)

            def disturb(_):
                nonlocal other
                before, led = self.step(cluster), cluster.coordinator
                stop = stops.pop()
                led.signal(signal.SIGSTOP if stop else signal.SIGKILL)
                other.await_ready()
                cluster.coordinator, other = other, led
                if stop:  # workers' calls that it has not answered yet are answered now, or never
                    led.signal(signal.SIGCONT)
                led.process.wait(60)
                led.start()
                self.await_progress(cluster, before)

            with Switch(lambda: cluster.coordinator) as switch:
                row = self.train(cluster, disturb, f"--coordinator={switch.address}", steps)
        self.expect_undisturbed_weights(row, steps)


def main():
    parser = argument_parser(__doc__)
    options = parser.parse_args()
    own_mounts = "PRECONDOR_OWN_MOUNTS"
    if os.geteuid() == 0 and own_mounts not in os.environ and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0:
        os.environ[own_mounts] = "yes"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-B", *sys.argv])
    MixedTest.disks = own_mounts in os.environ
    run("mixed_test", options)


if __name__ == "__main__":
    main()
