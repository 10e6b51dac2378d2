#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.migrate: every argument of the libraries is taken or refused by its name, and servers take the results."""

import enum
import inspect
import pathlib
import sys
import unittest.mock

import numpy as np
import torch
from torch import nn

from precondor import InvalidArgumentError, Statistics, migrate
import migrate_signatures as signatures
import torch_case

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "reference"))
import published  # pylint: disable=wrong-import-position

ComputeMethod = enum.Enum("ComputeMethod", ["EIGEN", "INVERSE"])
DistributedStrategy = enum.Enum("DistributedStrategy", ["COMM_OPT", "MEM_OPT", "HYBRID_OPT"])
RATE = 0.01


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


def convolutional():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.Tanh(), nn.Flatten(),
                         nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 2))


def square():
    """Its first gradients have full rank, which settles the bases that SOAP makes of them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))


def linear():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False))


def rows_of(model, x, y):
    """(D, rows a, rows g, positions) in f64, as tests/reference/published.py has them, for each layer of a model."""
    made, x = [], x.double()
    for module in model.double():
        before, x = x.detach().numpy(), module(x)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            x.retain_grad()
            made.append((module, before, x))
    (x - y.double()).square().sum(1).mean().backward()
    for module, a, output in made:
        g, positions, d = output.grad.numpy(), 1, module.weight.grad.numpy()
        if isinstance(module, nn.Conv2d):
            a = published.patches(a, module.kernel_size[0], module.stride[0], module.padding[0])
            positions = len(a) // len(g)
            g, d = g.transpose(0, 2, 3, 1).reshape(-1, g.shape[1]), d.reshape(len(d), -1)
        if module.bias is not None:
            a, d = np.pad(a, ((0, 0), (0, 1)), constant_values=1), np.column_stack([d, module.bias.grad.numpy()])
        yield d, a, g, positions


def matrices(model):
    """The gradients of the layers, as rows_of() has them."""
    for module in model:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            d = module.weight.grad.numpy().reshape(len(module.weight), -1)
            yield d if module.bias is None else np.column_stack([d, module.bias.grad.numpy()])


def kaisa(**arguments):
    return migrate.kaisa(model(), rows=8, **arguments)


def mkor(**arguments):
    return migrate.mkor(model(), **arguments)


class MigrateTest(torch_case.ServerCase):
    def refuses(self, pattern, function, **arguments):
        self.expect(InvalidArgumentError, pattern, function, **arguments)

    def test_every_argument_is_known_and_no_other(self):
        for library in migrate.__all__:
            names, function = getattr(signatures, library.upper()), globals().get(library, getattr(migrate, library))
            with self.assertRaises(InvalidArgumentError) as caught:
                function(dampening=1)
            known = caught.exception.message.split("expected one of ")[1].split(", ")
            self.assertEqual(known, sorted(names))
        self.assertEqual(list(inspect.signature(torch.optim.Muon).parameters)[1:], signatures.MUON)

    def test_kaisa(self):
        arguments = kaisa()
        self.assertEqual(arguments["method"].options, {
            "form": "EIGEN", "prediv": True, "damping": 0.001, "factor_decay": 0.95, "inv_update_steps": 1, "row_scale": 8.0,
            "stagger": False, "scaling": "KL_CLIP", "scaling_clip": 0.001})
        self.assertEqual(arguments["statistics"], Statistics("COVARIANCE", mean_positions=True, inv_freq=1, warmup_steps=0, dtype="f32"))
        self.assertEqual(arguments["skip"], [])
        arguments = kaisa(factor_update_steps=10, inv_update_steps=100, kl_clip=None, compute_method=ComputeMethod.INVERSE,
                          skip_layers=["Conv", "^5$"], factor_dtype=torch.float32)
        options = arguments["method"].options
        self.assertEqual((arguments["statistics"].inv_freq, options["inv_update_steps"]), (10, 10))
        self.assertEqual((options["form"], options["prediv"], options["scaling"]), ("INVERSE", False, "NONE"))
        self.assertEqual(arguments["skip"], ["0", "5"])
        self.refuses("kaisa: inv_update_steps: expected a multiple of factor_update_steps, 10, got 15", kaisa,
                    factor_update_steps=10, inv_update_steps=15)
        self.refuses("kaisa: damping: expected a number, got <function.*Servers call no function", kaisa, damping=lambda step: 0.1)
        self.refuses("kaisa: factor_update_steps: expected a whole number from 1, got <function", kaisa,
                    factor_update_steps=lambda step: 1)
        self.refuses(r"kaisa: skip_layers: .*'head' has none", kaisa, skip_layers=["Linear", "head"])
        self.refuses("kaisa: factor_dtype: expected float32, or none, got torch.float16", kaisa, factor_dtype=torch.float16)
        self.refuses(r"kaisa: grad_scaler: expected none.*step\(loss, scaler", kaisa, grad_scaler=object())
        self.refuses("compute_method: expected one of EIGEN, INVERSE, got 'svd'", kaisa, compute_method="svd")
        for given in (1, 1.0, "COMM_OPT", DistributedStrategy.COMM_OPT):
            self.assertEqual(kaisa(grad_worker_fraction=given)["exchange"], "PULL_FACTORS")
        for given in (0, "MEM_OPT", DistributedStrategy.MEM_OPT):
            self.assertNotIn("exchange", kaisa(grad_worker_fraction=given))
        for given in (0.5, DistributedStrategy.HYBRID_OPT):
            self.refuses("kaisa: grad_worker_fraction: expected COMM_OPT or 1, or MEM_OPT or 0, got", kaisa, grad_worker_fraction=given)
        self.refuses("kaisa: assignment_strategy: expected COMPUTE, got 'memory'", kaisa, assignment_strategy="memory")
        self.refuses("kaisa: colocate_factors: expected True, got False", kaisa, colocate_factors=False)

    def test_what_the_libraries_do_not_know_is_left_out(self):
        class Own(nn.Linear):
            """kfac-pytorch takes subclasses, MKOR does not."""

        own = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 2, 3), nn.LayerNorm(4), Own(4, 2))
        self.assertEqual(migrate.kaisa(own, rows=2)["skip"], ["1", "2"])
        self.assertEqual(migrate.mkor(own, sgd_layers=[own[0]])["skip"], ["0", "1", "2", "3"])

    def test_mkor(self):
        own = model()
        arguments = migrate.mkor(own, inv_freq=5, warmup_steps=20, sgd_layers=[own[3]], half_precision=False)
        self.assertEqual(arguments["method"].options, {
            "rule": "REFERENCE", "representation": "DENSE", "storage": "F32", "gamma": 0.95, "clip": 100.0})
        self.assertEqual((arguments["statistics"], arguments["skip"]), (Statistics("MEAN", inv_freq=5, warmup_steps=20, dtype="f32"), ["3"]))
        self.assertEqual(mkor()["statistics"].dtype, "f16")
        self.refuses("mkor: clipping_value: expected a number, got <function.*give the number", mkor, clipping_value=lambda step: 100)
        self.refuses("mkor: optimizer: expected none, got 'sgd'. The optimizer stays yours", mkor, optimizer="sgd")
        self.refuses("mkor: lr: expected one of .*The optimizer stays yours", mkor, lr=0.1)
        self.refuses("mkor: sgd_layers: expected modules of the model", mkor, sgd_layers=[nn.Linear(2, 2)])
        self.refuses("mkor: grad_scale: expected 1, got 1024", mkor, grad_scale=1024)

    def test_distributed_kron(self):
        options = migrate.distributed_kron()["method"].options
        self.assertEqual((options["block_size"], options["target_merged_dim_size"], options["memory_save_mode"]), (256, 4096, "NONE"))
        self.assertNotIn("max_update_probability", options)
        arguments = migrate.distributed_kron(b1=0.8, preconditioner_update_probability=0.5, memory_save_mode="one_diag",
                                             partition_grads_into_blocks=False, mu_dtype="float32", scanned_layers={"a": True})
        options = arguments["method"].options
        self.assertEqual((arguments["b1"], options["momentum"], options["memory_save_mode"], options["block_size"],
                          options["max_update_probability"], options["min_update_probability"]), (0.8, 0.8, "ONE_DIAG", 0, 0.5, 0.5))
        self.assertEqual(arguments["scanned_layers"], {"a": True})
        kron = migrate.distributed_kron
        self.refuses("distributed_kron: learning_rate: expected none, got 0.1. Give it to precondor.optax.kron", kron, learning_rate=0.1)
        self.refuses("weight_decay: expected 0, got 0.1. Give it", kron, weight_decay=0.1)
        self.refuses("preconditioner_update_probability: expected a number, got <function.*min_update_probability, update_flat_steps", kron,
                    preconditioner_update_probability=lambda step: 1.0)
        self.refuses("b1: expected a number, got <function.*give the number", kron, b1=lambda step: 1.0)
        self.refuses("mu_dtype: expected float32, or none, got 'bfloat16'", kron, mu_dtype="bfloat16")
        self.refuses("precond_dtype: expected float32, or none, got torch.float16", kron, precond_dtype=torch.float16)
        for name in ("params_partition_specs", "preconditioner_partition_spec"):
            self.refuses(f"{name}: expected none, got .*Leave it out", kron, **{name: {"a": 1}})

    def greatest_difference(self, name, make, arguments, expected_answers, steps, *shape):
        """Trains, and compares each step's answers with those that are expected at the weights of the step."""
        own, greatest = make(), 0.0
        optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
        pre = self.preconditioner(own, name, optimizer=optimizer, **arguments)
        random = torch.Generator().manual_seed(2)  # make() begins torch's own anew
        for _ in range(steps):
            x, y = (torch.randn(*sides, generator=random) for sides in ((8, *shape), (8, own[-1].out_features)))
            twin = make()
            twin.load_state_dict(own.state_dict())
            optimizer.zero_grad()
            loss = (own(x) - y).square().sum(1).mean()
            loss.backward()
            pre.step(loss)
            for got, want in zip(matrices(own), expected_answers(list(rows_of(twin, x, y))), strict=True):
                greatest = max(greatest, np.linalg.norm(got - want) / np.linalg.norm(want))
            optimizer.step()
        return greatest

    def test_kaisa_answers_as_kfac_pytorch_also_on_convolutions(self):
        for arguments in ({"damping": 0.001}, {"damping": 0.03, "kl_clip": None}):
            layers = [published.KfacLayer(*sides, 0.95, arguments["damping"]) for sides in ((3, 19), (4, 27), (5, 37), (2, 6))]

            def answers(rows, layers=layers, clips=arguments.get("kl_clip", 0.001) is not None):
                for layer, (_, a, g, positions) in zip(layers, rows):
                    layer.update(a, g, positions)
                pairs = [(d, layer.answer(d)) for layer, (d, *_) in zip(layers, rows)]
                scale = published.kl_scale(pairs, RATE, 0.001) if clips else 1.0
                return [u * scale for _, u in pairs]

            migrated = migrate.kaisa(convolutional(), rows=8, **arguments)
            difference = self.greatest_difference(f"kfac-{arguments['damping']}", convolutional, migrated, answers, 200, 2, 8, 8)
            print(f"{arguments}: greatest relative difference of 200 steps {difference:.1e}")
            self.assertLess(difference, 5e-5)

    def test_mkor_answers_as_the_authors_package_in_full_precision(self):
        for half, bound in ((False, 2e-5), (True, 5e-3)):
            layers = [published.MkorLayer(9, 6), published.MkorLayer(3, 9)]

            def answers(rows, layers=layers):
                for layer, (_, a, g, _) in zip(layers, rows):
                    layer.update(a.mean(0), 8 * g.mean(0))  # a row's own gradient is 8 times what the mean loss shows
                return [layer.answer(d) for layer, (d, *_) in zip(layers, rows)]

            migrated = migrate.mkor(linear(), half_precision=half, inv_freq=1)
            difference = self.greatest_difference(f"mkor-{half}", linear, migrated, answers, 40, 6)
            print(f"half_precision={half}: greatest relative difference of 40 steps {difference:.1e}")
            self.assertLess(difference, bound)

    def test_kron_torch(self):
        arguments, optimizer = migrate.kron_torch(lr=0.1, weight_decay=0.2, b1=0.8, memory_save_mode="one_diag", precond_lr=0.3)
        method = arguments["method"]
        self.assertEqual((optimizer, arguments["selection"].embeddings), ({"lr": 0.1, "weight_decay": 0.2}, method))
        self.assertEqual(method.options, {
            "momentum": 0.8, "max_size_triangular": 8192, "min_ndim_triangular": 2, "memory_save_mode": "ONE_DIAG",
            "precondition_lr": 0.3, "init_scale": 1.0, "merge_small_dims": True, "update_flat_steps": 501.0})
        options = migrate.kron_torch(preconditioner_update_probability=0.5)[0]["method"].options
        self.assertEqual((options["max_update_probability"], options["min_update_probability"]), (0.5, 0.5))
        self.assertNotIn("update_flat_steps", options)
        self.refuses("kron_torch: memory_save_mode: expected one of NONE, ONE_DIAG, ALL_DIAG, got 'smart_one_diag'", migrate.kron_torch,
                     memory_save_mode="smart_one_diag")
        self.refuses("momentum_into_precond_update: expected True, got False. Factors learn", migrate.kron_torch,
                     momentum_into_precond_update=False)

    def test_soap_and_heavyball(self):
        arguments, optimizer = migrate.soap(betas=[0.9, 0.99], eps=1e-7, max_precond_dim=100)
        self.assertEqual(optimizer, {"lr": 0.003, "weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-7})
        self.assertEqual(arguments["method"].options, {
            "momentum": 0.9, "second_moment_decay": 0.99, "covariance_decay": 0.99, "epsilon": 1e-7, "refresh_interval": 10,
            "max_factor_dim": 100, "merge_small_dims": False})
        self.assertEqual(migrate.soap(shampoo_beta=0.0)[0]["method"].options["covariance_decay"], 0.0)
        options = migrate.heavyball_soap()[0]["method"].options
        self.assertEqual([options[name] for name in ("momentum", "covariance_decay", "refresh_interval", "max_factor_dim", "merge_small_dims")],
                         [0.9, 0.95, 2, 2048, True])
        self.refuses("soap: merge_dims: expected False, got True. It makes vectors", migrate.soap, merge_dims=True)
        self.refuses("soap: betas: expected two numbers, got 0.9", migrate.soap, betas=0.9)
        self.refuses("heavyball_soap: warmup_steps: expected 0, got 10. Leave it out, and give", migrate.heavyball_soap, warmup_steps=10)
        self.refuses("heavyball_soap: mars: expected False, got True. Leave it out", migrate.heavyball_soap, mars=True)

    def test_distributed_shampoo(self):
        Root = type("RootInvShampooPreconditionerConfig", (), {"use_trace_scaling": False, "inverse_exponent_override": {}})
        Corrected = type("EigenvalueCorrectedShampooPreconditionerConfig", (), {})
        Whole = type("SingleDeviceDistributedConfig", (), {"target_parameter_dimensionality": float("inf")})
        shampoo = migrate.distributed_shampoo
        options = shampoo(betas=(0.9, 0.99), preconditioner_config=Root(), max_preconditioner_dim=float("inf"))[0]["method"].options
        self.assertEqual(options, {"rule": "SHAMPOO", "momentum": 0.9, "covariance_decay": 0.99, "epsilon": 1e-12, "refresh_interval": 1,
                                   "max_factor_dim": 1 << 20, "merge_small_dims": True})
        self.assertFalse(shampoo(betas=(0.9, 0.99), distributed_config=Whole())[0]["method"].options["merge_small_dims"])
        scaled = Root()
        scaled.use_trace_scaling = True
        self.refuses(r"distributed_shampoo: betas: expected a second number below 1, got \(0.9, 1.0\). Factors are means", shampoo)
        for pattern, arguments in (
                ("beta3: expected -1, or betas.0., got 0.5", {"beta3": 0.5}),
                ("epsilon: expected at most 1e-8, got 0.001. Here it is a share of the largest", {"epsilon": 1e-3}),
                ("precondition_frequency: expected 1, got 50. Roots", {"precondition_frequency": 50}),
                ("start_preconditioning_step: expected -1, got 50", {"start_preconditioning_step": 50}),
                ("grafting_config: expected none, got .*take migrate.soap", {"grafting_config": object()}),
                ("weight_decay_type: expected DECOUPLED, got 'L2'", {"weight_decay_type": "L2"}),
                ("preconditioner_config: expected one without use_trace_scaling", {"preconditioner_config": scaled}),
                ("preconditioner_config: expected a RootInv.*eigenvalue correction take migrate.soap", {"preconditioner_config": Corrected()})):
            self.refuses("distributed_shampoo: " + pattern, shampoo, **{"betas": (0.9, 0.99), **arguments})

    def test_muon(self):
        arguments, optimizer = migrate.muon(momentum=0.9)
        self.assertEqual(optimizer, {"lr": 0.001, "weight_decay": 0.1})
        self.assertEqual(arguments["method"].options, {"momentum": 0.9, "nesterov": True, "epsilon": 1e-7, "ns_steps": 5, "scale": "ORIGINAL"})
        self.refuses("muon: adjust_lr_fn: expected one of NONE, ORIGINAL, MATCH_RMS_ADAMW, got 'spectral_unclamped'. For layers", migrate.muon,
                     adjust_lr_fn="spectral_unclamped")
        self.refuses("muon: ns_coefficients: expected .*, got .2, -1.5, 0.5.. The servers", migrate.muon, ns_coefficients=(2, -1.5, 0.5))
        pre = self.preconditioner(model(), **arguments)
        self.assertEqual([layer.name for layer in pre.layers], ["3", "5"])
        self.assertEqual(set(pre.others), {"0.weight", "0.bias", "3.bias", "5.bias"})

    def greatest_move(self, name, make, migrated, expected, steps):
        """Trains, and compares each step's move of each matrix with that of expected(place, weight, gradient) in f64."""
        own, (arguments, optimizer_arguments) = make(), migrated
        pre = self.preconditioner(own, name, **arguments)
        optimizer, greatest = pre.make_optimizer(**optimizer_arguments), []
        random = torch.Generator().manual_seed(2)
        for _ in range(steps):
            x, y = (torch.randn(32, side, generator=random) for side in (6, own[-1].out_features))
            optimizer.zero_grad()
            loss = (own(x) - y).square().mean()
            loss.backward()
            before = [weight.detach().numpy().astype(np.float64) for weight in own.parameters()]
            want = [expected(place, w, weight.grad.numpy().astype(np.float64)) for place, (w, weight) in enumerate(zip(before, own.parameters()))]
            pre.step(loss)
            optimizer.step()
            greatest.append(max(np.linalg.norm(weight.detach().numpy() - w) / max(np.linalg.norm(w - first), 1e-3)
                                for weight, w, first in zip(own.parameters(), want, before)))
        print(f"{name}: greatest difference of {steps} steps, in moves {max(greatest):.1e}, after the third {max(greatest[3:]):.1e}")
        return greatest

    def test_muon_moves_as_torchs_own_in_full_precision(self):
        for name, arguments in (("", {}), ("adamw", {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}), ("plain", {"nesterov": False})):
            twins = [nn.Parameter(one.detach().double()) for one in linear().parameters()]
            optimizers = [torch.optim.Muon([twin], lr=0.05, **arguments) for twin in twins]

            def expected(place, weight, gradient, twins=twins, optimizers=optimizers):
                twins[place].data, twins[place].grad = torch.from_numpy(weight.copy()), torch.from_numpy(gradient)
                with unittest.mock.patch.object(torch, "bfloat16", torch.float64):  # in which it iterates
                    optimizers[place].step()
                return twins[place].detach().numpy()

            self.assertLess(max(self.greatest_move("muon" + name, linear, migrate.muon(lr=0.05, **arguments), expected, 12)), 1e-5)

    def test_soap_and_shampoo_move_as_published(self):
        def moved(layers, rate):
            return lambda place, weight, gradient: weight - rate * layers[place].answer(gradient)

        for name, arguments in (("", {}), ("often", {"precondition_frequency": 3, "betas": (0.9, 0.99), "shampoo_beta": 0.8})):
            betas, every = arguments.get("betas", (0.95, 0.95)), arguments.get("precondition_frequency", 10)
            layers = [published.SoapLayer(betas, arguments.get("shampoo_beta", 0.95), 1e-8, every) for _ in range(2)]
            migrated = migrate.soap(lr=0.05, weight_decay=0, **arguments)
            self.assertLess(max(self.greatest_move("soap" + name, square, migrated, moved(layers, 0.05), 24)), 1e-5)
        layers = [published.ShampooLayer((0.9, 0.99), 1e-12) for _ in range(2)]
        migrated = migrate.distributed_shampoo(lr=0.05, betas=(0.9, 0.99))
        # The first factors are near to singular.
        self.assertLess(max(self.greatest_move("shampoo", square, migrated, moved(layers, 0.05), 24)[3:]), 1e-5)

    def train(self, name, arguments, optimizer_arguments=None):
        own = model()
        optimizer = None if optimizer_arguments else torch.optim.SGD(own.parameters(), lr=0.01)
        pre = self.preconditioner(own, name, optimizer=optimizer, **arguments)
        optimizer = optimizer or pre.make_optimizer(**optimizer_arguments)
        x = torch.randn(8, 1, 4, 4)
        for _ in range(2):
            optimizer.zero_grad()
            loss = own(x).square().mean()
            loss.backward()
            pre.step(loss)
            optimizer.step()
        self.assertTrue(all(torch.isfinite(parameter).all() for parameter in own.parameters()))

    def test_servers_take_the_results(self):
        self.train("kaisa", kaisa(inv_update_steps=2))
        self.train("kaisa-inverse", kaisa(compute_method="inverse", skip_layers=["Conv"]))
        self.train("kaisa-comm", kaisa(grad_worker_fraction=1))
        self.train("mkor", mkor())
        self.train("kron", {"method": migrate.distributed_kron()["method"]})
        for library in ("kron_torch", "muon", "soap", "heavyball_soap"):
            self.train(library, *getattr(migrate, library)())
        self.train("shampoo", *migrate.distributed_shampoo(betas=(0.9, 0.99)))


if __name__ == "__main__":
    torch_case.main()
