#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A bad network while a real model trains: the final weights have to be those of a run with a good one.

Usage: network_test.py --binaries DIR [--kills N] [--seed N] [-k PATTERN]

  --binaries DIR  a build tree with precondor-server and digits_trainer
  --kills N       faults of each kind in one run (4)
  --seed N        of the instants, the victims and the lost packets; printed, so that a failure can be repeated
  -k PATTERN      only tests with that in their name

Needs a network namespace and a TUN device, as root or as a user who may have namespaces; else it says so and skips.
"""

import subprocess
import sys

from cluster import say, wait_for
from faults import FaultTest, argument_parser, run
from link import DIRECTIONS, Fault, Link, enter_own_network, server_address, why_no_link

WORKERS = 4
# f32, of the classifier's layers. Every worker sends one of each a step and gets one back.
WIDTHS = [64, 64, 64, 10]
GRADIENT_BYTES = 4 * sum(d_out * (d_in + 1) for d_in, d_out in zip(WIDTHS, WIDTHS[1:]))
BAD = Fault(loss=0.02, delay_s=0.020, jitter_s=0.010)
LOST = Fault(loss=1.0)
BAD_STEPS = 33  # that a fault of loss and delay lasts; a third of the shortest run


class NetworkTest(FaultTest):
    no_network = None
    no_link = None

    def setUp(self):
        super().setUp()
        if self.no_network:
            self.skipTest(self.no_network)

    def cluster(self, **options):
        """Workers of other hosts, who share no memory with the shards."""
        return super().cluster(shard_arguments=["--shared-memory-bytes=0"], **options)

    # --- packets to shards go nowhere ------------------------------------------------------------------------------------
    def test_partitions(self):
        """Packets to a shard, or to all shards, are lost for a while: its answers come, and what it is told does not."""
        def route(verb, host):
            subprocess.run(["ip", "route", verb, "blackhole", f"{host}/32", "table", "local"], check=True)

        with self.cluster(shard_host=lambda i: f"127.0.1.{i + 1}") as cluster:
            def disturb(_):
                hosts = self.random.choice([[cluster.shards[0].host], [shard.host for shard in cluster.shards]])
                before = cluster.step()
                for host in hosts:
                    route("add", host)
                try:
                    self.await_standstill(cluster)
                finally:
                    for host in hosts:
                        route("del", host)
                self.await_progress(cluster, before)
            row = self.train(cluster, disturb)
        self.expect_undisturbed_weights(row)

    # --- between all workers and all servers -----------------------------------------------------------------------------
    def train_over_link(self, disturb):
        """Trains with the workers behind a link, with `disturb(link, cluster, training)` at `kills` instants."""
        if self.no_link:
            self.skipTest(self.no_link)
        with Link(self.random.randrange(1 << 32), servers=3) as link, \
                self.cluster(coordinator_host=server_address(0), shard_host=lambda i: server_address(1 + i)) as cluster:
            def disturb_busy_link(training):
                self.expect_traffic(link, cluster.step())
                disturb(link, cluster, training)
            row = self.train(cluster, disturb_busy_link, prefix=link.prefix)
            say(f"{self.id().split('.')[-1]}: {link.counters()}, retransmits {link.retransmits()}")
        self.expect_undisturbed_weights(row)

    def expect_traffic(self, link, step):
        """All that the workers and the shards had to tell each other until then did go through the link."""
        self.assertGreater(step, 0)
        for direction, counters in link.counters().items():
            self.assertGreaterEqual(counters.bytes, step * WORKERS * GRADIENT_BYTES, direction)

    def test_loss_and_delay(self):
        def disturb(link, cluster, training):
            before, retransmits = link.counters(), link.retransmits()
            link.set(BAD, BAD)
            self.await_step(cluster, training, cluster.step() + BAD_STEPS)
            for direction, counters in link.counters().items():
                earlier = before[direction]
                with self.subTest(direction=direction):
                    self.assertGreater(counters.dropped, earlier.dropped)
                    self.assertGreater(counters.reordered, earlier.reordered)
                    self.assertGreater(link.retransmits()[direction], retransmits[direction])
                    mean_delay = (counters.delay_s - earlier.delay_s) / (counters.delivered - earlier.delivered)
                    self.assertGreater(mean_delay, BAD.delay_s - BAD.jitter_s)
            link.set()

        self.train_over_link(disturb)

    def test_blackout(self):
        """Lasts until all workers have given up their connections and failed to dial again."""
        def disturb(link, cluster, _):
            before = link.counters()["to_servers"].connects
            link.set(LOST, LOST)
            wait_for("the workers to dial anew", lambda: link.counters()["to_servers"].connects - before >= 2 * WORKERS)
            step = cluster.step()
            self.await_standstill(cluster)
            link.set()
            self.await_progress(cluster, step)

        self.train_over_link(disturb)

    def test_one_way_loss(self):
        """Requests arrive and the answers do not, and the other way round."""
        def disturb(link, cluster, _):
            for direction in self.random.sample(DIRECTIONS, 2):
                step, dropped = cluster.step(), link.counters()[direction].dropped
                retransmits = link.retransmits()
                link.set(**{direction: LOST})
                # The side whose packets are lost repeats them, and so does the other: it hears of no arrival.
                wait_for("both sides to repeat themselves",
                         lambda: all(now > retransmits[way] + WORKERS for way, now in link.retransmits().items()))
                self.await_standstill(cluster)
                self.assertGreater(link.counters()[direction].dropped, dropped)
                link.set()
                self.await_progress(cluster, step)

        self.train_over_link(disturb)


def main():
    NetworkTest.no_network = enter_own_network(sys.argv)
    NetworkTest.no_link = NetworkTest.no_network or why_no_link()
    run("network_test.py", argument_parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
