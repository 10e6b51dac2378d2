#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch under fully_shard (FSDP2) trains as under DistributedDataParallel, with two and four ranks on gloo."""

import concurrent.futures
import contextlib
import pathlib
import tempfile
import unittest

import precondor
import torch_sharded
import test_program
from cluster import Cluster, wait_for
from torch_rank import ask, results, running

DEADLINE_S = 240  # importing torch's compiler in each rank takes a minute and more on a busy machine


class FsdpTest(unittest.TestCase):
    server = None
    binaries = None
    ranks = {}
    of_undivided = {}

    def ask(self, size, name, session, **arguments):
        """Returns the function's result on each rank; a raised exception as it was."""
        return ask(self.ranks[size], name, DEADLINE_S, **{"address": self.server.address, "session": session, **arguments})

    def run_all(self, size, name, **arguments):
        """Returns the function's result on each rank."""
        return results(self.ask(size, name, f"{self.id().rsplit('.', 1)[-1][:60]}-{size}", **arguments))

    def undivided(self, size, name, **options):
        """The first rank's result, of which each is made once."""
        key = repr((size, name, sorted(options.items())))
        if key not in self.of_undivided:
            self.of_undivided[key] = self.run_all(size, name, **options)[0]
        return self.of_undivided[key]

    def expect_ddp(self, sizes, tolerance, how, **options):
        """The weights of all ranks are DDP's within the tolerance; 0: to the bit."""
        for size in sizes:
            with self.subTest(size=size, how=how, **options):
                wanted = self.undivided(size, "train", how="ddp", **options)
                for weights, decisions, names, _ in self.run_all(size, "train", how="fsdp", **how, **options):
                    self.assertEqual(set(decisions.values()), {"PRECONDITIONED"})
                    self.assertEqual(names, wanted[2])
                    test_program.expect_close(weights, wanted[0], tolerance)

    # Two ranks: a sum of two numbers has one order. With four gloo's all-reduce and reduce-scatter add in different ones.
    def test_weights_are_ddps(self):
        for optimizer in ("SGD", "AdamW"):
            for reshard in (True, False):
                self.expect_ddp([2], 0, {"reshard": reshard}, optimizer=optimizer)
                self.expect_ddp([4], 1e-6, {"reshard": reshard}, optimizer=optimizer)

    def test_shards_of_columns(self):
        self.expect_ddp([2], 0, {"by_columns": True})

    def test_hybrid_meshes(self):
        self.expect_ddp([4], 1e-6, {"hsdp": True})

    def test_weights_that_multiply_from_the_right(self):
        self.expect_ddp([2], 0, {}, transposed=True)
        self.expect_ddp([4], 1e-6, {}, transposed=True, optimizer="SGD")

    def test_stacks_of_experts(self):
        self.expect_ddp([2], 0, {}, mixture=True, method=None, optimizer="made")
        self.expect_ddp([4], 1e-6, {}, mixture=True, method="muon", optimizer="made")

    def test_blocks_of_a_matrix(self):
        blocks = precondor.Selection(blocks={r"blocks\.0\.up": [2, 3, 4], r"blocks\.1": [2, 4]})
        for how in ({}, {"exchange": "SHARDED"}, {"by_columns": True}, {"by_columns": True, "exchange": "SHARDED"}):
            self.expect_ddp([2], 0, how, transposed=True, selection=blocks)
        self.expect_ddp([4], 1e-6, {}, transposed=True, selection=blocks, method="muon", optimizer="made")
        blocks = precondor.Selection(blocks={".*up": [3, 5], ".*down": 3})
        for exchange in ("DELEGATE", "SHARDED"):
            self.expect_undivided(2, None, 2e-6, 2, exchange=exchange, selection=blocks, method="muon", optimizer="made")

    def test_its_own_optimizer(self):
        self.expect_ddp([2], 0, {}, optimizer="made", layer_methods={"blocks.0.*": "soap"})

    def test_accumulation(self):
        self.expect_ddp([2], 1e-6, {}, micro_batches=4)

    def test_clipping(self):
        self.expect_ddp([2], 1e-6, {}, clip=True, optimizer="SGD")

    def test_parts_that_ranks_send_themselves(self):
        how = {"exchange": "SHARDED"}
        self.expect_ddp([2], 0, how, optimizer="AdamW")
        self.expect_ddp([2], 0, {**how, "by_columns": True}, layer_methods={"conv.*": "soap"})
        self.expect_ddp([2], 0, how, transposed=True)
        self.expect_ddp([2], 0, how, mixture=True, method=None, optimizer="made")
        self.expect_ddp([2], 1e-6, how, method="eva", micro_batches=4, clip=True)
        self.expect_ddp([4], 1e-6, {**how, "hsdp": True})
        for sequence in (False, True):
            self.expect_undivided(2, None, 2e-6, 2, sequence=sequence, **how)
            self.expect_undivided(4, 1, 2e-6, 2, sequence=sequence, **how, method="muon", optimizer="made")

    def test_a_shard_that_is_killed_in_a_step(self):
        """When it comes back, other ranks have sent their parts of a step's gradients, and rank 0 has not."""
        wanted = self.undivided(2, "train", how="ddp")[0]
        with tempfile.TemporaryDirectory() as folder, Cluster(self.binaries, folder, shards=2) as cluster:
            pause = pathlib.Path(folder) / "pause"

            def kill():
                wait_for("rank 0 to pause", pause.exists, DEADLINE_S)
                for shard in cluster.shards:
                    shard.restart()
                pathlib.Path(f"{pause}.over").touch()

            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                killed = thread.submit(kill)
                options = {"how": "fsdp", "exchange": "SHARDED", "pause": str(pause), "address": cluster.coordinator.address}
                for weights, *_ in self.run_all(2, "train", **options):
                    test_program.expect_close(weights, wanted)
                killed.result()

    def expect_undivided(self, size, reference, tolerance, tensor, **options):
        """The weights of all ranks are those of the undivided model."""
        with self.subTest(size=size, tensor=tensor, **options):
            plain = {name: value for name, value in options.items() if name not in ("sequence", "partial", "exchange", "hsdp")}
            wanted = self.undivided(2, "train_divided", tensor=reference, **plain)[0]
            for weights, decisions in self.run_all(size, "train_divided", tensor=tensor, **options):
                self.assertEqual(set(decisions.values()), {"PRECONDITIONED"})
                test_program.expect_close(weights, wanted, tolerance)

    def test_tensor_parallelism(self):
        for sequence in (False, True):
            for options in ({}, {"method": "eva", "statistics": torch_sharded.statistics("MEAN"), "optimizer": "SGD"}, {"selection": precondor.Selection(fold_bias=False)},
                            {"method": "muon", "optimizer": "made"}):
                self.expect_undivided(2, None, 2e-6, 2, sequence=sequence, **options)
        for exchange in ("DELEGATE", "SHARDED"):
            self.expect_undivided(2, None, 2e-6, 2, sequence=True, partial=True, exchange=exchange, method="muon", optimizer="made")

    def test_tensor_parallelism_under_fully_shard(self):
        for sequence in (False, True):
            for options in ({"statistics": torch_sharded.statistics("MEAN")}, {"method": "muon", "optimizer": "made"}):
                self.expect_undivided(4, 1, 2e-6, 2, sequence=sequence, **options)

    # Without soap, which scales up what a sum in another order leaves in directions that have no gradient.
    def test_tensor_parallelism_by_gradients(self):
        for options in ({"method": "kron"}, {"method": None}, {"method": None, "exchange": "SHARDED", "sequence": True}):
            self.expect_undivided(2, None, 2e-6, 2, words=True, optimizer="made", **options)

    def test_tensor_parallelism_on_a_hybrid_mesh(self):
        for options in ({"statistics": torch_sharded.statistics("MEAN")}, {"method": None, "optimizer": "made", "words": True},
                        {"method": "muon", "optimizer": "made", "exchange": "SHARDED"}):
            self.expect_undivided(4, 1, 2e-6, 2, hsdp=True, **options)

    def test_scaling_by_the_learning_rate(self):
        self.expect_ddp([2], 1e-6, {}, method="eva")

    def test_compiled_blocks(self):
        self.expect_ddp([2], 1e-6, {"compiled": True})

    def test_weights_in_bf16(self):
        self.expect_ddp([2], 0.02, {"bf16": True}, optimizer="SGD")  # some ten roundings of 2^-9 on numbers of up to 1

    def test_a_layer_that_one_rank_missed_is_an_error_on_every_rank(self):
        for exchange in ("DIRECT", "DELEGATE", "REPLAY"):
            with self.subTest(exchange=exchange):
                pattern = "layer 0: it has a gradient, but step 0, which takes statistics, saw no call of it"
                for rank, answer in enumerate(self.ask(2, "missed", f"missed-{exchange}", exchange=exchange)):
                    self.assertIsInstance(answer, precondor.FailedPreconditionError)
                    self.assertRegex(str(answer), f"^{'rank 0: ' if rank else ''}{pattern}")

    def test_a_part_that_is_not_finite_skips_the_step_on_every_rank(self):
        for exchange in ("DELEGATE", "SHARDED"):
            for answer in self.run_all(2, "spoiled", exchange=exchange):
                self.assertEqual(answer, [(False, {"PRECONDITIONED"}, False), (True, {"SKIP"}, True), (False, {"PRECONDITIONED"}, False)])

    def test_buffers_are_freed(self):
        self.assertEqual(self.run_all(2, "released"), [(0, 4)] * 2)

    def test_what_is_not_supported_is_refused_by_name(self):
        for case, kind, pattern in (
                ("fsdp1", precondor.UnimplementedError, "model is a FullyShardedDataParallel. Use fully_shard"),
                ("fsdp1, inside", precondor.UnimplementedError, "parameter .* is divided by FullyShardedDataParallel. Use fully_shard"),
                ("fsdp1, inside, original", precondor.UnimplementedError, "parameter 0.weight is divided by FullyShardedDataParallel"),
                ("plain", precondor.InvalidArgumentError, "exchange SHARDED: expected a model under fully_shard or tensor"),
                ("tensor and ddp", precondor.UnimplementedError, "parameter 0.weight is on a mesh of 2 ranks, of a job of 4"),
                ("outside", precondor.UnimplementedError, "parameter 0.weight is on a mesh of 2 ranks, of a job of 4"),
                ("convolution", precondor.UnimplementedError, r"layer 0: statistics of a weight \[4, 4, 1, 1\] that is placed"),
                ("blocks", precondor.UnimplementedError, r"layer 0.group0: statistics of a weight \[4, 4\] that is placed .* of whole linear layers"),
                ("covariance", precondor.UnimplementedError, r"layer 0: statistics of a weight \[4, 4\] that is placed"),
                ("part", precondor.InvalidArgumentError, "layer 1: expected a parameter under fully_shard"),
                ("exchange", precondor.UnimplementedError, "exchange REPLAY: expected DELEGATE or SHARDED"),
                ("overlap", precondor.UnimplementedError, "exchange DELEGATE, overlap: expected DELEGATE or SHARDED, without"),
                ("scaler", precondor.UnimplementedError, "scaler: is not supported for a model in parts")):
            with self.subTest(case=case):
                for answer in self.ask(4, "refused", f"refused-{case}", case=case):
                    self.assertIsInstance(answer, kind)
                    self.assertRegex(str(answer), pattern)


if __name__ == "__main__":
    program = test_program.parse("--server").server
    FsdpTest.binaries = pathlib.Path(program).resolve().parents[1]

    def begin(server):
        FsdpTest.server = server

    @contextlib.contextmanager
    def around(two):
        with tempfile.TemporaryDirectory() as four, running(two, [{}] * 2, torch_sharded.FUNCTIONS) as pair, \
                running(four, [{}] * 4, torch_sharded.FUNCTIONS) as quad:
            FsdpTest.ranks = {2: pair, 4: quad}
            yield

    test_program.run_with_server(program, begin, around)
