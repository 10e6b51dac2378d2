#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch against a server of its own: the trajectory of the formulas, layers, statistics and errors.

Several ranks are torch_ranks_test.py's, uncommon ways to call modules torch_modules_test.py's.
"""

import contextlib
import copy
import importlib
import itertools
import json
import re
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np
import torch
from torch import nn

import precondor
import precondor.torch
import test_program
import torch_case
import torch_reference
from interop_test import ROOT, TIMEOUT_S
from precondor.torch import _checkpoint
from precondor.torch._group import Group
from precondor.torch._statistics import Covariance, Vectors
import torch_training
from torch_training import train

# f32 beside f64: some ten roundings of 6e-8 a step on numbers near 1, and J's condition is at most 1 + d (mkor) or a few
# hundred (kfac), for ten steps.
TOLERANCE = 5e-5


def one_step(model, pre, optimizer, *shape):
    """All of a step but the optimizer's."""
    optimizer.zero_grad()
    loss = model(torch.randn(*shape)).square().mean()
    loss.backward()
    return pre.step(loss)


def changed(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Rows:
    """In the place of the statistics of a layer: its rows."""

    def __init__(self):
        self.rows = []

    def add(self, a, g, samples):
        self.rows.append((a, g))


class TorchTest(torch_case.ServerCase):
    def test_security_is_the_clients(self):
        with self.assertRaisesRegex(precondor.NotFoundError, "cannot read /nothing"):
            precondor.torch.Preconditioner(nn.Linear(3, 2), self.server.address, session="s",
                                           client=precondor.ClientOptions(security=precondor.Security(tls_ca="/nothing")))

    # --- training -----------------------------------------------------------------------------------------------------

    def test_trajectory_is_that_of_the_formulas(self):
        for name, case in torch_reference.CASES.items():
            with self.subTest(case=name):
                losses, weights = torch_reference.train(case)
                self.assertLess(min(losses[1:]), losses[0])
                for overlap in (False, True):
                    got_losses, got, results, _ = train(self.server.address, f"{self.name}-{name}", name, overlap=overlap)
                    test_program.expect_close([got_losses], [losses], TOLERANCE)
                    test_program.expect_close(got, weights, TOLERANCE)
                    self.assertEqual({d for result in results for d in result.decisions.values()}, {"PRECONDITIONED"})
                    if case.method == "kfac":
                        self.assertLess(min(result.scale for result in results), 1)

    def test_micro_batches_are_one_batch(self):
        for case in ("conv", "kfac", "tokens"):
            for overlap in (False, True):
                with self.subTest(case=case, overlap=overlap):
                    whole = train(self.server.address, f"{self.name}-1", case, micro_batches=1, overlap=overlap)
                    parts = train(self.server.address, f"{self.name}-4", case, micro_batches=4, overlap=overlap)
                    test_program.expect_close(parts[1], whole[1], 2e-5)

    def test_sketches_of_micro_batches_are_one_batchs(self):
        """SIGNED, the default, has the signs of the rows' places in the whole batch."""
        options = {"statistics": torch_training.statistics("SIGNED", sketches=3), "seed": 9}
        whole = train(self.server.address, f"{self.name}-1", "conv", micro_batches=1, **options)
        parts = train(self.server.address, f"{self.name}-4", "conv", micro_batches=4, **options)
        test_program.expect_close(parts[1], whole[1], 2e-5)

    def test_loss_scales_change_nothing_and_an_overflow_skips_a_step(self):
        case = torch_reference.CASES["kfac"]
        for overflow in ((), ((0, 3), (0, 5))):
            _, weights = torch_reference.train(case, skipped=[step for _, step in overflow])
            for unscale in (False, True):
                with self.subTest(overflow=overflow, unscale=unscale):
                    _, got, results, scale = train(self.server.address, self.name, "kfac", scaler=1024.0, unscale=unscale,
                                                   overflow=overflow, micro_batches=2)
                    test_program.expect_close(got, weights, TOLERANCE)
                    self.assertEqual([result.step for result in results if result.skipped], [step for _, step in overflow])
                    self.assertEqual(scale, 1024.0 / 2**len(overflow))

    def test_statistics_are_the_clients(self):
        layers = [precondor.Layer("a", 3, 5, True)]
        x, g = torch.randn(40, 4), torch.randn(40, 3)
        ones = np.concatenate([x.numpy(), np.ones((40, 1), np.float32)], 1)
        for kind, method, sketches in (("SIGNED", "mkor", 4), ("MEAN", "mkor", 0), ("COVARIANCE", "kfac", 0)):
            spec = precondor.SessionSpec(f"{self.name}-{kind}", layers, sketches=sketches, seed=3, statistics=kind, method=method)
            with precondor.Client(self.server.address) as client, client.open_session(spec).join() as worker:
                self.addCleanup(precondor.Client(self.server.address).close_session, spec.name)
                for rows in (2, 40):  # few rows of COVARIANCE are sent as they are
                    for side, part, with_ones in (("input", x, True), ("output", g, False)):
                        signs = worker.sketch(6, 0, side).signs if kind == "SIGNED" else None
                        in_host = (lambda first, rows, side=side, ones=with_ones, worker=worker:
                                   worker.sketch(6, 0, side).sums(first, rows, ones))
                        wanted = worker.compute_statistics(6, 0, side, ones[:rows] if with_ones else part[:rows].numpy(), 2.0)
                        for of_signs in (None, in_host) if kind == "SIGNED" else (None,):
                            sums = Covariance(with_ones) if kind == "COVARIANCE" else Vectors(signs, with_ones, of_signs)
                            for micro in part[:rows].split(7):
                                sums.add(micro.to(torch.float64))
                            np.testing.assert_allclose(sums.finish(2.0), wanted, rtol=1e-5, atol=1e-5)

    def test_collectives_are_on_the_gpu_whatever_init_process_group_was_told(self):
        # By default torch takes NCCL alone where there are GPUs, and calls that backend "undefined".
        for backends, device in (("cuda:nccl", "meta"), ("cpu:gloo,cuda:nccl", "meta"), ("cpu:gloo", "cpu")):
            with self.subTest(backends), mock.patch.multiple(
                    torch.distributed, is_initialized=lambda: True, get_rank=lambda group: 0, get_world_size=lambda group=None: 2,
                    get_backend=lambda group: "undefined", get_backend_config=lambda group, backends=backends: backends):
                self.assertEqual(Group(None, torch.device("meta")).device.type, device)

    # --- layers -------------------------------------------------------------------------------------------------------

    def test_says_which_parameters_are_layers(self):
        class Head(nn.Linear):
            pass

        tied = nn.Linear(6, 6)
        model = nn.ModuleDict({
            "words": nn.Embedding(9, 6), "first": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 2000),
            "frozen": nn.Linear(8, 8), "one": nn.Linear(8, 1), "tied": tied, "also": nn.ModuleDict({"tied": nn.Linear(6, 6)}),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4), "grouped": nn.Conv2d(4, 6, 3, groups=2), "conv": nn.Conv1d(4, 6, 3),
            "no_bias": nn.Linear(6, 6), "up": nn.ConvTranspose2d(4, 4, 2), "skipped": nn.Linear(6, 6),
            "typed": Head(6, 6), "complex": nn.Linear(6, 6, dtype=torch.complex64)})
        model["also"]["tied"].weight = tied.weight
        model["frozen"].weight.requires_grad_(False)
        model["no_bias"].bias.requires_grad_(False)
        nn.utils.weight_norm(model["conv"])
        pre = self.preconditioner(model, skip=["ski.*"], selection=precondor.torch.Selection(skip_types=Head, max_dim=1000),
                                  layer_methods={"first": "kfac", "gr.*": precondor.Method("mkor", {"rank": 3})})
        self.assertEqual([(layer.name, layer.d_out, layer.d_in, layer.has_bias) for layer in pre.layers],
                         [("first", 8, 7, True), ("grouped.group0", 3, 19, True), ("grouped.group1", 3, 19, True),
                          ("no_bias", 6, 6, False), ("up", 16, 4, False)])
        left = pre.others
        self.assertRegex(left.pop("head.weight"), "longer side of 2000")
        self.assertEqual({name: left[name] for name in ("frozen.weight", "one.weight", "tied.weight", "skipped.bias",
                                                        "up.bias", "typed.weight", "no_bias.bias", "norm.bias", "words.weight",
                                                        "complex.weight")},
                         {"frozen.weight": "frozen", "one.weight": "a side of 1", "tied.weight": "tied: several modules have it",
                          "skipped.bias": "skip", "up.bias": "a bias that is not folded in",
                          "typed.weight": "skip_types", "no_bias.bias": "frozen",
                          "complex.weight": "of torch.complex64",
                          "norm.bias": "a parameter of LayerNorm", "words.weight": "embedding of words"})
        self.assertRegex(left["conv.weight_g"], "made from other parameters")
        self.assertEqual([(one.method.name, tuple(one.layers)) for one in pre.spec.layer_methods],
                         [("kfac", (0,)), ("mkor", (1, 2))])

    def test_biases_may_be_left_and_convolutions_have_their_shape(self):
        pre = self.preconditioner(nn.Sequential(nn.Conv2d(2, 3, (4, 5)), nn.Linear(3, 3)), method="kron",
                                  selection=precondor.Selection(fold_bias=False))
        self.assertEqual(pre.layers, (precondor.Layer("0", 3, 40, False, (3, 2, 4, 5)), precondor.Layer("1", 3, 3)))
        self.assertEqual(pre.others, dict.fromkeys(["0.bias", "1.bias"], "a bias that is not folded in"))

    def test_unused_frozen_and_zero_layers(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused, self.zero, self.frozen = (nn.Linear(4, 4) for _ in range(4))

            def forward(self, x):
                return self.used(x) + 0 * self.zero(x) + self.frozen(x)

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        pre = self.preconditioner(model, optimizer=optimizer)
        for step in range(3):
            if step == 1:
                for parameter in model.frozen.parameters():
                    parameter.requires_grad_(False)
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            result = pre.step(loss)
            optimizer.step()
            self.assertEqual(result.decisions["used"], "PRECONDITIONED")
            self.assertEqual(result.decisions["unused"], "SKIP")
            self.assertIn(result.decisions["zero"], ("PRECONDITIONED", "IDENTITY"))
            self.assertEqual(result.decisions["frozen"], "SKIP" if step else "PRECONDITIONED")
            self.assertFalse(result.skipped)
            for name, value in model.state_dict().items():
                moved = not torch.equal(before[name], value)
                if result.decisions[name.split(".")[0]] == "SKIP":
                    self.assertFalse(moved, name)
                self.assertTrue(bool(torch.isfinite(value).all()), name)
        self.assertIsNone(model.unused.weight.grad)
        self.assertTrue(bool((model.zero.weight.grad == 0).all()))
        self.assertEqual(pre.metrics()["skipped"], 2)

    def test_a_gradient_that_is_not_finite_skips_the_step(self):
        """The loss, a layer, a vector or an embedding is NaN. Weights, moments and factors stay as without that step."""
        def spoil(name, value):
            def change(model):
                model.get_parameter(name).grad.view(-1)[0] = value
            return change

        class Net(nn.Sequential):
            def __init__(self):
                torch.manual_seed(4)
                super().__init__(nn.Embedding(5, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))

        spoils = {0: lambda model: (model(torch.tensor([1])).sum() * float("nan")).backward(), 2: spoil("1.weight", float("inf")),
                  3: spoil("2.bias", float("nan")), 4: spoil("0.weight", float("-inf"))}
        for number, (method, make) in enumerate((
                (None, lambda pre, model: pre.make_optimizer(0.01)), ("mkor", lambda pre, model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)),
                ("kfac", lambda pre, model: pre.make_optimizer(0.01)))):
            models = []
            for bad in (spoils, {}):
                model = Net()
                pre = self.preconditioner(model, f"{self.name}-{number}-{bool(bad)}", method, statistics=precondor.Statistics(inv_freq=1))
                optimizer = make(pre, model)
                for step in range(6):
                    optimizer.zero_grad()
                    loss = model(torch.tensor([step % 5, 3])).square().mean()
                    loss.backward()
                    before = copy.deepcopy(model.state_dict())
                    if step in bad:
                        bad[step](model)
                        with warnings.catch_warnings(record=True, action="always") as caught:
                            result = pre.step(loss)
                        told = [str(one.message) for one in caught if "is not finite. The step is skipped" in str(one.message)]
                        self.assertEqual(len(told), step == min(bad), step)
                        self.assertTrue(result.skipped)
                        self.assertEqual(set(result.decisions.values()), {"SKIP"})
                        optimizer.step()
                        self.assertTrue(all(torch.equal(value, before[name]) for name, value in model.state_dict().items()))
                    elif not spoils.get(step):
                        self.assertFalse(pre.step(loss).skipped)
                        optimizer.step()
                models.append(model)
            for one, other in zip(*(model.parameters() for model in models)) if method is None else ():  # sketches go by the step's number
                torch.testing.assert_close(one, other, rtol=0, atol=0)

    def test_large_gradients_are_finite(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pre = self.preconditioner(model)
        for value in (3e38, 1e38):  # their sum is infinite
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0)
            model[0].bias.grad.fill_(value)
            self.assertFalse(pre.step(1.0).skipped)

    def test_a_layer_may_be_called_several_times_and_in_place(self):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.one = nn.Linear(4, 4)

            def forward(self, x):
                return self.one(torch.relu_(self.one(x)))

        model = Shared()
        pre = self.preconditioner(model, method="kfac", statistics=precondor.Statistics("COVARIANCE", inv_freq=1))
        taken = {}
        x = torch.randn(3, 4)
        first = model.one(x).detach()
        pre._on_backward = lambda step, slots, x, grad, around: taken.update({len(taken): (x, grad)})
        model(x).sum().backward()
        self.assertEqual(len(taken), 2)
        torch.testing.assert_close(taken[0][0], torch.relu(first))
        torch.testing.assert_close(taken[0][1], torch.ones(3, 4))
        # The gradient of what the module gave, before relu_ wrote over it.
        torch.testing.assert_close(taken[1][1], (torch.ones(3, 4) @ model.one.weight.detach()) * (first > 0))

    def test_passes_through_frozen_weights_count_in_no_statistics(self):  # as of a generator's step through its critic
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model)
        for trained in (False, True):
            model.requires_grad_(trained)
            model(torch.randn(5, 4, requires_grad=True)).sum().backward()
            self.assertEqual(len(pre._pairs), 2 * trained)

    def test_an_interrupted_step_is_not_gone_on_with(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model, method="soap")
        optimizer = pre.make_optimizer(lr=0.1)
        with mock.patch("precondor.torch._exchange.results", side_effect=KeyboardInterrupt):
            self.expect(KeyboardInterrupt, "^$", one_step, model, pre, optimizer, 5, 4)
        with self.assertWarnsRegex(UserWarning, "step 0 was interrupted"):
            pre.state_dict()
        self.expect(precondor.FailedPreconditionError, "the call before it did not end", one_step, model, pre, optimizer, 5, 4)

    def test_a_layer_that_servers_skip_is_told(self):
        model = nn.Sequential(nn.Linear(4, 3))
        pre = self.preconditioner(model, method="soap")
        optimizer = pre.make_optimizer(lr=0.1)
        for reason, told in (("rank 1 abstained", ""), ("no memory", "layer 0: the servers skip it.*no memory")):
            results = [precondor.Preconditioned(None, "SKIP", 0, 0.0, reason)]
            with mock.patch("precondor.torch._exchange.results", return_value=results):
                with self.assertWarnsRegex(UserWarning, told) if told else contextlib.nullcontext():
                    one_step(model, pre, optimizer, 5, 4)

    def test_a_job_that_ended_before_its_first_step_begins_again(self):
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4, 3))
            pre = self.preconditioner(model, method="soap")
        self.assertFalse(pre._session.created)
        one_step(model, pre, pre.make_optimizer(lr=0.1), 5, 4)

    def test_states_that_no_later_job_can_use_are_told(self):
        _checkpoint.warn_of_local(self.server.address, False)
        local = f"unix:{precondor.server._prefix()}0-x/socket"
        _checkpoint.warn_of_local(local, True)
        with self.assertWarnsRegex(UserWarning, "state_dict.factors=True."):
            _checkpoint.warn_of_local(local, False)

    def test_an_end_without_servers_is_told(self):
        session = mock.Mock(close=mock.Mock(side_effect=precondor.UnavailableError("gone")))
        session.name = "job"
        with self.assertWarnsRegex(UserWarning, "session job stays.*precondorctl session close job.*gone"):
            _checkpoint.close_session(session)

    def test_statistics_only_where_there_is_a_gradient_and_at_their_steps(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pre = self.preconditioner(model, optimizer=optimizer, statistics=precondor.Statistics(inv_freq=4, warmup_steps=1))
        sent = []
        for _ in range(6):
            with torch.no_grad():
                model(torch.randn(5, 4))
            model(torch.randn(5, 4))  # its backward pass never comes
            before = pre.metrics().get("statistics_bytes", 0)
            result = one_step(model, pre, optimizer, 5, 4)
            self.assertEqual(set(result.decisions.values()), {"PRECONDITIONED"})
            optimizer.step()
            sent.append(pre.metrics()["statistics_bytes"] > before)
        self.assertEqual(sent, [True, False, False, False, True, False])

    def test_rows_make_the_gradient(self):
        """The sum of g a' over a layer's rows is the gradient, bias and all, for each kind of layer."""

        class Attend(nn.Module):
            def __init__(self, **options):
                super().__init__()
                self.attention = nn.MultiheadAttention(6, 2, **options)

            def forward(self, x, memory=None, values=None):
                memory = x if memory is None else memory
                return self.attention(x, memory, memory if values is None else values)[0]

        encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        for model, shapes, names in [
                (nn.Linear(4, 3), [(5, 2, 4)], ["Linear"]), (nn.Linear(4, 3), [(4,)], ["Linear"]),
                (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), [(3, 4, 7, 6)],
                 ["Conv2d.group0", "Conv2d.group1"]),
                (nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), [(2, 2, 5, 5)], ["Conv2d"]),
                (changed(nn.Conv2d(2, 3, 3), padding=(2, 1), dilation=2), [(2, 2, 7, 7)], ["Conv2d"]),
                (changed(nn.Conv1d(2, 3, 3, padding="same"), dilation=(2,)), [(2, 2, 7)], ["Conv1d"]),
                (nn.Conv1d(2, 3, 4, padding="valid"), [(2, 2, 7)], ["Conv1d"]),
                (nn.Conv2d(2, 3, 3), [(2, 5, 5)], ["Conv2d"]), (nn.Conv1d(2, 3, 3, dilation=2), [(4, 2, 9)], ["Conv1d"]),
                (Attend(), [(5, 2, 6)], ["attention.in_proj", "attention.out_proj"]),
                (Attend(batch_first=True), [(5, 2, 6)], ["attention.in_proj", "attention.out_proj"]),
                (Attend(), [(5, 2, 6), (4, 2, 6)], ["attention.in_proj", "attention.out_proj"]),
                (Attend(), [(5, 2, 6), (4, 2, 6), (4, 2, 6)], ["attention.in_proj", "attention.out_proj"]),
                (Attend(kdim=3, vdim=4), [(5, 2, 6), (4, 2, 3), (4, 2, 4)],
                 ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj"]),
                (encoder, [(5, 2, 6)], ["self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"])]:
            with self.subTest(model=model, shapes=shapes):
                pre = self.preconditioner(model, client=precondor.ClientOptions(replace=True))
                self.assertEqual([layer.name for layer in pre.layers], names)
                pre._join()
                pre._wanted, pre._switch.on = frozenset(range(len(names))), True
                pre._pairs = {slot.place: Rows() for slot in pre._slots}
                model(*(torch.randn(*shape) for shape in shapes)).square().sum().backward()
                for slot in pre._slots:
                    gradient = torch.empty(slot.layer.d_out, slot.layer.d_in)
                    for own, part in slot.matrix.pairs(slot.group, slot.matrix.split(gradient)):
                        part.copy_(own)
                    made = sum(g.T @ nn.functional.pad(a, (0, int(slot.layer.has_bias)), value=1.0)
                               for a, g in pre._pairs[slot.place].rows)
                    torch.testing.assert_close(made, gradient, rtol=1e-4, atol=1e-4)
                pre.close()
                self.assertIs(nn.functional.linear, torch._C._nn.linear)

    def test_a_weight_that_is_used_behind_its_modules_back(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model)
        for step in range(2):
            nn.functional.linear(model[0](torch.ones(2, 4)), model[1].weight).sum().backward()
            with warnings.catch_warnings(record=True, action="always") as caught:
                decisions = pre.step().decisions
            self.assertEqual(decisions, {"0": "PRECONDITIONED", "1": "IDENTITY"})
            self.assertEqual([str(one.message).split(":")[0] for one in caught], [] if step else ["layer 1"])

    def test_copies_of_the_model_have_no_hooks(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model)
        teacher = copy.deepcopy(model)
        teacher(torch.randn(2, 4)).sum().backward()
        self.assertEqual(pre.metrics(), {"step": 0, "second_order": 1.0, "updates_lost": 0})
        pre.close()
        self.assertEqual(len(model[0]._forward_hooks), 0)

    def test_half_precision_weights(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pre = self.preconditioner(model, optimizer=optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4).to(torch.bfloat16)).square().mean()
        loss.backward()
        norm = model[0].weight.grad.float().norm()**2 + model[0].bias.grad.float().norm()**2
        result = pre.step(loss)
        self.assertEqual(set(result.decisions.values()), {"PRECONDITIONED"})
        after = model[0].weight.grad.float().norm()**2 + model[0].bias.grad.float().norm()**2
        self.assertEqual(model[0].weight.grad.dtype, torch.bfloat16)
        self.assertAlmostEqual(float(after / norm), 1, delta=0.02)  # NORM_RESCALE, and bf16's 2^-8

    def test_first_order_leaves_gradients_alone(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for method, exchange in itertools.product(("mkor", "eva"), ("DIRECT", "DELEGATE", "REPLAY", "PULL_FACTORS")):
            pre = self.preconditioner(model, f"{self.name}-{method}-{exchange}", method=method, optimizer=optimizer,
                                      exchange=exchange, fallback=precondor.Fallback("AT_STEP", at_step=2))
            for step in range(4):
                self.assertEqual(pre.mode, "SECOND_ORDER" if step < 2 else "FIRST_ORDER")
                optimizer.zero_grad()
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward()
                gradient = model[0].weight.grad.clone()
                result = pre.step(loss)
                self.assertEqual(torch.equal(gradient, model[0].weight.grad), step >= 2)
                self.assertEqual((result.mode, result.step), ("SECOND_ORDER" if step < 2 else "FIRST_ORDER", step))
                optimizer.step()
            self.assertEqual(pre.metrics()["second_order"], 0)
            pre.close(end_session=True)

    def test_kl_clip_scales_what_is_preconditioned(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model, method="eva")
        (100 * nn.functional.linear(model[0](torch.ones(2, 4)), model[1].weight).square().mean()).backward()
        before = [copy.deepcopy(layer.weight.grad) for layer in model]
        with warnings.catch_warnings(action="ignore"):  # of layer 1, which is not called
            result = pre.step(1.0, learning_rate=1.0)
        self.assertEqual(result.decisions, {"0": "PRECONDITIONED", "1": "IDENTITY"})
        self.assertLess(result.scale, 1)
        self.assertFalse(torch.equal(model[0].weight.grad, before[0]))
        self.assertTrue(torch.equal(model[1].weight.grad, before[1]))

    def test_a_state_may_go_through_json(self):
        model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pre = self.preconditioner(model)
        one_step(model, pre, optimizer, 1, 2, 5, 5)
        state = json.loads(json.dumps(pre.state_dict()))
        pre.close()
        pre = self.preconditioner(model)
        pre.load_state_dict(state)
        self.assertEqual(one_step(model, pre, optimizer, 1, 2, 5, 5).step, 1)

    # --- errors ---------------------------------------------------------------------------------------------------------

    def test_overlap_wants_one_backward_pass(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model, overlap=True)
        model(torch.randn(5, 4)).sum().backward()
        self.expect(precondor.FailedPreconditionError, r"layer [01]: a second backward pass in step 0.*no_sync",
                    model(torch.randn(5, 4)).sum().backward)
        self.expect(precondor.InvalidArgumentError, "overlap: gradients have left", pre.step, 1.0, samples=3)

    def test_a_session_that_is_there(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first = self.preconditioner(model)
        one_step(model, first, optimizer, 5, 4)
        first.close()
        again = self.preconditioner(model)
        self.expect(precondor.FailedPreconditionError, f"{self.name} is there already.*load_state_dict.*replace=True",
                    model, torch.randn(5, 4))
        again.close()
        anew = self.preconditioner(model, client=precondor.ClientOptions(replace=True))
        self.assertEqual(one_step(model, anew, optimizer, 5, 4).step, 0)
        other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        error = self.expect(precondor.FailedPreconditionError, "name is taken.* model", self.preconditioner, other)
        self.assertEqual(error.reason, "SPEC_MISMATCH")

    def test_what_cannot_be_done_says_so(self):
        bad = precondor.InvalidArgumentError
        linear = nn.Linear(4, 3)

        class FullyShardedDataParallel(nn.Module):
            pass

        sharded, zero = nn.Sequential(FullyShardedDataParallel()), nn.Linear(4, 3)
        zero.weight.ds_id = 0
        for kind, pattern, model, options in [
                (precondor.UnimplementedError, r"model\.0 is a FullyShardedDataParallel. Use fully_shard.*docs/use/limits", sharded, {}),
                (precondor.UnimplementedError, "parameter weight is divided by DeepSpeed's ZeRO-3. Use fully_shard", zero, {}),
                (precondor.UnimplementedError, "model is a DataParallel", nn.DataParallel(linear), {}),
                (bad, "has no shape yet", nn.LazyLinear(3), {}), (bad, "no layer to precondition", nn.LayerNorm(4), {}),
                (bad, r"skip: expected a regular expression, got '\('", linear, {"skip": ["("]}),
                (bad, r"skip: expected several regular expressions, got the text 'head'.*\['head'\]", linear,
                 {"skip": "head"}),
                (bad, r"layer_methods: no layer's whole name matches 'hed.*'; there are \['Linear'\]", linear,
                 {"layer_methods": {"hed.*": "kron"}}),
                (bad, "exchange: expected one of", linear, {"exchange": "RING"}),
                (bad, "scaling_clip: expected a number", linear,
                 {"method": precondor.Method("kfac", {"scaling_clip": "linear(1, 2, 3)"})})]:
            with self.subTest(pattern=pattern):
                self.expect(kind, pattern, self.preconditioner, model, **options)
        self.expect(precondor.UnavailableError, "Check the address", precondor.torch.Preconditioner, linear, "127.0.0.1:1",
                    session="x", client=precondor.ClientOptions(connect_timeout=0.2))
        pre = self.preconditioner(linear, method="kfac")
        linear(torch.randn(2, 4)).sum().backward()
        self.expect(bad, "KL_CLIP needs the learning rate", pre.step, 1.0)
        self.assertEqual(pre.step(1.0, learning_rate=0.1).decisions, {"Linear": "PRECONDITIONED"})

    def test_a_wrong_loss_or_weight_changes_nothing(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        pre = self.preconditioner(model)
        model(torch.randn(5, 4)).sum().backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        for loss in (torch.ones(2), torch.ones(1, dtype=torch.complex64), "low", [1.0]):
            self.expect(precondor.InvalidArgumentError, "loss: expected a number or a tensor of one, got", pre.step, loss)
        for samples in (0, -1, 2.0, 1 << 41, None):
            self.expect(precondor.InvalidArgumentError, "samples: expected a whole number of 1 ... 1099511627776, got",
                        pre.step, 1.0, samples=samples)
        for parameter, gradient in zip(model.parameters(), before):
            self.assertTrue(torch.equal(parameter.grad, gradient))
        self.assertEqual(set(pre.step(torch.ones(1, 1), samples=np.int64(3)).decisions.values()), {"PRECONDITIONED"})

    def test_a_scaler_goes_with_the_optimizer_of_all_layers(self):
        model = nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "one": nn.Linear(4, 4), "two": nn.Linear(4, 3)})
        own = torch.optim.SGD([*model["one"].parameters(), *model["two"].parameters()], 0.1)
        other = torch.optim.SGD(model["words"].parameters(), 0.1)
        half = torch.optim.SGD(model["one"].parameters(), 0.1)
        for optimizer, loss_scale in ((half, 64.0), (own, 64.0), (own, float("inf"))):
            pre = self.preconditioner(model, optimizer=optimizer, client=precondor.ClientOptions(replace=True))
            scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
            model.zero_grad(set_to_none=True)
            output = model["two"](model["one"](model["words"](torch.tensor([1, 2]))))
            scaler.scale(output.square().mean()).backward()
            if optimizer is half:
                self.expect(precondor.InvalidArgumentError, "scaler: layer two: expected its parameters in optimizer=",
                            pre.step, 1.0, scaler=scaler)
                continue
            self.assertEqual(pre.step(1.0, scaler=scaler).skipped, loss_scale != 64.0)
            self.assertEqual([one.grad is None for one in own.param_groups[0]["params"]], [loss_scale != 64.0] * 4)
            for one in (own, other):  # the other's gradients are its own
                scaler.step(one)
            scaler.update()
            pre.close()  # its report has to be answered before the next one replaces the session
        everything = torch.optim.SGD(model.parameters(), 0.1)
        pre = self.preconditioner(model, optimizer=everything, client=precondor.ClientOptions(replace=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model.zero_grad(set_to_none=True)
        scaler.scale(model["two"](model["one"](model["words"](torch.tensor([1, 2])))).square().mean()).backward()
        self.assertFalse(pre.step(1.0, scaler=scaler).skipped)

    def test_the_manuals_example_runs(self):
        block = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/use/pytorch.md").read_text(), re.MULTILINE | re.DOTALL)[1]
        done = subprocess.run([sys.executable, "-B", "-c", block, self.server.address], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(line.split()[0]) for line in done.stdout.splitlines()]
        self.assertLess(losses[-1], 0.3 * losses[0])

    def test_an_older_torch_is_refused(self):
        with mock.patch.object(torch, "__version__", torch.torch_version.TorchVersion("2.5.1")):
            self.expect(ImportError, "needs torch 2.6 or later, got 2.5.1", importlib.reload, precondor.torch)

    def test_torch_is_imported_by_its_own_part_alone(self):
        program = "import sys, precondor; assert 'torch' not in sys.modules; import precondor.torch; assert 'torch' in sys.modules"
        subprocess.run([sys.executable, "-B", "-c", program], check=True)

    def test_everything_public_is_documented(self):
        for name in precondor.torch.__all__:
            self.assertTrue(getattr(precondor.torch, name).__doc__, name)
        for one in (precondor.torch.Preconditioner, precondor.torch.StepResult):
            for method, value in vars(one).items():
                if not method.startswith("_") and (callable(value) or isinstance(value, property)):
                    self.assertTrue(value.__doc__, f"{one.__name__}.{method}")


if __name__ == "__main__":
    torch_case.main()
