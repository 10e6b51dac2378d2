#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Preconditioner does where no method is named, and with embeddings.

Skips with 77, and says so, where torch is not installed.
"""

import torch_case  # before torch: it skips where there is none
import torch
from torch import nn

import precondor

# Of the table, by step: the first two look up every row, so that each has momentum.
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
        self.experts.pairs, self.experts.conv = nn.Bilinear(2, 2, 2), nn.Conv1d(2, 2, 70)
        self.last = nn.Linear(3, 4)

    def forward(self, x, expert):
        x = self.first(x + self.other.places[0, 0])
        up, down = self.experts.up[expert], self.experts.down[expert]
        x = torch.tanh(up @ x[..., None]).transpose(-2, -1) @ down
        return self.last(x[..., 0, :] + self.experts.bias[expert])


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
        self.assertEqual(set(pre.left), {"norm.weight", "norm.bias", "table.weight"})
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

    def test_convolutions(self):
        model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3))
        pre = self.preconditioner(model, method=None, layer_methods={"1": "kron"})
        self.assertEqual(self.methods(pre), {"0.group0": "soap", "0.group1": "soap", "1": "kron", "3": "soap"})
        intervals = {one.layers: one.method.options.get("refresh_interval") for one in pre.spec.layer_methods}
        self.assertEqual(intervals, {(2,): None, (0, 1): 5, (3,): None})

    def test_the_first_and_the_last_layer_are_not_hidden(self):
        pre = self.preconditioner(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)), method=None)
        self.assertEqual(self.methods(pre), {"0": "soap", "2": "muon", "3": "soap"})

    def test_a_tied_weight_is_one_layer(self):
        pre = self.preconditioner(Net(tied=True), method=None)
        self.assertEqual(self.methods(pre), {"body": "muon", "table.weight": "soap"})
        self.assertEqual(set(pre.left), {"norm.weight", "norm.bias", "head.bias"})
        self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})
        pre = self.preconditioner(Net(tied=True), f"{self.name}-2", method=None, embeddings="")
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
                                      ("fallback", {"fallback": {"policy": "LOSS_RATE"}}, "mkor"),
                                      ("plain", {"optimizer": plain}, "mkor"), ("own", {"optimizer": own}, "mkor")):
            with self.subTest(name=name):
                pre = self.preconditioner(model, name, method=None, **options)
                self.assertEqual(pre.spec.method.name, method)
                self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})

    def test_a_users_choice_goes_before_the_defaults(self):
        pre = self.preconditioner(Net(), method=None, layer_methods={"head": "kron"}, embeddings="soap")
        self.assertEqual(self.methods(pre), {"body": "muon", "head": "kron", "table.weight": "soap"})
        self.assertEqual({group["lr_scale"] for group in pre.param_groups()}, {1.0})

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
                ({"layer_methods": {"head": "muon"}, "optimizer": apart}, ""),
                ({"method": "muon", "optimizer": sgd}, ""), ({"method": None, "optimizer": adamw}, ""), ({}, ""), ({"optimizer": adamw}, ""))):
            with self.subTest(options=options):
                self.expect_warning(warning, self.preconditioner(model, f"{self.name}-{number}", **options).step, 1.0)
        for make in (lambda pre: pre.make_optimizer(0.1), lambda pre: pre.param_groups()):
            pre = self.preconditioner(model, f"{self.name}-{make.__code__.co_firstlineno}", method="muon")
            make(pre)
            self.expect_warning("", pre.step, 1.0)
            pre.close(end_session=True)

    # --- stacks of experts ------------------------------------------------------------------------------------------------

    def test_each_expert_is_a_layer(self):
        experts = [f"experts.{name}.expert{expert}" for name in ("up", "down") for expert in range(3)]
        pre = self.preconditioner(Mixture(), method=None, max_dim=100)
        self.assertEqual(self.methods(pre), {"first": "soap", "last": "soap", **dict.fromkeys(experts, "muon")})
        self.assertEqual([(layer.d_out, layer.d_in) for layer in pre.layers if layer.name in experts], [(5, 4)] * 3 + [(5, 3)] * 3)
        self.assertEqual(set(pre.left), {"experts.bias", "other.places", "experts.pairs.weight", "experts.pairs.bias", "experts.conv.weight", "experts.conv.bias"})
        for number, (options, methods) in enumerate((
                ({"experts": ""}, {}), ({"skip": ["experts"]}, {}), ({"method": "mkor"}, {}),
                ({"method": "mkor", "experts": "kron"}, dict.fromkeys(experts, "kron")),
                ({"method": "soap"}, dict.fromkeys(experts, "soap")),
                ({"experts": "", "parameter_methods": {".*up": "soap"}}, dict.fromkeys(experts[:3], "soap")))):
            with self.subTest(options=options):
                pre = self.preconditioner(Mixture(), f"{self.name}-{number}", **{"method": None, "max_dim": 100, **options})
                self.assertEqual({name: method for name, method in self.methods(pre).items() if "expert" in name}, methods)
        self.expect(precondor.InvalidArgumentError, "experts: expected one of kron, soap, muon, .* got mkor",
                    self.preconditioner, Mixture(), experts="mkor")

    def test_an_expert_is_as_a_linear_layer_and_stays_where_no_row_comes(self):
        model = Mixture()
        twins = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3))
        pre = self.preconditioner(model, method=None, max_dim=100)
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
        pre = self.preconditioner(model, embeddings="kron", parameter_methods={"norm.*|table.*": "soap"})
        self.assertEqual(self.methods(pre), {"body": "mkor", "head": "mkor", "table.weight": "soap"})
        pre = self.preconditioner(model, f"{self.name}-2", embeddings="kron", layer_methods={"head": "soap"})
        self.assertEqual(self.methods(pre), {"body": "mkor", "head": "soap", "table.weight": "kron"})
        pre = self.preconditioner(model, f"{self.name}-3", embeddings="kron", skip=["table"])
        self.assertEqual(pre.left["table.weight"], "skip")
        pre = self.preconditioner(Net(sparse=True), f"{self.name}-4", embeddings="kron")
        self.assertEqual(pre.left["table.weight"], "its gradients are sparse")
        self.expect(precondor.InvalidArgumentError, "embeddings: expected one of kron, soap, muon, .* got mkor",
                    self.preconditioner, model, embeddings="mkor")

    def test_rows_that_a_step_did_not_look_up_stay(self):
        for method in ("soap", "muon", precondor.Method("soap", {"max_factor_dim": 6})):
            name = f"{self.name}-{getattr(method, 'name', method)}-{isinstance(method, str)}"
            model, twin = Net(), nn.ModuleDict({"table": nn.Linear(6, 7, bias=False)})
            pre = self.preconditioner(model, name, embeddings=method)
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
    torch_case.main(__doc__)
