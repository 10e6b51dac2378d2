#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which modules and parameters precondor.torch makes layers, and that their rows are those of their gradients."""

import copy
from unittest import mock
import warnings

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

import precondor
import torch_case
from precondor.torch import _layers, _preconditioner, register_layer


class Right(nn.Module):
    """x weight + bias."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out)), nn.Parameter(torch.randn(d_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Derived(Right):
    pass


class Left(nn.Module):
    """x weight', without a bias."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in))

    def forward(self, x):
        return x @ self.weight.T


register_layer(Right, transposed=True)
register_layer(Left)

# (module, shape of its input, blocks)
CASES = [
    (lambda: nn.Linear(4, 6), (5, 4), 3),
    (lambda: nn.Linear(3, 7, bias=False), (2, 5, 3), [2, 3, 2]),
    (lambda: Right(4, 7), (5, 4), (4, 3)),
    (lambda: Right(4, 3), (5, 4)),
    (lambda: Left(4, 3), (2, 5, 4)),
    (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 4, 3)),
    (lambda: nn.Conv3d(2, 4, (2, 1, 3), stride=(1, 2, 2), padding=(1, 0, 2), dilation=(2, 1, 1), groups=2), (3, 2, 4, 5, 5)),
    (lambda: nn.Conv3d(2, 3, 3, padding="same", padding_mode="circular", bias=False), (1, 2, 4, 3, 5)),
    (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),  # no batch
    (lambda: nn.ConvTranspose1d(3, 2, 3), (2, 3, 4)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=2, output_padding=1, groups=2), (4, 5)),  # no batch
    (lambda: nn.ConvTranspose2d(3, 2, (2, 3), stride=(3, 1), dilation=(1, 2), bias=False), (2, 3, 4, 3)),
    (lambda: nn.ConvTranspose2d(4, 4, 2, stride=1, dilation=3, output_padding=2, padding=1, groups=2), (2, 4, 3, 3)),
    (lambda: nn.ConvTranspose3d(2, 3, (1, 2, 3), stride=2, padding=(0, 1, 1)), (2, 2, 2, 3, 2)),
    (lambda: Conv1D(3, 4), (2, 5, 4)),
    (lambda: Conv1D(6, 4), (2, 5, 4), 2),
]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table, self.places = nn.Embedding(5, 6), nn.Embedding(3, 6)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.table(x) + self.places(x % 3))))


def selection_of(blocks):
    return precondor.Selection(blocks={".*": one for one in blocks})


