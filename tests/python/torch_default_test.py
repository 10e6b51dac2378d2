#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Preconditioner where no method is named, and with embeddings."""

import copy
import json
import re
import shutil
import subprocess
import tempfile
import warnings
from unittest import mock

import torch
from torch import nn

import precondor
import torch_case
from cluster import wait_for
from precondor import Selection
from precondor.server import LocalServer, path_of
from precondor.torch import Preconditioner, _recipe, make_optimizer
from torch_optimizer_test import Wrapper

# Rows of the table, by step: the first two look up every row, so that each has momentum.
LOOKED_UP = [range(7), range(7), (0, 2, 2, 6), (3,), (1, 4)]


class Net(nn.Module):
    def __init__(self, tied=False, **options):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(7, 6, **options)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.body(self.table(x)))))


class Mixture(nn.Module):
    """A row goes to the expert that its number names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.experts, self.other = nn.Linear(4, 4), nn.Module(), nn.Module()
        self.experts.up = nn.Parameter(torch.randn(3, 5, 4))
        self.experts.down = nn.Parameter(torch.randn(3, 5, 3))  # from the right
        self.experts.bias = nn.Parameter(torch.zeros(3, 3))
        self.other.places = nn.Parameter(torch.zeros(2, 4, 4))
        self.experts.pairs, self.experts.conv = nn.Bilinear(2, 2, 2), nn.Conv1d(2, 2, 11)
        self.last = nn.Linear(3, 4)

    def forward(self, x, expert):
        x = self.first(x + self.other.places[0, 0])
        up, down = self.experts.up[expert], self.experts.down[expert]
        x = torch.tanh(up @ x[..., None]).transpose(-2, -1) @ down
        return self.last(x[..., 0, :] + self.experts.bias[expert])


class Recurrent(nn.Module):
    """Reads words, and a row of 3 numbers by cells."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(6)
        self.table, self.rnn = nn.Embedding(7, 5), nn.LSTM(5, 4, 2, bidirectional=True, **options)
        self.gru, self.plain, self.cell = nn.GRU(options.get("proj_size", 4) * 2, 3), nn.RNN(3, 2), nn.GRUCell(2, 3)
        self.head = nn.Linear(3, 7)

    def forward(self, x):
        return self.head(self.cell(self.plain(self.gru(self.rnn(self.table(x))[0])[0])[0].flatten(0, 1)))


