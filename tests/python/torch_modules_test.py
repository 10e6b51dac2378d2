#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch where modules are called in uncommon ways: checkpoints, autocast, calls that raise or have no rows."""

import contextlib
import copy
import itertools
import os
import signal
import warnings
import weakref

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import precondor
import torch_case
from interop_test import TIMEOUT_S

REPLACE = precondor.ClientOptions(replace=True)


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
        pre = self.preconditioner(model, **{"client": REPLACE, **options})
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
                options = {"statistics": precondor.Statistics(statistics), "method": method,
                           "client": precondor.ClientOptions(result_timeout=10.0, replace=True)}
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
        with self.assertWarnsRegex(UserWarning, "a second backward pass through one call"):
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
                    self.gradients(model, lambda model, pre, how=how: run(*how, model), statistics=precondor.Statistics(statistics), method=method)
                    for how in ((True, False), (True, True), (False, False)))
                self.expect_equal(inside, outside)
                for got, wanted in zip(outside, plain):  # some ten roundings of 2^-9
                    self.assertLess((got - wanted).norm(), 0.05 * wanted.norm())

    def expect_warning(self, pattern, model, *backwards):
        """Expects one warning of a step for each of the backward passes. Returns the decisions of the last."""
        with warnings.catch_warnings(record=True, action="always") as caught:
            pre = self.preconditioner(model, client=REPLACE)
            for backward in backwards:
                model.zero_grad()
                backward()
                decisions = pre.step(1.0).decisions
        pre.close(end_session=True)  # its report has to be answered before the next one replaces the session
        self.assertEqual(len(caught), 1, [str(one.message) for one in caught])
        self.assertRegex(str(caught[0].message), pattern)
        return decisions

    def test_inputs_that_are_written_over(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x, in_place):
                h = self.first(x).float()
                branch = self.second(h)
                if in_place:  # autograd has a copy of h in bf16
                    h += branch
                else:
                    h = h + branch
                return h

        def backward(model, in_place):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.ones(5, 4), in_place)
            y.square().mean().backward()

        model = Residual()
        got, wanted = (self.gradients(model, lambda model, pre, in_place=in_place: backward(model, in_place))
                       for in_place in (True, False))
        self.expect_equal(got, wanted)

        class Copying(nn.Linear):
            def forward(self, x):
                return super().forward(x.clone())

        layer = Copying(4, 3)

        def write_over():
            x = torch.randn(5, 4)
            y = layer(x).square().mean()
            x.zero_()
            y.backward()

        self.assertEqual(self.expect_warning("layer Copying: the input of its module was written over", layer, write_over,
                                             write_over), {"Copying": "IDENTITY"})

    def test_modules_that_do_something_else(self):
        class Same(nn.Conv2d):
            def forward(self, x):
                return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

        class Pooled(nn.Linear):
            def forward(self, x):
                return super().forward(x).mean(0)

        for module, shape in ((Same(2, 4, 3), (2, 2, 8, 8)), (Same(2, 4, 3), (2, 2, 2, 2)), (Pooled(4, 3), (5, 4))):
            name = type(module).__name__
            with self.subTest(module=name, shape=shape):
                decisions = self.expect_warning(
                    f"layer {name}: its module made .* which is not its product", module,
                    *[lambda module=module, shape=shape: module(torch.randn(*shape)).square().mean().backward()] * 2)
                self.assertEqual(decisions, {name: "IDENTITY"})

    def test_inputs_by_keyword_are_not_seen(self):
        layer = nn.Linear(4, 3)
        decisions = self.expect_warning("called with keywords alone", layer,
                                        *[lambda: layer(input=torch.randn(5, 4)).sum().backward()] * 2)
        self.assertEqual(decisions, {"Linear": "IDENTITY"})

    def test_parameters_that_are_replaced(self):
        def assign(model):
            model[1].weight = nn.Parameter(torch.randn(3, 4))

        def assign_bias(model):
            model[1].bias = nn.Parameter(torch.randn(3))

        def change_module(model):
            model[1] = nn.Linear(4, 3)

        def load(model):
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

        def convert(model):
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            self.addCleanup(torch.__future__.set_overwrite_module_params_on_conversion, False)
            model[1].to(torch.float64)

        for steps, replace in itertools.product((0, 1), (assign, assign_bias, change_module, convert, load)):
            with self.subTest(replace=replace.__name__, steps=steps):
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
                pre = self.preconditioner(model, f"{replace.__name__}-{steps}")
                for _ in range(steps):
                    model(torch.randn(5, 4)).sum().backward()
                    self.assertEqual(pre.step(1.0).decisions, {"0": "PRECONDITIONED", "1": "PRECONDITIONED"})
                replace(model)
                self.expect(precondor.FailedPreconditionError, "layer [01]: a parameter of it is no longer the model's.*assign=True",
                            pre.step, 1.0)

    def test_a_weight_that_is_changed_in_place_stays_a_layer(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pre = self.preconditioner(model)
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        model.to(torch.float64)
        model(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
        self.assertEqual(pre.step(1.0).decisions, {"0": "PRECONDITIONED", "1": "PRECONDITIONED"})

    def test_calls_under_torch_func_give_no_statistics(self):
        x, y = torch.randn(5, 4), torch.randn(5, 3)

        def loss_of(model, weights):
            return (functional_call(model, weights, (x,)) - y).square().mean()

        def other_weights(model):  # of one module alone, and of all
            return {name: value.detach().clone() * 2 for name, value in model.named_parameters() if name.startswith(model.replaced)}

        def backward(model):
            weights = {name: value.requires_grad_() for name, value in other_weights(model).items()}
            names = list(weights)
            for name, gradient in zip(names, torch.autograd.grad(loss_of(model, weights), [weights[name] for name in names])):
                model.get_parameter(name).grad = gradient

        def transformed(model):
            for name, gradient in torch.func.grad(lambda weights: loss_of(model, weights))(other_weights(model)).items():
                model.get_parameter(name).grad = gradient

        def each_sample(model):
            weights, of_one = dict(model.named_parameters()), lambda weights, x, y: (functional_call(model, weights, (x,)) - y).square().mean()
            of_all = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))({name: value.detach() for name, value in weights.items()}, x, y)
            for name, gradient in of_all.items():
                weights[name].grad = gradient.mean(0)

        def batched(model):
            output = model(x)
            torch.autograd.grad(output, list(model.parameters()), torch.stack([torch.ones_like(output)] * 2), is_grads_batched=True)
            model(x).sum().backward()

        for how, replaced in ((backward, ""), (backward, "1"), (transformed, ""), (transformed, "1"), (each_sample, ""), (batched, "")):
            for method in ("mkor", None):
                with self.subTest(how=how.__name__, replaced=replaced, method=method):
                    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
                    model.replaced = replaced
                    pre = self.preconditioner(model, f"{self.name}-{how.__name__}-{replaced}-{method}", method=method)
                    optimizer = pre.make_optimizer(0.1)
                    for step in range(3):
                        optimizer.zero_grad(set_to_none=True)
                        with warnings.catch_warnings(record=True, action="always") as caught:
                            how(model) if step < 2 else model(x).sum().backward()
                            gradient = model[1].weight.grad.clone()
                            decisions = pre.step(1.0).decisions
                        told = [str(one.message) for one in caught if "torch.func" in str(one.message)]
                        self.assertEqual((len(told), len(caught)), (1, 1) if step == 0 and method else (0, 0), [str(one.message) for one in caught])
                        if how is batched or step == 2 or method is None:
                            self.assertEqual(decisions["1"], "PRECONDITIONED")
                        else:
                            self.assertEqual(decisions["1"], "IDENTITY")
                            self.assertTrue(torch.equal(gradient, model[1].weight.grad))
                        optimizer.step()

    def test_hooks_of_others_come_later(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[1].register_forward_hook(lambda module, inputs, output: 10 * output)
        pre = self.preconditioner(model)
        seen = []
        pre._on_backward = lambda step, slots, x, grad, around: seen.append(grad)
        model(torch.randn(5, 4)).sum().backward()
        torch.testing.assert_close(seen[0], torch.full((5, 3), 10.0))

    def test_passes_that_are_not_the_steps(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        x, given_up, penalized = (torch.randn(n, 4, requires_grad=True) for n in (5, 7, 3))

        def with_others(model, pre):
            model(given_up).sum().backward()
            model.zero_grad(set_to_none=True)
            pre.discard()
            with pre.unwatched():
                torch.autograd.grad(model(penalized).sum(), penalized)
            loss = model(x).square().mean()
            with pre.unwatched():
                torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()

        self.expect_equal(self.gradients(model, with_others),
                          self.gradients(model, lambda model, pre: model(x).square().mean().backward()))
        pre = self.preconditioner(model, overlap=True)
        model(x).sum().backward()
        self.expect(precondor.FailedPreconditionError, "discard: gradients of step 0 have left", pre.discard)

    def test_closed_between_forward_and_backward(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pre = self.preconditioner(model)
        loss = model(torch.randn(5, 4)).sum()
        pre.close()
        loss.backward()
        self.assertIsNotNone(model[0].weight.grad)

    # --- the process ------------------------------------------------------------------------------------------------------

    def test_other_defaults_of_torch(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        x = torch.randn(5, 4)
        for statistics, method in (("SIGNED", "mkor"), ("MEAN", "eva"), ("COVARIANCE", "kfac")):
            with self.subTest(statistics=statistics):
                options = {"statistics": precondor.Statistics(statistics), "method": method}
                wanted = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                torch.set_default_dtype(torch.float64)
                try:
                    got = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                finally:
                    torch.set_default_dtype(torch.float32)
                self.expect_equal(got, wanted)
                torch.set_default_device("meta")
                try:
                    got = self.gradients(model, lambda model, pre: model(x).sum().backward(), **options)
                finally:
                    torch.set_default_device("cpu")
                self.expect_equal(got, wanted)

    def test_a_forked_child_is_told(self):
        for method in ("mkor", "muon"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
            pre = self.preconditioner(model, method, method=method)
            pre.make_optimizer(0.1)
            passes = [lambda: model(torch.ones(2, 4))] if method == "mkor" else []  # muon takes no statistics
            for call in (lambda: pre.step(1.0), *passes):
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
    torch_case.main()
