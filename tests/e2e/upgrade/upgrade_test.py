#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A release and the one before it together: each one's clients on the other's servers, and a service that changes from the
one to the other, server by server, while a model trains. The weights have to be those of a run with one release alone.

Usage: upgrade_test.py --binaries DIR --previous FOLDER [--kills N] [-k PATTERN]

  --binaries DIR     a build tree of this release
  --previous FOLDER  where previous.sh builds the release before it, unless it has done so
  -k PATTERN         only tests with that in their name
"""

import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "chaos"))
# pylint: disable=wrong-import-position
from cluster import Cluster, Training
from faults import FaultTest, argument_parser, run


class UpgradeTest(FaultTest):
    previous = None
    clients = None  # of which build tree they are, in `train`

    def training(self, cluster, arguments, **options):
        return Training(self.clients, cluster, self.folder.name, arguments, record=True, row=self.row, **options)

    def train_together(self, clients, servers):
        self.clients, self.kills = clients, 0
        with Cluster(servers, self.folder.name) as cluster:
            for exchange in ("direct", "delegate"):
                with self.subTest(exchange):
                    row = self.train(cluster, None, f"--exchange={exchange}")
                    self.expect_undisturbed_weights(row, f"--exchange={exchange}")

    def test_clients_of_the_previous_release(self):
        self.train_together(self.previous, self.binaries)

    def test_servers_of_the_previous_release(self):
        self.train_together(self.binaries, self.previous)

    def change(self, clients, before, after, end, coordinator_first):
        """Trains while each server changes its release; `end` ends a server. Its successor has its data and its port."""
        with Cluster(before, self.folder.name, coordinator_arguments=["--lease-steps=8"]) as cluster:
            servers = [cluster.coordinator, *cluster.shards] if coordinator_first else [*cluster.shards, cluster.coordinator]
            waiting = list(servers)

            def disturb(_):
                server, reached = waiting.pop(0), cluster.step() or 0
                end(server)
                server.use(after)
                server.start()
                self.await_progress(cluster, reached)

            self.kills, self.clients = len(servers), clients
            row = self.train(cluster, disturb, self.more_steps())
            self.assertEqual([(server.binaries, server.starts) for server in servers], [(after, 2)] * len(servers))
        self.expect_undisturbed_weights(row, self.more_steps())

    def more_steps(self):
        """The job goes on for hundreds of steps until a drain cuts its streams."""
        return f"--steps={self.steps() + 400 * self.kills}"

    def stop(self, server):
        self.assertEqual(server.terminate(), 0)

    def test_rolling_upgrade(self):
        self.change(self.previous, self.previous, self.binaries, self.stop, coordinator_first=False)

    def test_rolling_upgrade_that_begins_with_the_coordinator(self):
        self.change(self.previous, self.previous, self.binaries, self.stop, coordinator_first=True)

    def test_upgrade_of_killed_servers(self):
        """The files of the previous release are enough at any instant."""
        self.change(self.previous, self.previous, self.binaries, lambda server: server.kill(), coordinator_first=False)

    def test_the_way_back(self):
        """A job that began on this release goes on when its servers return to the previous one."""
        self.change(self.previous, self.binaries, self.previous, self.stop, coordinator_first=False)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--previous", required=True, type=pathlib.Path)
    options = parser.parse_args()
    subprocess.run([pathlib.Path(__file__).parent / "previous.sh", options.previous], check=True)
    UpgradeTest.previous = options.previous.resolve() / "build"
    run("upgrade_test", options)