class DefaultTest(torch_case.ServerCase):
    def methods(self, pre):
        """By layer."""
        found = dict.fromkeys((layer.name for layer in pre.layers), pre.spec.method.name)
        for one in pre.spec.layer_methods:
            found.update((pre.layers[place].name, one.method.name) for place in one.layers)
        return found

    def test_muon_for_hidden_layers_and_soap_for_others(self):
        model = Net()
        pre = self.preconditioner(model, method=None)
        self.assertEqual(self.methods(pre), {"body": "muon", "head": "soap"})
        self.assertEqual(set(pre.others), {"norm.weight", "norm.bias", "table.weight"})
        optimizer = pre.make_optimizer(0.02)
        self.assertEqual({(group["lr"], group["betas"]) for group in optimizer.param_groups}, {(0.02, (0.95, 0.95))})
        scales = {parameter: group["lr_scale"] for group in optimizer.param_groups for parameter in group["params"]}
        self.assertEqual(scales, {parameter: 4.0 if parameter is model.table.weight else 1.0 for parameter in model.parameters()})
        losses = []
        x = torch.arange(7)
        for _ in range(40):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x)
            loss.backward()
            pre.step(loss)
            optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.1 * losses[0])

    def test_gates_of_recurrent_modules_are_layers(self):
        model = Recurrent(proj_size=3)
        pre = self.preconditioner(model, method=None)
        methods = self.methods(pre)
        self.assertEqual({name: method for name, method in methods.items() if method != "muon"}, {"head": "identity"})
        self.assertEqual(sorted(name for name in pre.others if "weight" in name), ["table.weight"])
        sizes = {layer.name: (layer.d_out, layer.d_in) for layer in pre.layers}
        for name, gates, size in (("rnn.weight_ih_l1_reverse", 4, (4, 6)), ("rnn.weight_hh_l0", 4, (4, 3)), ("rnn.weight_hr_l0", 1, (3, 4)),
                                  ("gru.weight_ih_l0", 3, (3, 6)), ("plain.weight_hh_l0", 1, (2, 2)), ("cell.weight_ih", 3, (3, 2))):
            names = [name] if gates == 1 else [f"{name}.group{gate}" for gate in range(gates)]
            self.assertEqual([sizes.get(one) for one in names], [size] * gates, name)
        self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})
        twins = nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(3))
        other = self.preconditioner(twins, f"{self.name}-twins", method="muon")
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([[step, 2], [3, 6]])).square().sum().backward()
            for twin, gradient in zip(twins, model.cell.weight_ih.grad.chunk(3)):
                twin.weight.grad = gradient.clone()
            gradient, decisions = model.head.weight.grad.clone(), pre.step(1.0).decisions
            self.assertEqual(decisions.pop("head"), "IDENTITY")
            self.assertTrue(torch.equal(model.head.weight.grad, gradient))
            self.assertEqual(set(decisions.values()), {"PRECONDITIONED"})
            other.step(1.0)
            self.assertTrue(torch.equal(model.cell.weight_ih.grad, torch.cat([twin.weight.grad for twin in twins])))

    def test_recurrent_modules_of_other_choices(self):
        for number, (options, methods) in enumerate((
                ({"method": "soap"}, {"soap"}), ({"skip": ["rnn"]}, set()), ({"selection": Selection(skip_types=nn.LSTM)}, set()), ({"method": "mkor"}, set()),
                ({"method": "mkor", "parameter_methods": {"rnn.weight.*": "kron"}}, {"kron"}))):
            with self.subTest(options=options), warnings.catch_warnings(action="ignore"):
                pre = self.preconditioner(Recurrent(), f"{self.name}-{number}", **{"method": None, **options})
                self.assertEqual({method for name, method in self.methods(pre).items() if name.startswith("rnn")}, methods)

    def test_a_model_most_of_which_is_no_layer(self):
        class Own(nn.Module):
            def __init__(self, frozen=False, layers=1):
                super().__init__()
                self.rows, self.table = nn.Parameter(torch.randn(9, 6), not frozen and layers == 1), nn.Embedding(70, 6)
                self.body = nn.Sequential(*(nn.Linear(6, 7 - layer) for layer in range(layers)))

        cases = (({}, {}, r"most of the model's weights are in modules that it does not know\. muon .*: rows\.", "muon"),
                 ({}, {"selection": Selection(max_dim=8)}, r"are no layers, and are left .* method is therefore mkor.*: rows\.", "mkor"),
                 ({}, {"method": "eva"}, r"are no layers, and are left to the optimizer: rows\. register_layer", "eva"),
                 ({}, {"parameter_methods": {"rows": "soap"}}, "", "muon"), ({"frozen": True}, {}, "", "muon"),
                 ({"layers": 2}, {"skip": ["body.0"]}, "", "eva"), ({"layers": 2}, {"skip": ["body.0"], "method": None}, "no layers", "mkor"))
        for number, (model, options, warning, method) in enumerate(cases):
            with self.subTest(options=options), warnings.catch_warnings(record=True, action="always") as caught:
                pre = self.preconditioner(Own(**model), f"{self.name}-{number}", **{"method": "eva" if model.get("layers") else None, **options})
                self.assertEqual(len(caught), 1 if warning else 0)
                self.assertRegex("".join(str(one.message) for one in caught), warning or "^$")
                self.assertEqual(pre.spec.method.name, method)
                scale = {"mkor": 0.5, "muon": 4.0, "eva": 1.0}[method]  # mkor is the default's, and lr about twice AdamW's own
                betas = (0.95, 0.95) if method == "muon" else (0.9, 0.999)
                groups = [group for group in pre.make_optimizer(0.1).param_groups if not group["plain"]]
                self.assertEqual({group["betas"] for group in groups}, {betas})
                self.assertEqual({group["lr_scale"] for group in groups} - {1.0 if method == "muon" else None}, {scale})

    def test_the_clip_has_the_rate_of_its_layers(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.rows, self.body = nn.Parameter(torch.randn(70, 6)), nn.Linear(6, 3)

            def forward(self, x):
                return self.body(self.rows[x])

        # Half the rate, and beside a table at four times the rate.
        for kind, layer, rate, options in ((Own, "body", 0.05, {"selection": Selection(max_dim=64)}), (Net, "head", 0.1, {})):
            scales = []
            for given in (None, rate):
                torch.manual_seed(5)
                model = kind()
                with warnings.catch_warnings(action="ignore"):
                    pre = self.preconditioner(model, f"{self.name}-{layer}-{given}", method=None, layer_methods={layer: "kfac"}, **options)
                pre.make_optimizer(0.1)
                (100 * model(torch.arange(7)).square().sum()).backward()
                scales.append(pre.step(1.0, learning_rate=given).scale)
            self.assertLess(scales[0], 1.0)
            self.assertEqual(scales[0], scales[1])

    def test_convolutions(self):
        model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3))
        pre = self.preconditioner(model, method=None, layer_methods={"1": "kron"})
        self.assertEqual(self.methods(pre), {"0.group0": "soap", "0.group1": "soap", "1": "kron", "3": "soap"})
        intervals = {one.layers: one.method.options.get("refresh_interval") for one in pre.spec.layer_methods}
        self.assertEqual(intervals, {(2,): None, (0, 1): 5, (3,): None})

    def test_the_first_and_the_last_layer_are_not_hidden(self):
        pre = self.preconditioner(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)), method=None)
        self.assertEqual(self.methods(pre), {"0": "soap", "2": "muon", "3": "soap"})

    def test_tables_of_words_and_ends(self):
        """Layers with soap, and tables at four times the rate."""
        class Text(nn.Module):
            """A head for each row of the table of words, behind a projection of its width or not."""

            def __init__(self, words=40, places=24, width=24, narrow=24, tied=False, outputs=None):
                super().__init__()
                self.words, self.places, self.types = nn.Embedding(words, narrow), nn.Embedding(places, width), nn.Embedding(2, width)
                self.up, self.wide, self.back = nn.Linear(narrow, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
                self.down, self.head = nn.Linear(width, narrow), nn.Linear(narrow, outputs or words)
                if tied:
                    self.head.weight = self.words.weight

        for number, (options, ends, tables) in enumerate((
                ({}, ["head"], True), ({"narrow": 10}, ["head"], True), ({"words": 20}, ["head"], True),
                ({"words": 96}, ["head"], True),  # as many as wide has outputs
                ({"tied": True}, ["words.weight", "places.weight", "types.weight"], False), ({"outputs": 3}, [], True))):
            with self.subTest(**options):
                model = Text(**options)
                pre = self.preconditioner(model, f"{self.name}-{number}", method=None)
                self.assertEqual([name for name, method in self.methods(pre).items() if method == "soap"], ends)
                scaled = {id(one) for group in pre.param_groups() if group["lr_scale"] == 4.0 for one in group["params"]}
                self.assertEqual(scaled, {id(one.weight) for one in (model.words, model.places, model.types)} if tables else set())

    def test_a_tied_weight_is_one_layer(self):
        pre = self.preconditioner(Net(tied=True), method=None)
        self.assertEqual(self.methods(pre), {"body": "muon", "table.weight": "soap"})
        self.assertEqual(set(pre.others), {"norm.weight", "norm.bias", "head.bias"})
        self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})
        pre = self.preconditioner(Net(tied=True), f"{self.name}-2", method=None, selection=Selection(embeddings=""))
        self.assertEqual(self.methods(pre), {"body": "muon"})

    def test_embeddings_of_one_weight_and_of_a_computed_one(self):
        model = Net()
        model.twin = nn.Embedding(7, 6)
        model.twin.weight = model.table.weight
        model.computed = nn.utils.weight_norm(nn.Embedding(7, 6))
        pre = self.preconditioner(model, method=None)
        scaled = [group["params"] for group in pre.param_groups() if group["lr_scale"] != 1]
        self.assertEqual([list(map(id, group)) for group in scaled], [[id(model.table.weight)]])

    def test_what_it_is_not_for(self):
        model = Net()
        adamw, momentum = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        plain, own = torch.optim.SGD(model.parameters(), 0.1), precondor.torch.BaseOptimizer(model.parameters())
        for name, options, method in (("adamw", {"optimizer": adamw}, "mkor"), ("momentum", {"optimizer": momentum}, "mkor"),
                                      ("replay", {"exchange": "REPLAY"}, "mkor"),
                                      ("fallback", {"fallback": precondor.Fallback("LOSS_RATE")}, "mkor"),
                                      ("plain", {"optimizer": plain}, "mkor"), ("own", {"optimizer": own}, "mkor")):
            with self.subTest(name=name):
                pre = self.preconditioner(model, name, method=None, **options)
                self.assertEqual(pre.spec.method.name, method)
                self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})

    def test_a_fallback_of_whole_updates_is_refused(self):
        fallback = precondor.Fallback("AT_STEP", at_step=2)
        for options, pattern in (({"method": "muon"}, "^fallback: 2 layers, the first of them body, have methods whose answers are whole updates"),
                                 ({"layer_methods": {"head": "soap"}}, "^fallback: 1 layers, the first of them head"),
                                 ({"parameter_methods": {"table.*": "kron"}}, "^fallback: 1 layers, the first of them table.weight")):
            with self.subTest(**options):
                self.expect(precondor.InvalidArgumentError, f"{pattern}.*whose answers suit AdamW", self.preconditioner, Net(), fallback=fallback, **options)
                self.preconditioner(Net(), fallback=precondor.Fallback(), client=precondor.ClientOptions(replace=True), **options)

    def test_a_users_choice_goes_before_the_defaults(self):
        pre = self.preconditioner(Net(), method=None, layer_methods={"head": "kron"}, selection=Selection(embeddings="soap"))
        self.assertEqual(self.methods(pre), {"body": "muon", "head": "kron", "table.weight": "soap"})
        self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})

    def begin(self, address, name, released=False, **options):
        """released: by the default of earlier releases, which had no input factors."""
        before = {kind: tuple(_recipe._MUON if method is _recipe._MUON_WITH_FACTOR else method for method in row)
                  for kind, row in _recipe.RECIPE.items()}
        model = Net()
        with mock.patch.dict(_recipe.RECIPE, before if released else {}), \
                mock.patch.object(_recipe, "_MUON_WITH_FACTOR", _recipe._MUON if released else _recipe._MUON_WITH_FACTOR):
            pre = Preconditioner(model, address, session=name, **options)
        self.addCleanup(pre.close)
        return pre, model, pre.make_optimizer(0.02)

    @staticmethod
    def train(pre, model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.arange(7)), (torch.arange(7) + pre.step_number) % 7)
            loss.backward()
            pre.step(loss)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def test_a_job_goes_on_with_the_default_that_it_began_with(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        address = self.enterContext(LocalServer([f"--data-dir={folder}/data", "--lease-steps=2"])).address

        def control(action):
            return subprocess.run([path_of("precondorctl"), f"--server={address}", "snapshot", action, "snapshot", "--json"],
                                  capture_output=True, check=True).stdout

        def is_complete(step):
            return any(one["step"] == step and one["state"] == "complete" for one in json.loads(control("list"))["session_snapshots"])

        whole, anew = self.train(*self.begin(address, "whole", released=True), 30), self.train(*self.begin(address, "anew"), 30)
        self.assertFalse(torch.equal(whole[1], anew[1]))
        for name, factors in (("checkpoint", True), ("session", False), ("snapshot", False)):
            with self.subTest(name):
                pre, model, optimizer = self.begin(address, name, released=True)
                self.assertRegex(str(pre), "body +muon +hidden")
                self.train(pre, model, optimizer, 15)
                if name == "snapshot":
                    control("create")
                    while not pre.checkpoint_due:
                        self.train(pre, model, optimizer, 1)
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), pre.state_dict(factors=factors)))
                options = {}
                if name == "snapshot":
                    self.train(pre, model, optimizer, 5)
                    wait_for("the snapshot to be complete", lambda: is_complete(saved[2]["step"]), 120)
                    options = {"snapshot_paths": shutil.copytree(f"{folder}/data", f"{folder}/copy")}
                pre.close(end_session=name != "session")
                pre, *rest = self.begin(address, name)
                self.assertRegex(str(pre), "body +muon +hidden" if name == "session" else "body +muon with input factor +hidden")
                for one, state in zip(rest, saved):
                    one.load_state_dict(state)
                pre.load_state_dict(saved[2], **options)
                self.assertRegex(str(pre), "body +muon +hidden")
                for one, other in zip(self.train(pre, *rest, 30 - pre.step_number), whole):
                    self.assertTrue(torch.equal(one, other))

    def test_what_a_user_has_changed_is_named_and_not_the_factor(self):
        changed = {"layer_methods": {"head": precondor.Method("soap", {"refresh_interval": 3})}}
        for released in (True, False):
            with self.subTest(released=released):
                name = f"{self.name}-{released}"
                pre, *rest = self.begin(self.server.address, name, released)
                self.train(pre, *rest, 2)
                state = pre.state_dict(factors=True)
                self.expect(precondor.FailedPreconditionError, r'layers\[1\] "head": have soap\{max_factor_dim=2048\}.*, got soap\{refresh_interval=3\}',
                            self.begin, self.server.address, name, **changed)
                pre.close(end_session=True)
                self.expect(precondor.FailedPreconditionError, "layer head: .*expected .*refresh_interval 3 ",
                            self.begin(self.server.address, name, **changed)[0].load_state_dict, state)
                state["factors"] = tuple(one[:-1] for one in state["factors"])
                self.expect(precondor.DataLossError, "layer body: .*checksum",
                            self.begin(self.server.address, name)[0].load_state_dict, state)

    def test_without_room_for_factors_there_are_none(self):
        model = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 4))

        def printed(memory):
            with Preconditioner(model, "local", client=precondor.ClientOptions(local_memory=str(memory))) as pre:
                return str(pre)

        with self.assertRaises(precondor.ResourceExhaustedError) as caught:
            printed("8MiB")
        needed = int(re.search(r"needed (\d+) bytes", str(caught.exception))[1])
        self.assertRegex(printed(needed), "muon with input factor +hidden")
        self.assertRegex(printed(needed - 1), "muon +hidden")

    def test_a_state_of_other_methods_is_refused(self):
        state = self.preconditioner(Net(), method="mkor").state_dict()
        state["session"] = self.name + "-2"
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "layer body: it has the method mkor, this session has muon"):
            self.preconditioner(Net(), self.name + "-2", method=None).load_state_dict(state)

    def test_an_optimizer_of_its_own_is_asked_for(self):
        model = Net()
        model(torch.arange(7)).sum().backward()
        adamw, sgd, own = (kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD, precondor.torch.BaseOptimizer))
        apart = torch.optim.AdamW([*model.body.parameters(), *model.table.parameters(), *model.norm.parameters()])
        for number, (options, warning) in enumerate((
                ({"method": None}, "answers of muon and soap .* AdamW and the like .*make_optimizer"),
                ({"method": "muon"}, "answers of muon "), ({"method": "soap"}, "answers of soap "), ({"method": "kron"}, "answers of kron "),
                ({"method": "muon", "optimizer": adamw}, "which AdamW would"), ({"layer_methods": {"head": "muon"}}, "answers of muon "),
                ({"layer_methods": {"head": "muon"}, "optimizer": own}, "which BaseOptimizer would"),
                ({"layer_methods": {"head": "muon"}, "optimizer": apart}, ""), ({"method": "soap", "optimizer": Wrapper(adamw)}, "which AdamW would"),
                ({"method": None, "optimizer": Wrapper(adamw)}, ""), ({"method": "soap", "optimizer": Wrapper(Wrapper(sgd))}, ""),
                ({"method": "muon", "optimizer": sgd}, ""), ({"method": None, "optimizer": adamw}, ""), ({}, ""), ({"optimizer": adamw}, ""))):
            with self.subTest(options=options):
                self.expect_warning(warning, self.preconditioner(model, f"{self.name}-{number}", **options).step, 1.0)
        for make in (lambda pre: pre.make_optimizer(0.1), lambda pre: pre.param_groups()):
            pre = self.preconditioner(model, f"{self.name}-{make.__code__.co_firstlineno}", method="muon")
            make(pre)
            self.expect_warning("", pre.step, 1.0)
            pre.close(end_session=True)

    def test_an_optimizer_that_is_made_first(self):
        """make_optimizer makes that of a Preconditioner of the same options, which uses it as its own."""
        for number, options in enumerate(({}, {"method": "kron"}, {"method": "mkor"}, {"skip": ["body"]}, {"layer_methods": {"head": "kfac"}},
                                          {"parameter_methods": {"table.weight": "muon"}}, {"selection": Selection(fold_bias=False)})):
            with self.subTest(options=options):
                model = Net()
                wanted = self.preconditioner(model, f"{self.name}-{number}-own", **{"method": None, **options}).make_optimizer(0.1, weight_decay=0.3)
                made = make_optimizer(torch.compile(model), 0.1, weight_decay=0.3, **options)
                pre = self.preconditioner(model, f"{self.name}-{number}", **{"method": None, "optimizer": made, **options})
                self.assertEqual([{**group, "params": [*map(id, group["params"])]} for group in made.param_groups],
                                 [{**group, "params": [*map(id, group["params"])]} for group in wanted.param_groups])
                model(torch.arange(7)).sum().backward()
                with warnings.catch_warnings(record=True, action="always") as caught:
                    pre.step(1.0)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    made.step()
                self.assertEqual(["gradients were changed" in str(one.message) for one in caught], [True] * (options.get("method") != "mkor"))
        model = Net()
        pre = self.preconditioner(model, f"{self.name}-other", method="mkor", optimizer=make_optimizer(model, 0.1))
        model(torch.arange(7)).sum().backward()
        with self.assertWarnsRegex(UserWarning, "applies gradients as whole updates that are none"):
            pre.step(1.0)

    # --- stacks of experts ------------------------------------------------------------------------------------------------

    def test_each_expert_is_a_layer(self):
        experts = [f"experts.{name}.expert{expert}" for name in ("up", "down") for expert in range(3)]
        pre = self.preconditioner(Mixture(), method=None, selection=Selection(max_dim=20))
        self.assertEqual(self.methods(pre), {"first": "soap", "last": "soap", **dict.fromkeys(experts, "muon")})
        self.assertEqual([(layer.d_out, layer.d_in) for layer in pre.layers if layer.name in experts], [(5, 4)] * 3 + [(5, 3)] * 3)
        self.assertEqual(set(pre.others), {"experts.bias", "other.places", "experts.pairs.weight", "experts.pairs.bias", "experts.conv.weight", "experts.conv.bias"})
        for number, (options, methods) in enumerate((
                ({"selection": Selection(max_dim=20, experts="")}, {}), ({"skip": ["experts"]}, {}), ({"method": "mkor"}, {}),
                ({"method": "mkor", "selection": Selection(max_dim=20, experts="kron")}, dict.fromkeys(experts, "kron")),
                ({"method": "soap"}, dict.fromkeys(experts, "soap")),
                ({"selection": Selection(max_dim=20, experts=""), "parameter_methods": {".*up": "soap"}}, dict.fromkeys(experts[:3], "soap")))):
            with self.subTest(options=options):
                pre = self.preconditioner(Mixture(), f"{self.name}-{number}", **{"method": None, "selection": Selection(max_dim=20), **options})
                self.assertEqual({name: method for name, method in self.methods(pre).items() if "expert" in name}, methods)
        self.expect(precondor.InvalidArgumentError, "selection.experts: expected one of kron, soap, muon, .* got mkor",
                    Selection, experts="mkor")

    def test_an_expert_is_as_a_linear_layer_and_stays_where_no_row_comes(self):
        model = Mixture()
        twins = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3))
        pre = self.preconditioner(model, method=None, selection=Selection(max_dim=20))
        other = self.preconditioner(twins, f"{self.name}-twins", method="muon")
        for routed in ([0, 1, 2], [0, 2], [1, 1], [2, 0, 1]):
            model.zero_grad()
            model(torch.randn(len(routed), 4), torch.tensor(routed)).square().sum().backward()
            for twin, gradient in zip(twins, model.experts.up.grad):
                twin.weight.grad = gradient.clone()
            self.assertEqual(set(pre.step(1.0).decisions.values()), {"PRECONDITIONED"})
            other.step(1.0)
            for expert, (twin, got) in enumerate(zip(twins, model.experts.up.grad)):
                if expert in routed:
                    self.assertTrue(torch.equal(got, twin.weight.grad))
                else:
                    self.assertEqual(got.count_nonzero(), 0)
                    self.assertGreater(twin.weight.grad.count_nonzero(), 0)

    # --- embeddings -------------------------------------------------------------------------------------------------------

    def test_on_request(self):
        model = Net()
        pre = self.preconditioner(model, selection=Selection(embeddings="kron"), parameter_methods={"norm.*|table.*": "soap"})
        self.assertEqual(self.methods(pre), {"body": "mkor", "head": "mkor", "table.weight": "soap"})
        pre = self.preconditioner(model, f"{self.name}-2", selection=Selection(embeddings="kron"), layer_methods={"head": "soap"})
        self.assertEqual(self.methods(pre), {"body": "mkor", "head": "soap", "table.weight": "kron"})
        pre = self.preconditioner(model, f"{self.name}-3", selection=Selection(embeddings="kron"), skip=["table"])
        self.assertEqual(pre.others["table.weight"], "skip")
        pre = self.preconditioner(Net(sparse=True), f"{self.name}-4", selection=Selection(embeddings="kron"))
        self.assertEqual(pre.others["table.weight"], "its gradients are sparse")
        self.expect(precondor.InvalidArgumentError, "selection.embeddings: expected one of kron, soap, muon, .* got mkor",
                    Selection, embeddings="mkor")

    def test_rows_that_a_step_did_not_look_up_stay(self):
        for method in ("soap", "muon", precondor.Method("soap", {"max_factor_dim": 6})):
            name = f"{self.name}-{getattr(method, 'name', method)}-{isinstance(method, str)}"
            model, twin = Net(), nn.ModuleDict({"table": nn.Linear(6, 7, bias=False)})
            pre = self.preconditioner(model, name, selection=Selection(embeddings=method))
            other = self.preconditioner(twin, f"{name}-twin", method=method)
            for rows in LOOKED_UP:
                model.zero_grad()
                model(torch.tensor(list(rows))).square().sum().backward()
                twin["table"].weight.grad = model.table.weight.grad.clone()
                self.assertEqual(pre.step(1.0).decisions["table.weight"], "PRECONDITIONED")
                other.step(1.0)
                got, wanted = model.table.weight.grad, twin["table"].weight.grad
                untouched = sorted(set(range(7)) - set(rows))
                self.assertEqual(got[untouched].count_nonzero(), 0)
                self.assertTrue(torch.equal(got[list(rows)], wanted[list(rows)]))
                if untouched:
                    self.assertGreater(wanted[untouched].abs().min(), 0)


if __name__ == "__main__":
    torch_case.main()
