#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job with on_shard_loss DEGRADE loses one of two shards, which is killed or hangs: it goes on without it.

Usage: shard_loss_test.py --binaries DIR
"""

import argparse
import pathlib
import signal
import sys
import tempfile
import unittest

from cluster import Cluster, Training, wait_for

STEPS = 120
LOSS_AT = 40        # the step at which the shard is lost
DETECTION_S = 2.0   # --shard-loss-ms
MARGIN_S = 30.0     # for a busy machine: to notice the loss, to tell all workers, to send again
SEEDS = 3           # undisturbed, that say how far the final loss lies apart anyway


class ShardLossTest(unittest.TestCase):
    binaries = None
    undisturbed = []  # final losses

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def cluster(self):
        return Cluster(self.binaries, self.folder.name, durable=False,
                       coordinator_arguments=[f"--shard-loss-ms={int(DETECTION_S * 1000)}"])

    def training(self, cluster, *more):
        return Training(self.binaries, cluster, self.folder.name,
                        [f"--steps={STEPS}", "--exchange=delegate", "--on-shard-loss=degrade", *more])

    def await_step(self, cluster, training, target, deadline_s=600.0):
        def reached():
            if not training.running():
                training.finish()
                return True
            step = cluster.step()
            return step is not None and step >= target

        wait_for(f"step {target}", reached, deadline_s)

    def expect_usual_loss(self, row):
        if not ShardLossTest.undisturbed:
            with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, durable=False) as cluster:
                for seed in range(1, SEEDS + 1):
                    with Training(self.binaries, cluster, folder,
                                  [f"--steps={STEPS}", "--exchange=delegate", f"--seed={seed}"]) as training:
                        ShardLossTest.undisturbed.append(training.finish()["final_loss"])
        usual = ShardLossTest.undisturbed
        self.assertEqual(len(usual), SEEDS)
        spread = max(usual) - min(usual)
        loss = row["final_loss"]
        self.assertGreaterEqual(loss, min(usual) - spread, f"undisturbed: {usual}")
        self.assertLessEqual(loss, max(usual) + spread, f"undisturbed: {usual}")

    def lose(self, cluster, training, lose):
        """Steps go on within the detection time after `lose()`, with the layers elsewhere."""
        self.await_step(cluster, training, LOSS_AT)
        lose()
        lost_at = cluster.step()
        self.assertLess(lost_at, STEPS - 2, "the run ended before the shard was lost")
        # More than the steps that may have been answered already.
        self.await_step(cluster, training, lost_at + 2, DETECTION_S + MARGIN_S)
        self.assertGreater(cluster.coordinator.metric("precondor_moved_layers_total"), 0)

    def test_killed_for_good(self):
        with self.cluster() as cluster, self.training(cluster) as training:
            self.lose(cluster, training, cluster.shards[1].kill)
            row = training.finish()  # which fails when the workers' weights differ
        self.assertEqual(row["steps"], STEPS)
        self.expect_usual_loss(row)

    def test_stopped(self):
        """It keeps its connections and takes in what it is sent; when it goes on, its layers are others'."""
        with self.cluster() as cluster, self.training(cluster) as training:
            self.lose(cluster, training, lambda: cluster.shards[1].signal(signal.SIGSTOP))
            cluster.shards[1].signal(signal.SIGCONT)
            row = training.finish()
            wait_for("the shard to be rid of the session",
                     lambda: cluster.shards[1].metric("precondor_shard_sessions") == 0)
        self.assertEqual(row["steps"], STEPS)
        self.expect_usual_loss(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, type=pathlib.Path)
    parser.add_argument("-k", dest="pattern")
    options = parser.parse_args()
    ShardLossTest.binaries = options.binaries.resolve()
    unittest.main(argv=[sys.argv[0], "-v"] + (["-k", options.pattern] if options.pattern else []))


if __name__ == "__main__":
    main()