class LayersTest(torch_case.ServerCase):
    def test_rows_are_those_of_the_gradient(self):
        for make, shape, *blocks in CASES:
            torch.manual_seed(3)
            module = make()
            with self.subTest(module=module):
                [(_, matrix)] = _layers.choose(module, _layers.Choice((), selection_of(blocks))).matrices
                x = torch.randn(shape)
                output = module(x)
                output.retain_grad()
                output.square().sum().backward()
                rows = list(matrix.rows(x, output.grad))
                self.assertEqual(len(rows), len(matrix.layers()))
                for group, ((a, g), layer) in enumerate(zip(rows, matrix.layers())):
                    if layer.has_bias:
                        a = torch.cat([a, torch.ones(len(a), 1)], 1)
                    wanted = torch.full((layer.d_out, layer.d_in), float("nan"))
                    for own, part in matrix.pairs(group, matrix.split(wanted)):
                        part.copy_(own)
                    torch.testing.assert_close(g.T @ a, wanted, rtol=1e-4, atol=1e-4)
                    if layer.shape:
                        self.assertEqual(torch.Size(layer.shape).numel(), wanted.numel())

    def test_answers_come_to_where_the_gradients_were(self):
        for place, (make, shape, *blocks) in enumerate(CASES):
            module = make()
            with self.subTest(module=module):
                pre = self.preconditioner(module, f"{self.name}-{place}", method="identity", selection=selection_of(blocks))
                module(torch.randn(shape)).square().sum().backward()
                wanted = [parameter.grad.clone() for parameter in module.parameters()]
                self.assertEqual(set(pre.step(1.0).decisions.values()), {"IDENTITY"})
                for parameter, gradient in zip(module.parameters(), wanted):
                    self.assertTrue(torch.equal(parameter.grad, gradient))

    def test_blocks_are_layers_of_their_own(self):
        for place, (method, statistics) in enumerate((("muon", ""), ("soap", ""), ("kfac", "COVARIANCE"))):
            torch.manual_seed(3)
            fused, apart = nn.Linear(4, 7), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 5)])
            options = {"method": method, "statistics": precondor.Statistics(statistics)}
            pre = self.preconditioner(fused, f"{self.name}-{place}", selection=selection_of([[2, 5]]), **options)
            others = self.preconditioner(apart, f"{self.name}-{place}-apart", **options)
            self.assertEqual([(layer.name, layer.d_out, layer.d_in) for layer in pre.layers], [("Linear.group0", 2, 5), ("Linear.group1", 5, 5)])
            weights = torch.arange(7.0)
            for step in range(3):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
                fused.zero_grad()
                apart.zero_grad()
                (fused(x) * weights).sum().backward()
                (torch.cat([one(x) for one in apart], 1) * weights).sum().backward()
                for of_all, parts in zip(fused.parameters(), zip(*(one.parameters() for one in apart))):
                    for part, gradient in zip(parts, of_all.grad.split([2, 5])):  # a product of other sides may round otherwise
                        part.grad = gradient.clone()
                pre.step(1.0, learning_rate=1.0)
                others.step(1.0, learning_rate=1.0)
                for of_all, parts in zip(fused.parameters(), zip(*(one.parameters() for one in apart))):
                    self.assertTrue(torch.equal(of_all.grad, torch.cat([part.grad for part in parts])), method)

    def test_blocks_of_attentions_and_of_other_parameters(self):
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(6, 2), "rnn": nn.LSTM(4, 3), "hidden": nn.Linear(4, 4)})
        blocks = {r"attention\.in_proj": 3, r"rnn\.weight_ih.*": 1, r"rnn\.weight_hh.*": [9, 3]}
        pre = self.preconditioner(model, method="muon", selection=precondor.Selection(blocks=blocks))
        self.assertEqual([(layer.name, layer.d_out) for layer in pre.layers],
                         [*((f"attention.in_proj.group{one}", 6) for one in range(3)), ("attention.out_proj", 6), ("hidden", 4),
                          ("rnn.weight_ih_l0", 12), ("rnn.weight_hh_l0.group0", 9), ("rnn.weight_hh_l0.group1", 3)])
        # Keys and values have other rows than queries.
        attention = nn.MultiheadAttention(6, 2)
        pre = self.preconditioner(attention, f"{self.name}-2", selection=precondor.Selection(blocks={".*in_proj": 3}))
        rows = {}

        class Counted(_preconditioner.Pair):
            def __init__(self, worker, step, slot, *rest):
                super().__init__(worker, step, slot, *rest)
                self.counted = rows.setdefault(slot.layer.name.rpartition(".")[2], [])

            def add(self, a, g, samples):
                self.counted.append(len(a))
                super().add(a, g, samples)

        with mock.patch.object(_preconditioner, "Pair", Counted):
            attention(torch.randn(5, 2, 6), *[torch.randn(4, 2, 6)] * 2)[0].square().sum().backward()
        self.assertEqual(rows, {"out_proj": [10], "group0": [10], "group1": [8], "group2": [8]})
        self.assertEqual(pre.step(1.0).counts()["preconditioned"], 4)
        state = pre.state_dict(factors=True)
        pre.close(end_session=True)
        self.expect(precondor.InvalidArgumentError, r"layer .*in_proj.group0", self.preconditioner(attention, f"{self.name}-3").load_state_dict, state)

    def test_blocks_that_are_refused(self):
        model = nn.Sequential(nn.Linear(4, 6), nn.Conv1d(6, 6, 1))
        for blocks, pattern in (({"0": 4}, r"selection.blocks: layer 0: expected sizes of at least 2 with the sum 6, .* got 4 of \[6, 4\]"),
                                ({"0": [4, 3]}, r"layer 0: .* got \[4, 3\]"), ({"0": [5, 1]}, r"layer 0: .* got \[5, 1\]"),
                                ({"1": 2}, r"layer 1: .* of a matrix, got 2 of \[6, 6, 1\]"),
                                ({"qkv": 3}, r"selection.blocks: no layer's whole name matches 'qkv'; there are \['0', '1'\]")):
            with self.subTest(blocks=blocks):
                self.expect(precondor.InvalidArgumentError, pattern, self.preconditioner, model, selection=precondor.Selection(blocks=blocks))

    def test_a_transposed_layer_is_its_linear_layer(self):
        right, linear = nn.Sequential(Right(4, 3)), nn.Sequential(nn.Linear(4, 3))
        linear[0].weight.data, linear[0].bias.data = right[0].weight.data.T.clone(), right[0].bias.data.clone()
        answers = []
        for model in (right, linear):
            pre = self.preconditioner(model, client=precondor.ClientOptions(replace=True))
            model(torch.randn(6, 4, generator=torch.Generator().manual_seed(3))).square().mean().backward()
            pre.step(1.0)
            answers.append([parameter.grad for parameter in model.parameters()])
            pre.close(end_session=True)
        torch.testing.assert_close(answers[0][0].T, answers[1][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(answers[0][1], answers[1][1], rtol=1e-5, atol=1e-6)

    def test_training_with_every_kind(self):
        class Every(nn.Module):
            def __init__(self):
                super().__init__()
                self.modules_of_cases = nn.ModuleList(make() for make, *_ in CASES)

            def forward(self, inputs):
                return sum(module(x).square().mean() for module, x in zip(self.modules_of_cases, inputs))

        model = Every()
        pre = self.preconditioner(model)
        optimizer = pre.make_optimizer(0.003)
        losses = []
        inputs = [torch.randn(shape) for _, shape, *_ in CASES]
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(inputs)
            loss.backward()
            self.assertEqual(set(pre.step(loss).decisions.values()), {"PRECONDITIONED"})
            optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.9 * losses[0])

    def test_what_registered_classes_mean(self):
        self.expect(precondor.InvalidArgumentError, "expected a class of modules, got 3", register_layer, 3)
        model = nn.Sequential(Derived(4, 3), nn.Bilinear(2, 3, 4))
        pre = self.preconditioner(model)
        self.assertEqual([layer.name for layer in pre.layers], ["0"])
        self.assertEqual(pre.others["1.weight"], "a parameter of Bilinear")

    def test_weights_that_are_unfrozen_later_are_told(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3))
        for parameter in [*model[0].parameters(), *model[1].parameters()]:
            parameter.requires_grad_(False)

        def step():
            model.zero_grad()
            model(torch.ones(5, 4)).sum().backward()
            pre.step(1.0)

        pre = self.preconditioner(model)
        model[1].requires_grad_(True)  # a vector is no layer anyway
        self.expect_warning("", step)
        model[0].requires_grad_(True)
        self.expect_warning("weights that were frozen when it was made are trained, but are no layers: 0.weight. Make it and its optimizer anew",
                            step)

    def test_arguments_that_are_wrong_are_named(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4), nn.Linear(4, 3))
        for options, pattern in (
                ({"skip": ["nope"]}, r"skip: no module .* 'nope' matches; there are \['0.0', '1', '2'\]"),
                ({"skip": ["0"]}, "skip: no module"), ({"skip": [3]}, "skip: expected a str, got 3"),
                ({"selection": {"min_dim": 3}}, r"selection: expected a precondor.Selection, got .*Write selection=precondor.Selection\("),
                ({"statistics": "MEAN"}, "statistics: expected a precondor.Statistics, got 'MEAN'"),
                ({"fallback": "LOSS_RATE"}, "fallback: expected a precondor.Fallback, got 'LOSS_RATE'"),
                ({"client": None}, "client: expected a precondor.ClientOptions, got None"),
                ({"statistics": precondor.Statistics("MEEN")}, ".*statistics: expected one of MEAN, .*'MEEN'"),
                ({"statistics": precondor.Statistics(dtype="f64")}, ".*statistics_dtype: expected one of .*'f64'"),
                ({"fallback": precondor.Fallback("SOON")}, ".*fallback.policy: expected one of NEVER, .*'SOON'"),
                ({"fallback": precondor.Fallback("LOSS_RATE", beta=2)}, ".*fallback.beta: expected a number in .*got 2"),
                ({"layer_methods": ["0"]}, "layer_methods: expected a dict"), ({"layer_methods": {0: "kron"}}, "layer_methods: .* got 0"),
                ({"layer_methods": {"2": "krn"}}, "layer_methods: '2': expected one of .*, got 'krn'"),
                ({"layer_methods": {"2": None}}, "layer_methods: '2': expected a name or a precondor.Method, got None"),
                ({"parameter_methods": ["1"]}, "parameter_methods: expected a dict"),
                ({"parameter_methods": {"1.weight": "krn"}}, "parameter_methods: '1.weight': expected one of kron, soap, muon, .* got krn"),
                ({"method": {"name": "mkor"}}, "method: expected a name or a precondor.Method, got"), ({"method": ""}, "method: .* got ''"),
                ({"name": 3}, "session: .* got 3")):
            with self.subTest(options=options):
                self.expect(precondor.InvalidArgumentError, f"^{pattern}", self.preconditioner, model, **options)
        self.expect(precondor.InvalidArgumentError, "^model: expected a torch.nn.Module, got 3", self.preconditioner, 3)
        pre = self.preconditioner(model, skip=["0.*", "1"])
        self.assertEqual([layer.name for layer in pre.layers], ["2"])
        for state, pattern in ((None, "state: expected the result of state_dict.*None"), ({}, "state: .*format None")):
            self.expect(precondor.InvalidArgumentError, pattern, pre.load_state_dict, state)

    def test_embeddings_that_are_unfrozen_later_are_as_before(self):
        model = Tied()
        model.places.weight.requires_grad_(False)
        pre = self.preconditioner(model)
        self.assertEqual(pre.others["places.weight"], "frozen")
        model.places.weight.requires_grad_(True)
        model(torch.arange(5)).sum().backward()
        with warnings.catch_warnings(action="error", category=UserWarning):
            pre.step(1.0)

    def test_frozen_matrices_with_a_method_are_no_layers_for_that_alone(self):
        model = nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.Embedding(6, 4), "c": nn.Embedding(7, 4, sparse=True), "rnn": nn.LSTM(4, 4),
                               "body": nn.Linear(4, 4)})
        model.experts = nn.Parameter(torch.ones(2, 4, 4))
        for parameter in (model["a"].weight, model["c"].weight, model["rnn"].weight_ih_l0, model["rnn"].bias_ih_l0, model["body"].weight,
                          model["body"].bias, model.experts):
            parameter.requires_grad_(False)
        for pattern, frozen in (("b.weight", []), ("[abc].weight", ["a.weight"]), ("rnn.*", ["rnn.weight_ih_l0"]),
                                ("experts|b.weight", ["experts"])):
            with self.subTest(pattern=pattern):
                chosen = _layers.choose(model, _layers.Choice((), precondor.Selection(), {pattern: "soap"}))
                self.assertEqual(sorted(chosen.frozen), sorted(["body.weight", *frozen]))

    def test_gpt2(self):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=12, n_layer=2, n_head=2))
        pre = self.preconditioner(model, parameter_methods={"transformer.w[tp]e.weight": "soap"})
        blocks = [f"transformer.h.{block}.{name}" for block in range(2)
                  for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
        self.assertEqual([layer.name for layer in pre.layers], [*blocks, "transformer.wte.weight", "transformer.wpe.weight"])
        self.assertEqual(sum("ln_" not in name for name in pre.others), 0)
        characters = torch.randint(50, (3, 8))
        loss = model(characters, labels=characters).loss
        loss.backward()
        self.assertEqual(set(pre.step(loss).decisions.values()), {"PRECONDITIONED"})

    def test_mixtral(self):
        model = MixtralForCausalLM(MixtralConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16))
        pre = self.preconditioner(model, method=None)
        experts = [f"model.layers.{block}.mlp.experts.{name}.expert{expert}" for block in range(2)
                   for name in ("gate_up_proj", "down_proj") for expert in range(4)]
        self.assertEqual([layer.name for layer in pre.layers if "expert" in layer.name], experts)
        self.assertFalse([name for name in pre.others if "expert" in name])
        optimizer = pre.make_optimizer(lr=0.02)
        characters = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(2))
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(characters, labels=characters).loss
            loss.backward()
            self.assertEqual(set(pre.step(loss).decisions.values()), {"PRECONDITIONED"})
            optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.7 * losses[0])

    # --- layers by their gradients alone ----------------------------------------------------------------------------------

    def test_embeddings_and_tied_weights_by_their_gradients(self):
        model = Tied()
        pre = self.preconditioner(model, parameter_methods={"table.*": "soap", ".*": precondor.Method("kron", {"momentum": 0.5})},
                                  layer_methods={".*": "mkor"})
        self.assertEqual([layer.name for layer in pre.layers], ["body", "table.weight", "places.weight"])
        self.assertEqual(pre.others, {})
        self.assertEqual([(one.method.name, one.layers) for one in pre.spec.layer_methods],
                         [("soap", (1,)), ("kron", (2,)), ("mkor", (0,))])
        # The same gradients as a layer's that is called.
        twins = nn.ModuleDict({"table": nn.Linear(6, 5, bias=False), "places": nn.Linear(6, 3, bias=False)})
        others = self.preconditioner(twins, f"{self.name}-twins",
                                     layer_methods={"table": "soap", "places": precondor.Method("kron", {"momentum": 0.5})})
        differs = False
        for step in range(14):
            model.zero_grad()
            model(torch.randint(5, (7,), generator=torch.Generator().manual_seed(step))).square().mean().backward()
            own = [model.table.weight, model.places.weight]
            theirs = [twins["table"].weight, twins["places"].weight]
            gradients = [copy.deepcopy(one.grad) for one in own]
            for one, gradient in zip(theirs, gradients):
                one.grad = gradient.clone()
            self.assertEqual(set(pre.step(1.0).decisions.values()), {"PRECONDITIONED"})
            others.step(1.0)
            self.assertTrue(torch.equal(own[0].grad, theirs[0].grad))
            differs = differs or not torch.equal(own[0].grad, gradients[0])
            torch.testing.assert_close(own[1].grad.norm(), theirs[1].grad.norm(), rtol=0.5, atol=0.0)  # of other draws
        self.assertTrue(differs)
        self.assertEqual({group["plain"]: len(group["params"]) for group in pre.param_groups()}, {True: 2, False: 1})

    def test_what_parameter_methods_refuse(self):
        model = Tied()
        for methods, pattern in (({"table.*": "mkor"}, "expected one of kron, soap, muon, which take no statistics, got mkor"),
                                 ({"table": "soap"}, r"parameter_methods: no matrix .* 'table' matches"),
                                 ({"body.*": "soap"}, r"'body.\*' matches"),
                                 ({"(": "soap"}, "parameter_methods: expected a regular expression")):
            with self.subTest(methods=methods):
                self.expect(precondor.InvalidArgumentError, pattern, self.preconditioner, model, parameter_methods=methods)
        self.expect(precondor.InvalidArgumentError, "method: expected one of mkor, .*, got 'adam'", self.preconditioner, model,
                    method="adam")
        model.places = nn.Embedding(3, 6, sparse=True)
        self.expect(precondor.InvalidArgumentError, "its gradients are sparse", self.preconditioner, model,
                    parameter_methods={"places.*": "soap"})


if __name__ == "__main__":
    torch_case.main()
