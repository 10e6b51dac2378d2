#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch in a job of two processes on gloo: the trajectory of the formulas in every exchange, and what fails."""

import contextlib
import itertools
import pathlib
import re
import tempfile
import unittest

import numpy as np
import torch

import precondor
import test_program
import torch_reference
import torch_training
from interop_test import Server
from torch_rank import ask, results, running
from torch_test import TOLERANCE

# With the nets whose method each can have.
EXCHANGES = {"DIRECT": ("mlp", "conv", "kfac"), "DELEGATE": ("mlp", "conv", "kfac"), "REPLAY": ("mlp", "conv"),
             "PULL_FACTORS": ("mlp", "conv", "kfac")}
WAYS = tuple(itertools.product(EXCHANGES, (False, True)))  # with a plain model, and under DDP


class RanksTest(unittest.TestCase):
    program = None
    server = None
    ranks = None

    def setUp(self):
        self.name = self.id().rsplit(".", 1)[-1][:80]

    def run_both(self, name, **arguments):
        """Returns the function's result on each rank; a raised exception as it was."""
        return ask(self.ranks, name, **{"address": self.server.address, "session": self.name, **arguments})

    def train(self, case, **options):
        """Both ranks' results, after a check that they have the same weights to the bit."""
        answers = results(self.run_both("train", case=case, **options))
        test_program.expect_close(answers[0][1], answers[1][1])
        return answers

    def expect_reference(self, case, answers, **options):
        losses, weights = torch_reference.train(torch_reference.CASES[case], world_size=2, **options)
        np.testing.assert_allclose(np.mean([answer[0] for answer in answers], axis=0), losses, rtol=0, atol=TOLERANCE)
        test_program.expect_close(answers[0][1], weights, TOLERANCE)

    def test_trajectory_is_that_of_the_formulas(self):
        for exchange, ddp in WAYS:
            for case in EXCHANGES[exchange]:
                with self.subTest(exchange=exchange, ddp=ddp, case=case):
                    answers = self.train(case, exchange=exchange, ddp=ddp)
                    self.expect_reference(case, answers)
                    self.assertEqual({d for result in answers[1][2] for d in result["decisions"].values()}, {"PRECONDITIONED"})

    def test_the_default_is_direct_and_delegate_for_ddp(self):
        for ddp, exchange in ((False, "DIRECT"), (True, "DELEGATE")):
            answers = self.train("mlp", ddp=ddp)
            self.assertEqual([answer[3] for answer in answers], [exchange] * 2)
            self.expect_reference("mlp", answers)

    def test_gradients_may_leave_during_the_backward_pass(self):
        for ddp in (False, True):
            for case in EXCHANGES["DIRECT"]:
                with self.subTest(ddp=ddp, case=case):
                    answers = self.train(case, exchange="DIRECT", overlap=True, micro_batches=2, ddp=ddp)
                    self.expect_reference(case, answers)
                    self.assertEqual({d for result in answers[1][2] for d in result["decisions"].values()}, {"PRECONDITIONED"})

    def test_rows_that_no_rank_looked_up_stay(self):
        for how, exchange in (("plain", "DIRECT"), ("plain", "DELEGATE"), ("ddp", "DELEGATE"), ("fsdp", "DELEGATE")):
            for method in ("soap", "muon"):
                with self.subTest(how=how, exchange=exchange, method=method):
                    one, other = self.run_both("lookups", session=f"{self.name}-{how}-{exchange}-{method}", how=how,
                                               exchange=exchange, method=method)
                    np.testing.assert_array_equal(one, other)
                    for answer, rows in zip(one[2:], ([0, 1, 2, 5], [1, 6])):
                        self.assertEqual(np.flatnonzero(np.abs(answer).min(1)).tolist(), rows)
                        self.assertEqual(np.flatnonzero(np.abs(answer).max(1)).tolist(), rows)

    def test_ddp_leaves_layers_to_the_servers_until_the_end(self):
        for view in (False, True):
            with self.subTest(gradient_as_bucket_view=view):
                ranks = self.run_both("buckets", gradient_as_bucket_view=view, session=f"{self.name}-{view}")
                for own, other in (ranks, ranks[::-1]):
                    np.testing.assert_array_equal(own["alone"][0], own["layer"], "the rank's own")
                    np.testing.assert_allclose(own["bias"], (own["alone"][1] + other["alone"][1]) / 2, rtol=1e-6)
                    np.testing.assert_allclose(own["answer"], (own["layer"] + other["layer"]) / 2, rtol=1e-6)
                    np.testing.assert_allclose(own["after"], (own["alone"][0] + other["alone"][0]) / 2, rtol=1e-6)
                    self.assertRegex(own["second"], "has another Preconditioner with overlap")
                    self.assertRegex(own["other"], "takes no communication hook")

    def test_complex_gradients_are_averaged(self):
        (first, answer, warned), (second, other, _) = results(self.run_both("complex_parameter", seeds=(3, 3)))
        np.testing.assert_allclose(answer, (first + second) / 2, rtol=1e-6)
        self.assertGreater(np.abs(answer.imag).min(), 0)
        np.testing.assert_array_equal(answer, other)
        self.assertEqual(warned, [])

    def test_other_weights_at_the_beginning_are_told(self):
        for _, _, warned in results(self.run_both("complex_parameter", seeds=(3, 4))):
            self.assertRegex("".join(warned), "the ranks' weights differ")

    def test_micro_batches_are_one_batch(self):
        for exchange, ddp in WAYS:
            with self.subTest(exchange=exchange, ddp=ddp):
                self.expect_reference("mlp", self.train("mlp", exchange=exchange, ddp=ddp, micro_batches=4))

    def expect_skipped_on_both(self, scale, **options):
        for exchange, ddp in WAYS:
            with self.subTest(exchange=exchange, ddp=ddp):
                # DDP's average is infinite on both; with a plain model the ranks have to tell each other.
                overflow = ((0, 4), (1, 4)) if ddp else ((1, 4),)
                answers = self.train("mlp", exchange=exchange, ddp=ddp, overflow=overflow, **options)
                self.expect_reference("mlp", answers, skipped=[4])
                for answer in answers:
                    self.assertEqual([result["step"] for result in answer[2] if result["skipped"]], [4])
                    self.assertEqual(answer[4], scale)  # or the ranks' losses, and whatever hangs on the scale, part

    def test_an_overflow_of_one_rank_skips_the_step_on_both(self):
        self.expect_skipped_on_both(32.0, scaler=64.0)

    def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step_on_both(self):
        self.expect_skipped_on_both(None)
        for ddp in (False, True):  # gradients of layers have left
            for answer in self.train("mlp", session=f"{self.name}-{ddp}", ddp=ddp, exchange="DIRECT", overlap=True, overflow=((1, 4),)):
                self.assertEqual([result["step"] for result in answer[2] if result["skipped"]], [4])

    def test_gradients_that_are_unscaled_before_the_ranks_agree_are_refused(self):
        for answer in self.run_both("train", case="mlp", scaler=64.0, unscale=True):
            self.assertIsInstance(answer, precondor.InvalidArgumentError)
            self.assertRegex(str(answer), r"unscale_ has been called.*Leave unscale_ to step\(\)")
        self.expect_reference("mlp", self.train("mlp", session=f"{self.name}-ddp", ddp=True, scaler=64.0, unscale=True))

    def test_another_default_dtype(self):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                self.expect_reference("mlp", self.train("mlp", exchange=exchange, default_dtype=torch.float64))

    def test_batches_of_several_sizes_are_one_batch(self):
        case = torch_reference.CASES["mlp"]
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), case.rate)
        for step in range(3):
            x, y = (part.float() for part in case.batch_of(step))
            optimizer.zero_grad()
            torch_reference.loss_of(model(x), y).backward()
            optimizer.step()
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                for weights in self.run_both("unequal", exchange=exchange):
                    for got, wanted in zip(weights, model.parameters()):
                        np.testing.assert_allclose(got, wanted.detach(), rtol=0, atol=1e-6)

    def test_a_layer_that_one_rank_does_not_use(self):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                wanted = ["SKIP" if exchange == "DIRECT" else "PRECONDITIONED", "PRECONDITIONED"]
                answers = self.run_both("unused", exchange=exchange)
                self.assertEqual([answer["decisions"] for answer in answers], [wanted] * 2)
                self.assertEqual(answers[0]["weights"], answers[1]["weights"])
        with self.subTest("the answer counts zeros"):
            answers = self.run_both("unused", exchange="DIRECT", session=f"{self.name}-zeros", method="identity")
            for answer in answers:
                np.testing.assert_allclose(answer["answer"], np.mean([one["own"] for one in answers], axis=0), rtol=1e-6)
            self.assertGreater(np.abs(answers[0]["own"]).max(), 0)

    def test_a_job_goes_on_bitwise_from_its_checkpoints(self):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                whole, parts = [], []
                for answers, stops in ((whole, (12,)), (parts, (5, 8, 12))):
                    with tempfile.TemporaryDirectory() as folder:
                        answers += self.run_both("resume", folder=folder, stops=stops, exchange=exchange)
                for one, other in zip(whole + parts, parts + [whole[1], whole[0]]):
                    test_program.expect_close(one, other)

    def test_factors_in_a_checkpoint_need_nothing_of_the_servers(self):
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange):
                options = {"exchange": exchange, "factors": True, "session": f"{self.name}-{exchange}"}
                with tempfile.TemporaryDirectory() as folder:
                    whole = self.run_both("resume", folder=folder, stops=(12,), **options)
                with tempfile.TemporaryDirectory() as folder:
                    self.run_both("resume", folder=folder, stops=(5,), end=False, **options)
                    saved = {path: path.read_bytes() for path in pathlib.Path(folder).glob("checkpoint-*.pt")}
                    # The servers go on, and have later factors; other servers have none.
                    self.run_both("resume", folder=folder, stops=(8,), end=False, **options)
                    elsewhere = Server(self.program, folder)
                    try:
                        for address in (self.server.address, elsewhere.address):
                            for path, content in saved.items():
                                path.write_bytes(content)
                            resumed = self.run_both("resume", folder=folder, stops=(12,), **{**options, "address": address})
                            test_program.expect_close(resumed[0] + resumed[1], whole[0] + whole[1])
                    finally:
                        elsewhere.process.kill()

    def test_a_job_goes_on_with_another_number_of_ranks(self):
        for options in ({"method": "muon"}, {"method": "mkor", "statistics": precondor.Statistics("MEAN", inv_freq=2, warmup_steps=3)}):
            with self.subTest(**options), tempfile.TemporaryDirectory() as of_two, tempfile.TemporaryDirectory() as folder:
                options = {**options, "factors": True}
                whole = self.run_both("resume", folder=of_two, stops=(12,), **options)[0]
                mine = pathlib.Path(folder)
                self.run_both("resume", folder=folder, stops=(4,), session=f"{self.name}-a", **options)
                torch_training.train_with_checkpoints(self.server.address, f"{self.name}-b", folder, steps=8, **options)
                (mine / "checkpoint-1.pt").write_bytes((mine / "checkpoint-0.pt").read_bytes())
                for weights in self.run_both("resume", folder=folder, stops=(12,), session=f"{self.name}-c", **options):
                    test_program.expect_close(weights, whole, 1e-4)  # sums in another order, f16 statistics

    def test_distributed_checkpoints_have_factors(self):
        with tempfile.TemporaryDirectory() as folder:
            ((saved, loaded), step), (of_other, _) = self.run_both("distributed_checkpoint", folder=folder)
        self.assertEqual(step, 2)
        self.assertGreater(len(saved), 0)
        test_program.expect_close(loaded, saved)
        self.assertEqual(of_other, [[], []])

    def test_a_job_that_goes_back_is_told_on_every_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_both("resume", folder=folder, stops=(4,), end=False)
            saved = {path: path.read_bytes() for path in pathlib.Path(folder).glob("checkpoint-*.pt")}
            self.run_both("resume", folder=folder, stops=(9,), end=False)
            for path, content in saved.items():
                path.write_bytes(content)
            for answer in self.run_both("resume", folder=folder, stops=(12,)):
                self.assertIsInstance(answer, precondor.FailedPreconditionError)
                self.assertRegex(str(answer), "beyond step 4")

    def test_a_rank_whose_server_is_gone_tells_the_others(self):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(self.program, folder)
            try:
                answers = self.run_both("orphan", address=server.address, server=server.process.pid)
            finally:
                server.process.kill()
                server.process.wait()
        self.assertIsInstance(answers[0], precondor.DeadlineExceededError)
        self.assertIsInstance(answers[1], precondor.AbortedError)
        self.assertRegex(str(answers[1]), "rank 0 has no answers to pass on")

    def test_a_rank_that_has_made_fewer_steps_is_named(self):
        late, other = self.run_both("uneven")
        self.assertIsInstance(late, precondor.DeadlineExceededError)
        self.assertRegex(str(late), r"step 2 layer [01]: gradient not answered within 1s; layer [02] waits for rank 1$")
        self.assertIsNone(other)

    def test_a_rank_that_does_not_come_to_a_collective_is_named(self):
        """Rank 1 of three has made two steps, and waits elsewhere."""
        cases = ({"method": "mkor"}, {"method": None, "scale": 4.0}, {"method": "mkor", "overlap": True}, {"method": "mkor", "ends": True})
        with tempfile.TemporaryDirectory() as folder, running(folder, [{}] * 3) as self.ranks:
            for place, case in enumerate(cases):
                with self.subTest(**case):
                    where = "waits in close, all_gather_object" if case.get("ends") else "has not called it"
                    first, other, third = self.run_both("absent", session=f"{self.name}-{place}", **case)
                    for rank, (text, classes) in ((0, first), (2, third)):
                        self.assertRegex(text, f"step 2: rank {rank} waited in all_reduce.* of torch.distributed; rank 1 {where}\\. Every rank")
                        self.assertIn("RuntimeError", classes)
                        if not case.get("overlap"):  # DDP makes an error of its own
                            self.assertTrue({"DeadlineExceededError", "AbortedError"}.intersection(classes), classes)
                    if not case.get("ends"):
                        self.assertIsNone(other)
                        continue
                    self.assertRegex(other[0], "close: rank 1 waited in all_gather_object of torch.distributed; "
                                               "rank 0 waits in step 2, all_reduce, rank 2 waits in step 2, all_reduce\\.")

    def test_ranks_without_room_for_input_factors_go_on_together(self):
        def answers(limit, freed):
            with tempfile.TemporaryDirectory() as folder:
                server = Server(self.program, folder, f"--memory-limit={limit}")
                try:
                    return self.run_both("without_room", address=server.address, freed=freed)
                finally:
                    server.stop()

        needed = int(re.search(r"needed (\d+) bytes", str(answers("8MiB", False)[1]))[1])
        for limit, freed in ((needed - 1, False), (needed, True)):
            with self.subTest(freed=freed):
                one, other = answers(limit, freed)
                self.assertRegex(one[0], "1 +muon +hidden")
                self.assertEqual(one[0], other[0])
                self.assertRegex("".join(one[1]), "goes on without input factors")
                self.assertEqual(other[1], [], "rank 0 has said it")
                test_program.expect_close(one[2], other[2])

    def test_factors_that_are_not_the_same_end_the_job_on_every_rank(self):
        same = [1 << 63, 5, (1 << 64) - 1]
        for place, own in ((None, same), (0, [(1 << 63) + 4, 5, same[2]]), (2, [*same[:2], 0])):
            answers = self.run_both("agree", checksums=[same, own], steps=6)
            for answer in answers:
                if place is None:
                    self.assertIsNone(answer)
                    continue
                self.assertIsInstance(answer, precondor.DataLossError)
                # Every second step has its turn, and a third of the layers.
                self.assertRegex(str(answer), f"layer {place}: step {2 * place}: the ranks' factors are no longer the same")
        failed, other = self.run_both("agree", checksums=[same, same], steps=1, failed=0)
        self.assertIsNone(failed, "it raises what has failed")
        self.assertIsInstance(other, precondor.AbortedError)
        self.assertRegex(str(other), "another rank has failed")

    @unittest.skipUnless("avx2" in pathlib.Path("/proc/cpuinfo").read_text(), "needs a processor that can pass for an older one")
    def test_ranks_whose_processors_round_otherwise_end(self):
        older = {"OPENBLAS_CORETYPE": "Nehalem", "ONEDNN_MAX_CPU_ISA": "SSE41"}
        with tempfile.TemporaryDirectory() as folder, running(folder, [{}, older]) as self.ranks:
            for exchange in ("REPLAY", "PULL_FACTORS"):
                answers = self.run_both("steps", exchange=exchange, session=f"{self.name}-{exchange}", count=20)
                if exchange == "PULL_FACTORS":  # whose factors are the shard's bytes
                    self.assertEqual(answers, [20, 20])
                    continue
                for answer in answers:
                    self.assertIsInstance(answer, precondor.DataLossError)
                    self.assertRegex(str(answer), "layer [02]: step .*several kinds of processors.*DELEGATE")

    def test_models_that_differ_between_ranks(self):
        for answer in self.run_both("differ"):
            self.assertIsInstance(answer, precondor.FailedPreconditionError)
            self.assertEqual(answer.reason, "SPEC_MISMATCH")
            self.assertRegex(str(answer), "d_in|d_out|layer")

    def test_options_that_want_the_ranks_own_gradients(self):
        for options in ({"exchange": "DELEGATE"}, {"exchange": "REPLAY"}, {"ddp": True}):
            for answer in self.run_both("train", case="mlp", overlap=True, **options):
                self.assertIsInstance(answer, precondor.InvalidArgumentError)
                self.assertRegex(str(answer), "overlap: expected exchange DIRECT.*got (DELEGATE|REPLAY)")


if __name__ == "__main__":
    RanksTest.program = test_program.parse("--server").server

    def begin(server):
        RanksTest.server = server

    @contextlib.contextmanager
    def around(folder):
        with running(folder, [{}, {}]) as RanksTest.ranks:
            yield

    test_program.run_with_server(RanksTest.program, begin, around)
