#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The default recipe of precondor.torch on two ranks while servers end and come back: the weights that it ends with, and what the
trainer is told.

A run goes on until the faults are over. Another one, that nothing happens to, has the hash of the weights of each step.
"""

import argparse
import contextlib
import multiprocessing.connection
import pathlib
import random
import re
import shutil
import sys
import tempfile
import unittest

import precondor
import test_program
from cluster import Cluster, Server, say, wait_for
from restart_training import train
from torch_rank import running

DEADLINE_S = 240  # importing torch in each rank takes long on a busy machine
COLLECTIVE_S = 10  # for a rank's own error, after the other's
EXCHANGES = ("DIRECT", "DELEGATE", "SHARDED")
FIRST_FAULT = 20  # the step from which on servers end
STEPS_AFTER = 5


class RestartTest(unittest.TestCase):
    binaries = None
    ranks = None
    running = contextlib.ExitStack()  # the ranks
    seed = 1
    undisturbed = {}  # hashes after each step, by exchange

    def setUp(self):
        self.random = random.Random(f"{self.seed} {self.id()}")
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def cluster(self, name="cluster", **options):
        (self.folder / name).mkdir()
        return self.enterContext(Cluster(self.binaries, self.folder / name, **options))

    @classmethod
    def end_ranks(cls):
        cls.running.close()
        cls.ranks = None

    def begin(self, cluster, exchange, **options):
        if self.ranks is None:
            folder = RestartTest.running.enter_context(tempfile.TemporaryDirectory())
            RestartTest.ranks = RestartTest.running.enter_context(running(folder, [{}, {}], {"train": train}))
        for rank in self.ranks:
            rank.send(("train", {"address": cluster.coordinator.address, "session": "job", "exchange": exchange, **options}))

    def answers(self):
        """Returns those of both ranks: a raised exception as it was, and None if a collective waits for the rank that raised it. An
        exception ends both processes, as torchrun does."""
        answers, raised = {}, False
        while len(answers) < len(self.ranks):
            ready = multiprocessing.connection.wait(set(self.ranks) - set(answers), COLLECTIVE_S if raised else DEADLINE_S)
            if not ready and not raised:
                self.end_ranks()  # their answers would be those of another run
                raise TimeoutError("a rank does not answer")
            answers.update({rank: rank.recv() for rank in ready} if ready else dict.fromkeys(set(self.ranks) - set(answers)))
            raised = any(isinstance(answer, Exception) for answer in answers.values())
        in_order = [answers[rank] for rank in self.ranks]
        if raised:
            self.end_ranks()
        return in_order

    def await_step(self, cluster, step):
        """False if a rank ends before it."""
        def ended():
            return any(rank.poll() for rank in self.ranks)

        wait_for(f"step {step}", lambda: ended() or (cluster.step() or 0) >= step, DEADLINE_S)
        return not ended()

    def disturb(self, cluster, exchange, *faults):
        """Trains with the faults, one after the other; what both ranks answer."""
        over = self.folder / f"over-{exchange}"
        self.begin(cluster, exchange, over=str(over))
        at, ended = FIRST_FAULT, False
        try:
            for fault in faults:
                ended = ended or not self.await_step(cluster, at + self.random.randrange(20))
                before = cluster.step()
                fault()
                # A coordinator that was restarted shows 0 until a rank reports, which may come before layers resume.
                at = max(before, cluster.step() or 0) + STEPS_AFTER
            ended = ended or not self.await_step(cluster, at)
            self.counted = [self.lost_updates(server) for server in cluster.shards or [cluster.coordinator]]
        finally:
            over.touch()
            answers = self.answers()
        self.assertTrue(any(isinstance(answer, Exception) for answer in answers) or not ended)
        return answers

    def expect_undisturbed(self, exchange, answers):
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        steps = len(answers[0][0])
        known = self.undisturbed.get(exchange, [])
        if len(known) < steps:
            with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, durable=False) as cluster:
                self.begin(cluster, exchange, steps=steps)
                known = self.undisturbed[exchange] = self.answers()[0][0]
        say(f"{self.id().rsplit('.', 1)[-1]}: {exchange}: after {steps} steps {answers[0][0][-1]}, undisturbed {known[steps - 1]}")
        for hashes, lost, metrics, texts in answers:
            self.assertEqual([step for step in range(steps) if hashes[step] != known[step]], [], "steps with other weights")
            self.assertEqual((lost, metrics["updates_lost"], texts), ({}, 0, []))

    def lost_updates(self, server):
        """Returns its metric and its entry of the page; both are gone with the session."""
        shown = sum(session["shard"]["updates_lost"] for session in server.status()["sessions"])
        self.assertEqual(server.metric("precondor_updates_lost_total") or 0, shown)
        return shown

    def expect_told(self, answers):
        """The trainer is told what the servers have counted. Returns the number of updates that are lost."""
        for _, lost, metrics, texts in answers:
            told = sum(sum(layers.values()) for layers in lost.values())
            self.assertEqual(told, sum(self.counted))
            self.assertEqual(metrics["updates_lost"], told)
            named = [sum(int(count) for count in re.findall(r"updates of (\d+) layer", text)) for text in texts]
            self.assertEqual(sum(named), sum(map(len, lost.values())), texts)
        return sum(self.counted)

    def in_each_exchange(self, test):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                test(exchange)

    # --- with --data-dir: bitwise -----------------------------------------------------------------------------------------
    def test_rolling_restart(self):
        def test(exchange):
            def roll(shard):
                self.assertEqual(shard.terminate(), 0, shard.log_tail())
                shard.start()

            cluster = self.cluster(exchange)
            self.expect_undisturbed(exchange, self.disturb(cluster, exchange, *(lambda shard=shard: roll(shard) for shard in cluster.shards)))

        self.in_each_exchange(test)

    def test_killed_shards(self):
        def test(exchange):
            cluster = self.cluster(exchange)
            self.expect_undisturbed(exchange, self.disturb(cluster, exchange, *(shard.restart for shard in cluster.shards)))

        self.in_each_exchange(test)

    # --- without: told ------------------------------------------------------------------------------------------------------
    def expect_told_or_lost(self, exchange, answers):
        """The shard's restart can end ranks that wait for one answer of it, but only together."""
        if exchange != "DELEGATE" and any(isinstance(answer, Exception) for answer in answers):
            for answer in filter(None, answers):
                self.assertIsInstance(answer, precondor.DataLossError)
                self.assertEqual(answer.reason, "STATE_LOST")
            return
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        lost = self.expect_told(answers)
        say(f"{self.id().rsplit('.', 1)[-1]}: {exchange}: {lost} updates lost: {[answer[3] for answer in answers]}")
        self.assertGreater(lost, 0)

    def test_a_shard_without_a_data_directory(self):
        def test(exchange):
            cluster = self.cluster(exchange, durable=False)
            self.expect_told_or_lost(exchange, self.disturb(cluster, exchange, cluster.shards[0].restart))

        self.in_each_exchange(test)

    def test_a_shard_that_lost_its_disk(self):
        def test(exchange):
            def lose():
                shard.kill()
                shutil.rmtree(shard.folder / "data")
                shard.start()

            cluster = self.cluster(exchange)
            shard = cluster.shards[1]
            self.expect_told_or_lost(exchange, self.disturb(cluster, exchange, lose))

        self.in_each_exchange(test)

    def test_one_server_for_all(self):
        """Role all: its factors are lost, and the journal of its coordinator is not, or neither is."""
        for exchange, loses in (("DIRECT", False), ("DELEGATE", True)):
            with self.subTest(exchange=exchange, loses=loses):
                cluster = Cluster(self.binaries, self.folder, shards=0)
                data = self.folder / exchange / "data"
                server = cluster.coordinator = Server(self.binaries, self.folder, exchange, ["--role=all", f"--data-dir={data}"])
                self.addCleanup(cluster.close)
                server.start()

                def end(loses=loses, server=server, data=data):
                    server.kill()
                    if loses:
                        shutil.rmtree(data / "shard")
                    server.start()

                answers = self.disturb(cluster, exchange, end)
                if loses:
                    self.expect_told_or_lost(exchange, answers)
                else:
                    self.expect_undisturbed(exchange, answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", required=True, type=pathlib.Path, help="the build folder")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the instants; printed")
    options, sys.argv[1:] = parser.parse_known_args()
    RestartTest.binaries, RestartTest.seed = options.binaries.resolve(), options.seed
    say(f"torch_restart_test.py: --seed={options.seed}")
    try:
        test_program.run()
    finally:
        RestartTest.end_ranks()


if __name__ == "__main__":
    main()
