#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch of compiled models: the statistics and the training of the model as it is, in one graph."""

import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import precondor
import precondor.torch
import test_program
import torch_case
from interop_test import Server
from precondor.server import path_of
from precondor.torch._exchange import Pair


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu_(self.up(x)))  # in place of the layer's output


class Net(nn.Module):
    """A convolution, blocks of one class, and a layer that is called twice."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.blocks = nn.ModuleList([Block() for _ in range(10)])  # more than dynamo would compile again for
        self.head = nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.conv(x[:, None]).sum(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(torch.tanh(self.head(x)))


def batch(step, part=0):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + part))


class Graphs:
    """A backend that keeps what it compiles."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
        return aot_eager(graph, inputs)


class Attention(nn.Module):
    """With projections that are not seen in compiled code."""

    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.attention(x, x, x, need_weights=False)[0])


# Compiled code that was made before Preconditioner, which is there before torch imports its compiler.
LATE_IMPORT = """
import sys
import torch
import precondor.torch
model = torch.nn.Linear(3, 2)
pre = precondor.torch.Preconditioner(model, sys.argv[1], session=sys.argv[2], method="mkor")
assert "torch._dynamo" not in sys.modules
model(torch.ones(4, 3)).sum().backward()
pre.step(1.0)
import torch._dynamo
teacher = torch.compile(torch.nn.Linear(3, 2), backend="eager")
model(torch.ones(4, 3)).sum().backward()
pre.step(1.0)
teacher(torch.ones(4, 3))
torch.compile(model, backend="eager")(torch.ones(4, 3)).sum().backward()
assert pre._pairs, "no statistics"
pre.close(end_session=True)
"""


