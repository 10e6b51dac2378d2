#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch where modules are called in uncommon ways: checkpoints, autocast, calls that raise or have no rows.

Skips with 77, and says so, where torch is not installed.
"""

import contextlib
import copy
import os
import signal
import weakref

import torch_case  # before torch: it skips where there is none
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import precondor
from interop_test import TIMEOUT_S


class Attentions(nn.Module):
    """Two, called in another order than they are defined in, each in a checkpoint if one is wanted."""

    def __init__(self):
        super().__init__()
        self.second = nn.MultiheadAttention(8, 2)
        self.first = nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x, **options):
        for attention in (self.first, self.second):
            def call(h, attention=attention):
                return attention(h, h, h, need_weights=False)[0]

            x = x + (checkpoint(call, x, **options) if options else call(x))
        return self.last(x)


class ModulesTest(torch_case.ServerCase):

    def gradients(self, model, backward, **options):
        """After a step of a copy of the model, whose first step's backward passes `backward` makes."""
        model = copy.deepcopy(model)
        pre = self.preconditioner(model, replace=True, **options)
        backward(model, pre)
        pre.step(1.0, learning_rate=0.1)
        pre.close(end_session=True)
        return [parameter.grad for parameter in model.parameters()]

    def expect_equal(self, got, wanted):
        for one, other in zip(got, wanted):
            self.assertTrue(torch.equal(one, other))

    # --- attention and checkpoints --------------------------------------------------------------------------------------

    def expect_linear_as_it_was(self):
        self.assertIs(nn.functional.linear, torch._C._nn.linear)
        nn.Linear(3, 3)(torch.ones(2, 3))

    def test_checkpoints_change_nothing(self):
        x = torch.randn(3, 2, 8, requires_grad=True)
        model = Attentions()
        wanted = self.gradients(model, lambda model, pre: model(x).square().mean().backward())
        for reentrant in (False, True):
            with self.subTest(reentrant=reentrant):
                got = self.gradients(model, lambda model, pre, reentrant=reentrant:
                                     model(x, use_reentrant=reentrant).square().mean().backward())
                self.expect_equal(got, wanted)
                self.expect_linear_as_it_was()

    def test_attentions_that_raise_leave_nothing_behind(self):
        attentions = nn.ModuleList([nn.MultiheadAttention(6, 2), nn.MultiheadAttention(6, 2)])
        x, bad = torch.randn(5, 2, 6), torch.randn(5, 2, 7)
        pre = self.preconditioner(attentions)
        for _ in range(2):
            for attention in attentions:
                with self.assertRaises(Exception):
                    attention(x, bad, x)
        output = x
        for attention in attentions:
            output = attention(output, output, output)[0]
        self.expect_linear_as_it_was()
        output.sum().backward()
        self.assertEqual(set(pre.step(1.0).decisions.values()), {"PRECONDITIONED"})
        for attention in attentions:
            with self.assertRaises(Exception):
                attention(x, bad, x)
        pre.close()
        self.expect_linear_as_it_was()

    # --- calls ------------------------------------------------------------------------------------------------------------

    def test_calls_without_rows_do_not_count(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        x = torch.randn(5, 4)
        for statistics, method in (("SIGNED", "mkor"), ("MEAN", "eva"), ("COVARIANCE", "kfac")):
            with self.subTest(statistics=statistics):
                options = {"statistics": statistics, "method": method, "result_timeout": 10.0}
                wanted = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                got = self.gradients(model, lambda model, pre: (model(x).sum() + model(x[:0]).sum()).backward(), **options)
                self.expect_equal(got, wanted)
                for gradient in self.gradients(model, lambda model, pre: model(x[:0]).sum().backward(), **options):
                    self.assertEqual(gradient.count_nonzero(), 0)

    def test_inputs_go_with_autograds(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pre = self.preconditioner(model)
        kept = []
        watch = pre._on_backward

        def on_backward(step, slots, x, grad, around):
            kept.append(weakref.ref(x))
            watch(step, slots, x, grad, around)

        pre._on_backward = on_backward
        loss = model(torch.randn(5, 4)).sum()
        loss.backward(retain_graph=True)
        self.assertEqual([one() for one in kept], [None, None])
        loss.backward()
        self.assertEqual(len(kept), 2)  # a call counts once

    def test_autocast_changes_statistics_by_its_rounding_alone(self):
        model = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(1, 2, 3, padding=1))
        x = torch.randn(5, 16)

        def run(cast, backward_too, model):
            with contextlib.ExitStack() as stack:
                if cast:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                loss = model[1](model[0](x)[:, None]).float().square().mean()
                if not backward_too:
                    stack.close()
                loss.backward()

        for statistics, method in (("SIGNED", "mkor"), ("COVARIANCE", "kfac")):
            with self.subTest(statistics=statistics):
                outside, inside, plain = (
                    self.gradients(model, lambda model, pre, how=how: run(*how, model), statistics=statistics, method=method)
                    for how in ((True, False), (True, True), (False, False)))
                self.expect_equal(inside, outside)
                for got, wanted in zip(outside, plain):  # some ten roundings of 2^-9
                    self.assertLess((got - wanted).norm(), 0.05 * wanted.norm())

    # --- the process ------------------------------------------------------------------------------------------------------

    def test_other_defaults_of_torch(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        x = torch.randn(5, 4)
        for statistics, method in (("SIGNED", "mkor"), ("MEAN", "eva"), ("COVARIANCE", "kfac")):
            with self.subTest(statistics=statistics):
                options = {"statistics": statistics, "method": method}
                wanted = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                torch.set_default_dtype(torch.float64)
                try:
                    got = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                finally:
                    torch.set_default_dtype(torch.float32)
                self.expect_equal(got, wanted)
                if hasattr(torch, "set_default_device"):
                    torch.set_default_device("meta")
                    try:
                        got = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                    finally:
                        torch.set_default_device("cpu")
                    self.expect_equal(got, wanted)

    def test_a_forked_child_is_told(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pre = self.preconditioner(model)
        for call in (lambda: pre.step(1.0), lambda: model(torch.ones(2, 4))):
            model(torch.randn(5, 4)).sum().backward()
            pre.step(1.0)
            child = os.fork()
            if child == 0:
                signal.alarm(TIMEOUT_S)  # of one that waits
                try:
                    call()
                except precondor.ForkError:
                    os._exit(0)
                finally:
                    os._exit(1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)


if __name__ == "__main__":
    torch_case.main(__doc__)
