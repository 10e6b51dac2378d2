#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job goes back to a snapshot on another number of shards, and with more ranks: servers, trainer and precondorctl are the
real processes.

Usage: restore_test.py --binaries DIR
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from cluster import Cluster, wait_for

CREATE_AT = 30  # the step before which the snapshot is requested, while no rank is in the job
STEPS = 60


class RestoreTest(unittest.TestCase):
    binaries = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, program, *arguments):
        done = subprocess.run([pathlib.Path(self.binaries) / program, *map(str, arguments)], capture_output=True,
                              text=True, timeout=120, env={}, check=False)
        self.assertEqual(done.returncode, 0, f"{program} {arguments}: {done.stderr}")
        return done.stdout

    def ctl(self, cluster, *arguments):
        return self.run_program("client/cpp/tools/precondorctl", f"--server={cluster.coordinator.address}", *arguments)

    def cluster(self, name, shards):
        folder = self.folder / name
        folder.mkdir()
        return Cluster(self.binaries, folder, shards,
                       coordinator_arguments=["--lease-steps=4"])

    def train(self, cluster, first_step, end_step, checkpoints, world_size=1):
        """The bytes of the weights after the last step."""
        self.run_program("tests/e2e/snapshot_trainer", cluster.coordinator.address, first_step, end_step, checkpoints, world_size)
        return (checkpoints / f"weights-{end_step}").read_bytes()

    def snapshot(self, cluster):
        def complete():
            listed = json.loads(self.ctl(cluster, "snapshot", "list", "job", "--json"))["session_snapshots"]
            return listed[0] if listed[0]["state"] != "under_way" else None

        return wait_for("the session's snapshot to be complete", complete)

    def test_goes_on_bitwise_on_other_numbers_of_shards_and_ranks(self):
        original = self.folder / "checkpoints"
        original.mkdir()
        with self.cluster("two", 2) as cluster:
            self.train(cluster, 0, CREATE_AT, original)
            self.ctl(cluster, "snapshot", "create", "job")
            expected = self.train(cluster, CREATE_AT, STEPS, original)
            snapshot = self.snapshot(cluster)
            self.assertEqual(snapshot["state"], "complete", snapshot)
            self.assertEqual(len(snapshot["shards"]), 2)
            wait_for("the metric to show it", lambda: snapshot["step"] == cluster.coordinator.metric(
                "precondor_last_session_snapshot_step_number"))
            for server in cluster.servers():
                self.assertEqual(server.terminate(), 0)
        paths = [f"--snapshot-path={self.folder / 'two' / name / 'data'}" for name in ("shard0", "shard1")]
        step = snapshot["step"]
        self.assertGreater(step, CREATE_AT)
        self.assertLess(step, STEPS)
        for shards, ranks in ((1, 1), (3, 2)):
            with self.subTest(shards=shards), self.cluster(f"restored-{shards}", shards) as cluster:
                told = self.ctl(cluster, "snapshot", "restore", "job", *paths, f"--world-size={ranks}",
                                f"--snapshot={snapshot['snapshot_id']}")
                self.assertIn(f"begins with step {step}", told)
                checkpoints = self.folder / f"checkpoints-{shards}"
                checkpoints.mkdir()
                checkpoint = f"weights-{step}"
                (checkpoints / checkpoint).write_bytes((original / checkpoint).read_bytes())
                self.assertEqual(self.train(cluster, step, STEPS, checkpoints, ranks), expected)
        # With factors of its own a job comes to other weights.
        with self.cluster("fresh", 2) as cluster:
            checkpoints = original
            self.assertNotEqual(self.train(cluster, step, STEPS, checkpoints), expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, help="a build tree")
    known, rest = parser.parse_known_args()
    RestoreTest.binaries = known.binaries
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main()