class CompileTest(torch_case.ServerCase):
    def setUp(self):
        super().setUp()
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()

    def tearDown(self):
        self.assertEqual(dict(torch._dynamo.utils.counters["graph_break"]), {})

    def compiled(self, how, model, backend="aot_eager"):
        if how == "whole":
            return torch.compile(model, fullgraph=True, backend=backend)
        if how == "regional":
            for block in model.blocks:
                block.compile(fullgraph=True, backend=backend)
        return model

    def train(self, how, model=None, steps=5, backend="aot_eager", micro_batches=2, kind="", **options):
        """(weights, every statistic that is sent)"""
        model = Net() if model is None else model
        called = self.compiled(how, model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sent, finish = [], Pair.finish

        def keep(pair, loss_scale):
            sent.append(finish(pair, loss_scale))
            return sent[-1]

        pre = self.preconditioner(called, f"{self.name}-{how}", optimizer=optimizer, client=precondor.ClientOptions(replace=True),
                                  statistics=precondor.Statistics(kind, inv_freq=3, warmup_steps=2), **options)
        if how.endswith("-later"):
            called = self.compiled(how[:-len("-later")], model, backend)
        with unittest.mock.patch.object(Pair, "finish", keep):
            for step in range(steps):
                optimizer.zero_grad()
                for part in range(micro_batches):
                    loss = called(batch(step, part)).square().mean() / micro_batches
                    loss.backward()
                self.assertEqual(set(pre.step(loss).decisions.values()), {"PRECONDITIONED"})
                optimizer.step()
        self.assertEqual([layer.name for layer in pre.layers][:2], ["conv", "blocks.0.up"])
        pre.close(end_session=True)
        return [parameter.detach().numpy() for parameter in model.parameters()], sent

    def expect_same(self, got, wanted, tolerance):
        self.assertEqual(len(got[1]), len(wanted[1]))
        for one, other in zip(got[1], wanted[1]):
            self.assertEqual(one[2], other[2])
            for side in (0, 1):
                np.testing.assert_allclose(one[side], other[side], rtol=0, atol=tolerance * max(1, np.abs(other[side]).max()))
        test_program.expect_close(got[0], wanted[0], tolerance)

    def test_training_is_that_of_the_model_as_it_is(self):
        for statistics, method in (("SIGNED", "mkor"), ("MEAN", "eva"), ("COVARIANCE", "kfac")):
            wanted = self.train("plain", kind=statistics, method=method)
            for how in ("whole", "regional"):
                with self.subTest(how=how, statistics=statistics):
                    self.expect_same(self.train(how, kind=statistics, method=method), wanted, 2e-6)
        wanted = self.train("plain")
        for how in ("whole-later", "regional-later"):
            with self.subTest(how=how):
                self.expect_same(self.train(how), wanted, 2e-6)
        with self.subTest("checkpointed"):
            self.expect_same(self.train("whole", Net(checkpointed=True)), wanted, 2e-6)

    @unittest.skipUnless(shutil.which("g++"), "inductor needs a compiler")
    def test_inductor(self):
        wanted = self.train("plain", steps=3)
        self.expect_same(self.train("regional", steps=3, backend="inductor"), wanted, 2e-5)  # it orders sums otherwise

    def test_other_steps_have_the_graph_of_the_model_alone(self):
        graphs, plain = Graphs(), Graphs()
        torch.compile(Net(), fullgraph=True, backend=plain)(batch(0))
        self.train("whole", backend=graphs, steps=8)
        self.assertEqual(len(graphs.graphs), 2)
        self.assertEqual(graphs.graphs[1], plain.graphs[0])
        self.assertGreater(len(graphs.graphs[0]), len(plain.graphs[0]))

    def test_blocks_of_one_class_share_their_graphs(self):
        graphs = Graphs()
        self.train("regional", backend=graphs, steps=8)
        self.assertEqual(len(graphs.graphs), 2)

    def test_graphs_from_before_are_made_anew(self):
        wanted = self.train("plain")
        for first in (True, False):
            with self.subTest(first_preconditioner_of_the_process=first):
                torch._dynamo.config.skip_nnmodule_hook_guards = first
                model = Net()
                model.compile(fullgraph=True, backend="aot_eager")
                model(batch(0)).sum().backward()
                self.expect_same(self.train("compiled", model), wanted, 2e-6)
                self.assertFalse(torch._dynamo.config.skip_nnmodule_hook_guards)

    def test_without_statistics_nothing_is_watched_and_graphs_stay(self):
        self.addCleanup(setattr, torch._dynamo.config, "skip_nnmodule_hook_guards", torch._dynamo.config.skip_nnmodule_hook_guards)
        torch._dynamo.config.skip_nnmodule_hook_guards = True
        graphs, model = Graphs(), Net()
        model.compile(fullgraph=True, backend=graphs)
        model(batch(0)).sum().backward()
        pre = self.preconditioner(model, method=None)
        pre.make_optimizer(0.01)
        model(batch(0)).sum().backward()
        self.assertEqual(set(pre.step(1.0).decisions.values()), {"PRECONDITIONED"})
        self.assertEqual(len(graphs.graphs), 1)
        self.assertTrue(torch._dynamo.config.skip_nnmodule_hook_guards)
        self.assertFalse([module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks])

    def test_copies_and_closed_models_are_not_watched(self):
        model = Net()
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        pre = self.preconditioner(called)
        teacher = torch.compile(Net(), fullgraph=True, backend="aot_eager")  # of its class, without hooks
        teacher(batch(0)).sum().backward()
        with pre.unwatched():
            called(batch(0)).sum().backward()
        self.assertEqual(pre._pairs, {})
        called(batch(0)).sum().backward()
        self.assertEqual(len(pre._pairs), len(pre.layers))
        pre.close()
        pre._pairs.clear()
        called(batch(0)).sum().backward()
        self.assertEqual(pre._pairs, {})

    def test_a_model_that_is_compiled_later(self):
        """Preconditioner knows the model alone, and not what has been made of it."""
        model = Attention()
        pre = self.preconditioner(model)
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(5, 2, 8)).sum().backward()
        self.expect(precondor.FailedPreconditionError, r"layer attention\.\w+: it has a gradient, but step 0", pre.step, 1.0)

    def test_a_compiler_that_is_imported_later(self):
        subprocess.run([sys.executable, "-B", "-c", LATE_IMPORT, self.server.address, self.name], check=True)

    def test_a_second_preconditioner_keeps_what_is_compiled(self):
        self.preconditioner(nn.Linear(3, 2))
        graphs = Graphs()
        called = torch.compile(nn.Linear(3, 2), fullgraph=True, backend=graphs)
        called(torch.ones(4, 3))
        self.preconditioner(nn.Linear(3, 2), f"{self.name}-2")
        called(torch.ones(4, 3))
        self.assertEqual(len(graphs.graphs), 1)

    def test_second_order_that_comes_back(self):
        """The step's graph is chosen by its own directive, not by one that is older."""
        model = nn.Linear(3, 2)
        called = torch.compile(model, fullgraph=True, backend="aot_eager")

        def train_until(pre, mode):
            for _ in range(40):
                if pre.mode == mode:
                    return
                called(torch.ones(4, 3)).sum().backward()
                pre.step(1.0)
            self.fail(f"the mode does not become {mode}")

        with tempfile.TemporaryDirectory() as folder:
            server = Server(path_of("precondor-server"), folder, "--lease-steps=1")
            try:
                pre = precondor.torch.Preconditioner(called, server.address, session="modes", method="mkor",
                                                     statistics=precondor.Statistics(inv_freq=1))
                for mode in ("first-order", "second-order") * 3:
                    subprocess.run([path_of("precondorctl"), f"--server={server.address}", "mode", "modes", mode],
                                   check=True, stdout=subprocess.DEVNULL)
                    train_until(pre, mode.replace("-", "_").upper())
                pre.close(end_session=True)
            finally:
                self.assertEqual(server.stop(), 0)

    def test_a_layer_that_was_not_seen_is_an_error(self):
        model = Attention()
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        pre = self.preconditioner(called)
        called(torch.randn(5, 2, 8)).sum().backward()
        self.expect(precondor.FailedPreconditionError,
                    r"layer attention\.\w+: it has a gradient, but step 0, which takes statistics, saw no call of it",
                    pre.step, 1.0)
        pre.close()
        model.zero_grad()
        pre = self.preconditioner(called, f"{self.name}-skip", skip=["attention.*"])
        called(torch.randn(5, 2, 8)).sum().backward()
        self.assertEqual(pre.step(1.0).decisions, {"last": "PRECONDITIONED"})


if __name__ == "__main__":
    torch_case.main()
