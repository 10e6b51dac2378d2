#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch with gradients in device memory, and a server whose CUDA backend runs on the host, whose memory stands
for the device's.

"The same" is to the bit, and as gradients of the host are answered.
"""

import pathlib
import subprocess
import tempfile
import unittest
import warnings

import torch
from torch import nn

import precondor
import precondor.torch
import test_program
import torch_local
from host_as_device import host_as_device
from torch_rank import ask, results, running
from torch_training import CASES, train

torch.set_num_threads(1)
TIMEOUT_S = 60
RING = "--device-plane-bytes=16MiB"
CLIENT = precondor.ClientOptions(connect_timeout=TIMEOUT_S)
PROGRAM = ""


class TorchDeviceTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.plane = None

    def start(self, *flags, name="s"):
        """Its address."""
        address = f"unix:{self.folder}/{name}"
        server = subprocess.Popen([PROGRAM, f"--listen={address}", "--backend=cuda", "--threads=2", "--log-level=warning", *flags])
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        return address

    def train(self, address, session, case="mlp", **options):
        """Weights; self.plane is the preconditioner's at the end."""
        def at_end(pre):
            self.plane = {**pre.device_plane(), **pre.metrics()}

        _, weights, self.results, _ = train(address, session, case, at_end=at_end, client=CLIENT, **options)
        return weights

    def test_gradients_stay_on_their_device(self):
        address = self.start(RING)
        for case, options in (("mlp", {}), ("conv", {"overlap": True, "micro_batches": 2}), ("kfac", {"exchange": "DELEGATE"})):
            with self.subTest(case=case):
                wanted = self.train(address, "host", case, **options)
                self.assertEqual((self.plane["in_ring"], self.plane["over_socket"]), (0, 0))
                self.assertGreater(self.plane["gradient_bytes"], 0)
                with host_as_device() as calls:
                    test_program.expect_close(self.train(address, "device", case, **options), wanted)
                sent = CASES[case].steps * len(self.results[0].decisions)
                self.assertEqual((self.plane["in_ring"], self.plane["over_socket"], self.plane["reason"]), (sent, 0, ""))
                self.assertEqual((self.plane["gradient_bytes"], self.plane["result_bytes"]), (0, 0))
                self.assertEqual(calls, {"stream": sent, "synchronize": 0, "pinned": 0})

    def test_what_the_plane_does_not_take_is_copied_to_the_host_here(self):
        address = self.start(RING)
        without = self.start(name="without")
        for name, at, options, device, reason in (
                ("bf16", address, {"gradient_dtype": "bf16"}, 0, "gradient_dtype: expected F32, got bf16"),
                ("replay", address, {"exchange": "REPLAY"}, 0, "exchange REPLAY preconditions"),
                ("device", address, {}, 5, "device"),
                ("no-ring", without, {}, 0, "offers no ring")):
            with self.subTest(name):
                wanted = self.train(at, f"{name}-host", **options)
                with host_as_device(lambda tensor, device=device: device) as calls:
                    test_program.expect_close(self.train(at, f"{name}-device", **options), wanted)
                self.assertRegex(self.plane["reason"], reason)
                self.assertEqual(self.plane["in_ring"], 0)
                sent = CASES["mlp"].steps * len(self.results[0].decisions)
                # Before a stream is open it is unknown whether it has a ring: the first gradients may go by the client.
                first = self.plane["over_socket"]
                self.assertLessEqual(first, len(self.results[0].decisions) if name == "no-ring" else 0)
                self.assertEqual(calls["synchronize"], sent - first)

    def test_layers_of_the_host_and_of_the_device(self):
        address = self.start(RING)
        wanted = self.train(address, "host")
        bias_free = (6, 7)  # the mlp's second layer
        with host_as_device(lambda tensor: 0 if tuple(tensor.shape) == bias_free else None):
            test_program.expect_close(self.train(address, "device"), wanted)
        self.assertEqual(self.plane["in_ring"], CASES["mlp"].steps)
        self.assertGreater(self.plane["gradient_bytes"], 0)

    def test_gradients_of_other_forms(self):
        """Not contiguous; f64; none."""
        address = self.start(RING)

        def answers(session):
            torch.manual_seed(1)
            model = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(4, 3).double(), nn.Linear(3, 3)])
            with precondor.torch.Preconditioner(model, address, session=session, method="mkor", client=CLIENT) as pre:
                loss = model[1](model[0](torch.ones(2, 3)).double()).square().mean()
                loss.backward()
                model[0].weight.grad = model[0].weight.grad.t().contiguous().t()
                decisions = pre.step(loss).decisions
                use = pre.device_plane()
            return [None if one.grad is None else one.grad.clone() for one in model.parameters()], decisions, use

        wanted, decisions, _ = answers("host")
        self.assertEqual([decisions[name] for name in "012"], ["PRECONDITIONED"] * 2 + ["SKIP"])
        with host_as_device():
            got, _, use = answers("device")
        self.assertEqual(use, {"backends": ["cuda"], "in_ring": 2, "over_socket": 0, "reason": ""})
        self.assertEqual([one is None for one in got], [one is None for one in wanted])
        test_program.expect_close([one for one in got if one is not None], [one for one in wanted if one is not None])

    def test_a_server_on_the_cpu_is_told_to_a_model_on_a_gpu(self):
        for backend in ("cpu", "cuda"):
            with self.subTest(backend), host_as_device(), warnings.catch_warnings(record=True) as caught, \
                    self.assertLogs("precondor", "INFO") as log:
                address = self.start(f"--backend={backend}", name=backend)
                self.train(address, backend)
            self.assertRegex(log.output[0], f"^INFO:precondor:the servers compute with backend {backend}; gradients leave their GPU "
                                            "through the host's memory: shard unix:.*: offers no ring")
            told = [str(one.message) for one in caught]
            self.assertEqual(sum("a server computes on the CPU" in one for one in told), backend == "cpu", told)

    def test_an_overflow_skips_a_step(self):
        address = self.start(RING)
        options = {"case": "kfac", "scaler": 1024.0, "overflow": ((0, 3),)}
        wanted = self.train(address, "host", **options)
        with host_as_device():
            test_program.expect_close(self.train(address, "device", **options), wanted)
        self.assertEqual([result.step for result in self.results if result.skipped], [3])
        self.assertEqual(self.plane["in_ring"], (CASES["kfac"].steps - 1) * len(self.results[0].decisions))

    def test_several_ranks(self):
        """DELEGATE: each sends its layers from its device, and passes the answers on. DIRECT: the server adds up."""
        address = self.start(RING)
        with running(self.folder, [{}, {}], torch_local.FUNCTIONS) as ranks:
            def train_both(**arguments):
                return results(ask(ranks, "train", address=address, case="mlp", **arguments))

            steps = CASES["mlp"].steps
            for ddp in (False, True):
                for exchange, in_ring in (("DELEGATE", [2 * steps, steps]), ("DIRECT", [0, 0])):
                    with self.subTest(exchange=exchange, ddp=ddp):
                        options = {"exchange": exchange, "ddp": ddp}
                        wanted = train_both(session=f"host-{exchange}-{ddp}", devices=[None, None], **options)
                        # One rank's device is not known to the server.
                        apart = train_both(session=f"one-{exchange}-{ddp}", devices=[0, 5], **options)
                        got = train_both(session=f"device-{exchange}-{ddp}", devices=[0, 0], **options)
                        for weights, _ in (*got, *apart):
                            test_program.expect_close(weights, wanted[0][0])
                        self.assertEqual([plane["in_ring"] for _, plane in got], in_ring)
                        # The rank whose device the server has sends all layers.
                        self.assertEqual([plane["in_ring"] for _, plane in apart], [sum(in_ring), 0])
                        for _, plane in got if exchange == "DIRECT" else ():
                            self.assertRegex(plane["reason"], "DIRECT of several ranks")


if __name__ == "__main__":
    PROGRAM = test_program.parse("--server").server
    test_program.run()
