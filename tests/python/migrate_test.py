#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.migrate: every argument of the libraries is taken or refused by its name, and servers take the results."""

import enum
import warnings

import torch_case  # before torch: it skips where there is none
import torch
from torch import nn

from precondor import InvalidArgumentError, migrate
from migrate_signatures import DISTRIBUTED_KRON, KAISA, MKOR

ComputeMethod = enum.Enum("ComputeMethod", ["EIGEN", "INVERSE"])


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


def kaisa(**arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the convolution
        return migrate.kaisa(model(), rows=8, **arguments)


def mkor(**arguments):
    return migrate.mkor(model(), **arguments)


class MigrateTest(torch_case.ServerCase):
    def refuses(self, pattern, function, **arguments):
        self.expect(InvalidArgumentError, pattern, function, **arguments)

    def test_every_argument_is_known_and_no_other(self):
        for names, function in ((KAISA, kaisa), (MKOR, mkor), (DISTRIBUTED_KRON, migrate.distributed_kron)):
            with self.assertRaises(InvalidArgumentError) as caught:
                function(dampening=1)
            known = caught.exception.message.split("expected one of ")[1].split(", ")
            self.assertEqual(known, sorted(names))

    def test_kaisa(self):
        arguments = kaisa()
        self.assertEqual(arguments["method"].options, {
            "form": "EIGEN", "prediv": True, "damping": 0.001, "factor_decay": 0.95, "inv_update_steps": 1, "row_scale": 8.0,
            "stagger": False, "scaling": "KL_CLIP", "scaling_clip": 0.001})
        self.assertEqual((arguments["inv_freq"], arguments["warmup_steps"], arguments["skip"]), (1, 0, []))
        arguments = kaisa(factor_update_steps=10, inv_update_steps=100, kl_clip=None, compute_method=ComputeMethod.INVERSE,
                          skip_layers=["Conv", "^5$"], factor_dtype=torch.float32)
        options = arguments["method"].options
        self.assertEqual((arguments["inv_freq"], options["inv_update_steps"]), (10, 10))
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

    def test_what_the_libraries_do_not_know_is_left_out(self):
        class Own(nn.Linear):
            """kfac-pytorch takes subclasses, MKOR does not."""

        own = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 2, 3), nn.LayerNorm(4), Own(4, 2))
        self.assertEqual(migrate.kaisa(own, rows=2)["skip"], ["1", "2"])
        self.assertEqual(migrate.mkor(own, sgd_layers=[own[0]])["skip"], ["0", "1", "2", "3"])
        with self.assertWarnsRegex(UserWarning, "square of its positions"):
            migrate.kaisa(model(), rows=2)

    def test_mkor(self):
        own = model()
        arguments = migrate.mkor(own, inv_freq=5, warmup_steps=20, sgd_layers=[own[3]], half_precision=False)
        self.assertEqual(arguments["method"].options, {
            "rule": "REFERENCE", "representation": "DENSE", "storage": "F32", "gamma": 0.95, "clip": 100.0})
        self.assertEqual([arguments[name] for name in ("statistics", "inv_freq", "warmup_steps", "skip")],
                         ["MEAN", 5, 20, ["3"]])
        self.refuses("mkor: optimizer: expected none, got 'sgd'. The optimizer stays yours", mkor, optimizer="sgd")
        self.refuses("mkor: lr: expected one of .*The optimizer stays yours", mkor, lr=0.1)
        self.refuses("mkor: sgd_layers: expected modules of the model", mkor, sgd_layers=[nn.Linear(2, 2)])
        self.refuses("mkor: grad_scale: expected 1, got 1024", mkor, grad_scale=1024)

    def test_distributed_kron(self):
        options = migrate.distributed_kron()["method"].options
        self.assertEqual((options["block_size"], options["target_merged_dim_size"], options["memory_save_mode"]), (256, 4096, "NONE"))
        self.assertNotIn("max_update_probability", options)
        arguments = migrate.distributed_kron(b1=0.8, preconditioner_update_probability=0.5, memory_save_mode="one_diag",
                                             partition_grads_into_blocks=False, mu_dtype="bfloat16", scanned_layers={"a": True})
        options = arguments["method"].options
        self.assertEqual((arguments["b1"], options["momentum"], options["memory_save_mode"], options["block_size"],
                          options["max_update_probability"], options["min_update_probability"]), (0.8, 0.8, "ONE_DIAG", 0, 0.5, 0.5))
        self.assertEqual(arguments["scanned_layers"], {"a": True})
        kron = migrate.distributed_kron
        self.refuses("distributed_kron: learning_rate: expected none, got 0.1. Give it to precondor.optax.kron", kron, learning_rate=0.1)
        self.refuses("weight_decay: expected 0, got 0.1. Give it", kron, weight_decay=0.1)
        self.refuses("preconditioner_update_probability: expected a number, got <function", kron,
                    preconditioner_update_probability=lambda step: 1.0)

    def train(self, name, arguments):
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        pre = self.preconditioner(own, name, optimizer=optimizer, **arguments)
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
        self.train("mkor", mkor())
        self.train("kron", {"method": migrate.distributed_kron()["method"]})


if __name__ == "__main__":
    torch_case.main(__doc__)
