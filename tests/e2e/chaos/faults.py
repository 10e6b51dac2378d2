# SPDX-License-Identifier: Apache-2.0
"""The frame of tests of faults: a run that is disturbed, and the weights that it must end with all the same.

Also what the service has told the workers must be valid at each moment: ../history/checker.py has the rules.
"""

import argparse
import contextlib
import pathlib
import random
import sys
import tempfile
import time
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "history"))
# pylint: disable=wrong-import-position
import checker
from cluster import Cluster, Failure, Training, say, wait_for

STEPS_A_FAULT = 40  # between two faults: the floor below which a run would be too quiet to mean anything
LEAD_IN = 20        # steps before the first
ROWS = ("signed-lowrank", "muon", "soap")  # of digits.ROWS: one method that takes statistics, two that learn from gradients


class FaultTest(unittest.TestCase):
    binaries = None
    kills = 4
    seed = 1
    method = None     # of ROWS, for all tests; None: each test has one by its seed
    undisturbed = {}  # weights by (row, steps, arguments)

    def setUp(self):
        self.random = random.Random(f"{self.seed} {self.id()}")
        self.row = self.method or self.random.choice(ROWS)
        say(f"{self.id().split('.')[-1]}: --method={self.row}")
        self.lost = []  # times in which servers were not healthy, where that excuses something
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def steps(self):
        return LEAD_IN + STEPS_A_FAULT * (self.kills + 1)

    def arguments(self, *more):
        return [f"--steps={self.steps()}", *more]

    def training(self, cluster, arguments, **options):
        return Training(self.binaries, cluster, self.folder.name, arguments, record=True, row=self.row, **options)

    def cluster(self, **options):
        return Cluster(self.binaries, self.folder.name, **options)

    def await_step(self, cluster, training, target):
        """Waits until all workers have reported a step while the run goes on."""
        def reached():
            if not training.running():
                training.finish()
                raise Failure(f"the run ended before step {target}, where it was to be disturbed")
            step = cluster.step()
            return step is not None and step >= target

        wait_for(f"step {target}", reached)

    def await_progress(self, cluster, before):
        try:
            wait_for("the job to go on", lambda: (cluster.step() or 0) > before + 2)
        except Failure as failure:
            logs = [f"{server.name}: exit status {server.process.poll()}\n{server.log_tail()}" for server in cluster.servers()]
            raise Failure("\n".join([str(failure), *logs])) from None

    def await_standstill(self, cluster):
        """The coordinator answers, and the step that it answers does not grow any more."""
        seen = []

        def still():
            seen.append(cluster.step())
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        wait_for("the job to stand still", still)

    def train(self, cluster, disturb, *more, prefix=(), ranks=False):
        """Trains, with `disturb(training)` at `kills` instants; what the run gave."""
        with self.training(cluster, self.arguments(*more), prefix=prefix, ranks=ranks) as training:
            for fault in range(self.kills):
                target = LEAD_IN + STEPS_A_FAULT * fault + self.random.randrange(STEPS_A_FAULT // 2)
                self.await_step(cluster, training, target)
                say(f"{self.id().split('.')[-1]}: fault {fault + 1} of {self.kills} at step {cluster.step()}")
                disturb(training)
            row = training.finish()
            self.expect_valid_history(cluster, training)
            return row

    @contextlib.contextmanager
    def unhealthy(self, server):
        """A shard by its address, or checker.COORDINATOR."""
        began = time.monotonic_ns()
        yield
        self.lost.append(checker.Fault(server, began, time.monotonic_ns()))

    def expect_valid_history(self, cluster, training):
        history = checker.History.read(training.histories())
        self.assertGreater(len(history.frames), 0)
        say(f"{self.id().split('.')[-1]}: a history of {len(history.calls)} calls and {len(history.frames)} frames")
        self.assertEqual(list(checker.findings(history, self.lost, cluster.lease_steps)), [])

    def expect_undisturbed_weights(self, row, *more):
        key = (self.row, self.steps(), more)
        if key not in FaultTest.undisturbed:
            with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, durable=False) as cluster:
                with Training(self.binaries, cluster, folder, self.arguments(*more), row=self.row) as training:
                    FaultTest.undisturbed[key] = training.finish()
        expected = FaultTest.undisturbed[key]
        self.assertEqual(row["weights_hash"], expected["weights_hash"], "other weights than without faults")
        self.assertAlmostEqual(row["final_loss"], expected["final_loss"], delta=5.1e-5)  # digits_trainer prints four places
        self.assertEqual(row["steps"], expected["steps"])


def argument_parser(doc):
    """The parser of a test program, whose text on usage is `doc`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=FaultTest.kills)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--method", choices=ROWS)
    parser.add_argument("-k", dest="pattern")
    return parser


def run(name, options):
    """Runs the tests of the main module with what the parser found."""
    FaultTest.binaries, FaultTest.kills, FaultTest.seed, FaultTest.method = options.binaries.resolve(), options.kills, options.seed, options.method
    say(f"{name}: {options.kills} faults a run, --seed={options.seed}")
    unittest.main(module="__main__", argv=[name, "-v"] + (["-k", options.pattern] if options.pattern else []))
