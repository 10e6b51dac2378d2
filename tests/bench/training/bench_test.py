#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The training benchmark's own arithmetic: tuning, resuming, tables, and that its peers compute what the servers compute."""

import math
import pathlib
import sys
import tempfile
import time
import unittest
import unittest.mock

import numpy
import torch
from torch import nn

import bench
import peers
import tasks
from precondor import Client, Layer, SessionSpec
from precondor.server import LocalServer
from precondor.torch import Preconditioner


def small_task():
    """Least squares, 20 steps."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    y = x @ torch.linspace(-1, 1, 24).view(6, 4)
    return tasks.Task(20, lambda: nn.Linear(6, 4), lambda step, seed: (x, y),
                      lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
                      lambda model: (model(x) - y).square().mean())


class BenchTest(unittest.TestCase):
    def test_rows_are_made_once_and_told_in_a_table(self):
        tasks.TASKS["small"], tasks.RATES["small"] = small_task, 0.01
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.json"
            for train in (bench.train, None):  # the second time nothing is trained
                rows = bench.Rows(path)
                with unittest.mock.patch.object(bench, "train", train):
                    for method in ("AdamW", "default"):
                        rate = bench.tune(rows, "small", method)
                        rows.final(task="small", method=method, rate=rate, seed=2)
                made = len(rows.rows)
            self.assertEqual(len(bench.Rows(path).rows), made)
            header, _, first, second = bench.table(rows, "small")
            self.assertTrue(first.startswith("| AdamW |") and second.startswith("| default |"))
            self.assertEqual(header.count("|"), second.count("|"))

    def test_the_best_rate_is_looked_for_beyond_an_edge(self):
        class Losses:
            def __init__(self):
                self.rates = []

            def final(self, rate, **unused):
                self.rates.append(rate)
                return abs(rate - 0.04)

        tasks.RATES["small"] = 0.02
        losses = Losses()
        self.assertEqual(bench.tune(losses, "small", "AdamW"), 0.04)  # whose middle is half of it
        self.assertEqual(losses.rates, [0.01, 0.005, 0.02, 0.04, 0.08])

    def test_steps_to_a_loss(self):
        self.assertEqual(bench.steps_to(2.5, [4.0, 3.0, 2.0]), 25)
        self.assertEqual(bench.steps_to(4.5, [4.0, 3.0]), 10)
        self.assertEqual(bench.steps_to(1.0, [4.0, 3.0]), math.inf)

    def test_processor_seconds_until_a_step(self):
        self.assertEqual([bench.seconds_at(step, [2.0, 3.0]) for step in (5, 10, 15, 20)], [1.0, 2.0, 2.5, 3.0])

    def test_a_servers_seconds_count(self):
        with LocalServer() as server:
            before, own = bench.processor_seconds(), time.process_time()
            with Client(server.address) as client, client.open_session(SessionSpec("s", [Layer("w", 64, 64)], "muon")).join() as worker:
                for step in range(60):
                    worker.precondition(step, 0, numpy.ones((64, 64), numpy.float32), 1).result()
            self.assertGreater(bench.processor_seconds() - before, time.process_time() - own)

    def test_lambs_first_step_is_as_long_as_the_weights(self):
        weight = nn.Parameter(torch.tensor([[3.0, -1.0], [2.0, 0.5]]))
        weight.grad = torch.tensor([[0.1, 5.0], [-2.0, 1e-2]])
        wanted = weight.detach() - 0.01 * weight.detach().norm() * weight.grad.sign() / 2
        peers.Lamb([weight], 0.01).step()
        torch.testing.assert_close(weight.detach(), wanted, rtol=1e-4, atol=0)

    def test_the_default_trains_recurrent_models_no_worse_than_adamw(self):
        task = tasks.char_lstm(120)
        for seed in (1, 2):
            losses = {method: min(bench.train(task, method, rate, seed)[0][-1] for rate in (0.016, 0.032)) for method in ("AdamW", "default")}
            self.assertLess(losses["default"], 1.02 * losses["AdamW"], (seed, losses))

    def test_peers_move_weights_as_the_servers_methods_do(self):
        for method, make in (("soap", peers.Soap), ("muon", peers.Muon)):
            torch.manual_seed(2)
            one, other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            other.load_state_dict(one.state_dict())
            with Preconditioner(one, "local", method=method) as pre:
                ours, published = pre.make_optimizer(0.01), make(other.parameters(), 0.01)
                for _ in range(25):
                    one.weight.grad = torch.randn(one.weight.shape)
                    other.weight.grad = one.weight.grad.clone()
                    pre.step(1.0)
                    ours.step()
                    published.step()
            torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main(argv=[sys.argv[0], "-v"])
