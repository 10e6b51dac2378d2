#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job's own GPUs: Preconditioner(model, "local") on 2 and 4 devices, which the host's memory stands for.

"The same" is to the bit, and as a server on one device answers layers that rank layer % ranks sends.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import unittest
import warnings
from unittest import mock

import numpy as np
import torch
from torch import nn

import precondor
import precondor.torch
from host_as_device import host_as_device
from precondor import server
from precondor.torch import _device
import test_program
from cluster import wait_for
import torch_local
from torch_rank import ask, results, running
from torch_training import CASES

torch.set_num_threads(1)
TIMEOUT_S = 120
MACHINE = {"CUDA_HOST_DEVICES": "4"}
RING = "--device-plane-bytes=16MiB"
PROGRAM = ""


def uuid_of(device):
    """Name of a device of the imitation, as CUDA_VISIBLE_DEVICES takes it."""
    text = (b"cuda on the hos" + bytes([ord("a") + device])).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class LocalCase(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def start(self, name, *flags, device=0):
        """Starts a server. Returns (the process, its address)."""
        command, environment = self.command(name, *flags, device=device)
        process = subprocess.Popen(command, env={**os.environ, **environment})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, f"unix:{self.folder}/{name}"

    def command(self, name, *flags, device=0):
        return ([PROGRAM, f"--listen=unix:{self.folder}/{name}", "--threads=2", "--log-level=error", *flags],
                {**MACHINE, "CUDA_VISIBLE_DEVICES": uuid_of(device)})

    def ask(self, ranks, name, **arguments):
        """Answers of all ranks."""
        return results(ask(ranks, name, TIMEOUT_S, **arguments))

    def ranks(self, environments):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        return self.enterContext(running(folder, [{**MACHINE, **one} for one in environments], torch_local.FUNCTIONS))

    def expect_same(self, answers, wanted):
        for weights, _ in answers:
            test_program.expect_close(weights, wanted[0][0])

    def expect_in_rings(self, answers, gradients):
        self.assertEqual(sum(use["in_ring"] for _, use in answers), gradients)
        self.assertEqual([(use["over_socket"], use["gradient_bytes"], use["result_bytes"], use["reason"]) for _, use in answers],
                         [(0, 0, 0, "")] * len(answers))


class TorchLocalTest(LocalCase):
    def test_no_gradient_of_a_local_job_leaves_its_device(self):
        _, address = self.start("one", "--backend=cuda")
        # By launchers that show each rank its own GPU as number 0, in another order than the ranks'; and all of them.
        for environments, devices in (([{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": uuid_of(1)}], [0, 0]),
                                      ([{}] * 4, [3, 1, 0, 2])):
            size = len(devices)
            ranks = self.ranks(environments)
            for case, options in (("mlp", {}), ("kfac", {"ddp": True})):
                with self.subTest(ranks=size, case=case):
                    wanted = self.ask(ranks, "train", address=address, case=case, session=f"{case}-{size}", devices=[None] * size,
                                      exchange="DELEGATE", **options)
                    got = self.ask(ranks, "train", address="local", case=case, session="", devices=devices, **options)
                    self.expect_same(got, wanted)
                    layers = len(got[0][1]["delegates"])
                    self.expect_in_rings(got, CASES[case].steps * layers)
                    # The layers are on as many shards as there are devices and layers, and each rank sends those of its device.
                    self.assertEqual(len(set(got[0][1]["delegates"])), min(size, layers))
                    self.assertEqual([use["in_ring"] for _, use in got],
                                     [CASES[case].steps * got[0][1]["delegates"].count(rank) for rank in range(size)])
                    self.assertEqual([use["delegates"] for _, use in wanted], [()] * size)

    def test_ranks_on_one_device_take_turns(self):
        ranks = self.ranks([{}, {}])
        _, use = self.ask(ranks, "train", address="local", case="mlp", session="", devices=[1, 1])[0]
        self.assertEqual(use["delegates"], (0, 1, 0))
        self.assertEqual(use["in_ring"], 2 * CASES["mlp"].steps)

    def test_overlap_and_sockets_go_on_as_before(self):
        """A rank without a device: one server. Overlap: the server averages."""
        ranks = self.ranks([{}, {}])
        for devices, options in (([0, None], {}), ([0, 1], {"overlap": True})):
            with self.subTest(devices=devices):
                answers = self.ask(ranks, "train", address="local", case="mlp", session="", devices=devices, **options)
                self.assertEqual([use["delegates"] for _, use in answers], [()] * 2)
                self.assertEqual([use["in_ring"] for _, use in answers], [0, 0])

    def shards(self, name, *flags):
        """Starts a coordinator and two shards, on the devices 0 and 1. Returns (the second shard's process, its command, the
        address)."""
        options = ["--role=shard", "--backend=cuda", RING, *flags]
        kept = [f"--data-dir={self.folder}/data-{name}-{shard}" for shard in range(2)]
        self.start(f"{name}-0", *options, kept[0], device=0)
        process, _ = self.start(f"{name}-1", *options, kept[1], device=1)
        _, address = self.start(name, "--role=coordinator", f"--shards=unix:{self.folder}/{name}-0,unix:{self.folder}/{name}-1",
                                "--reconcile-interval-ms=100")
        return process, self.command(f"{name}-1", *options, kept[1], device=1), address

    def test_a_shard_that_comes_back_in_a_step(self):
        ranks = self.ranks([{}, {}])
        outcomes = []
        for name, devices in (("host", [None, None]), ("device", [1, 0])):
            process, command, address = self.shards(name)
            outcomes.append(self.ask(ranks, "train_over_a_loss", address=address, session=name, devices=devices, pid=process.pid,
                                     command=command))
        wanted, got = outcomes
        self.expect_same(got, wanted)
        self.assertEqual([use["delegates"] for _, use in wanted + got], [()] * 2 + [got[0][1]["delegates"]] * 2)
        self.assertEqual(sorted(set(got[0][1]["delegates"])), [0, 1])
        sent = torch_local.STEPS * len(got[0][1]["delegates"])
        self.assertEqual(sum(use["in_ring"] + use["over_socket"] for _, use in got), sent)
        self.assertGreaterEqual(sum(use["in_ring"] for _, use in got), sent - 4)  # not in the step, nor while the shard was away

    def test_processes_that_are_killed_come_back(self):
        one = server.LocalServer(gpus={uuid_of(0): "64MiB", uuid_of(3): 1 << 26}, timeout=TIMEOUT_S)
        self.addCleanup(one.close)
        self.assertEqual(len(one.pids), 3)
        self.assertTrue(one.running())
        self.assertFalse(server.has_ended(one.address))
        with precondor.Client(one.address) as client:
            killed = one.pids[-1]
            with self.assertLogs("precondor", "WARNING"):
                os.kill(killed, signal.SIGKILL)
                wait_for("another process", lambda: one.pids[-1] != killed)
            self.assertFalse(server.has_ended(one.address))
            spec = precondor.SessionSpec("s", [precondor.Layer(name, 2, 3) for name in "ab"], "identity")
            with client.open_session(spec).join() as worker:
                for place in range(2):
                    worker.precondition(0, place, np.ones((2, 3), np.float32), 1).result()
            killed = one.pid
            with self.assertLogs("precondor", "WARNING"):
                os.kill(killed, signal.SIGKILL)
                wait_for("another process", lambda: one.pid != killed)
            client.open_session(precondor.SessionSpec("t", [precondor.Layer("w", 2, 3)], "identity")).close()
            with mock.patch.object(server, "_MOST_RESTARTS", 0):
                os.kill(one.pid, signal.SIGKILL)
                wait_for("the server's end", lambda: server.has_ended(one.address) and not one.running())
            with self.assertRaisesRegex(precondor.UnavailableError, "local server at .* has ended by SIGKILL"):
                client.open_session(precondor.SessionSpec("s", [precondor.Layer("w", 2, 3)], "identity"))
            with self.assertRaisesRegex(precondor.InvalidArgumentError, "rank_devices: expected bytes for each rank, got "):
                precondor.Client(one.address, rank_devices=["a"])
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "gpus: expected a dict, got "):
            server.LocalServer(gpus=[uuid_of(0)])
        one.close()
        self.assertFalse(pathlib.Path(one.address[len("unix:"):]).parent.exists())

    def test_a_shard_whose_device_is_lost_comes_back(self):
        lost = self.folder / "lost"
        with mock.patch.dict(os.environ, CUDA_HOST_LOST_DEVICE=str(lost)):
            one = server.LocalServer(gpus={uuid_of(0): "64MiB"}, timeout=TIMEOUT_S)
        self.addCleanup(one.close)
        gradient = np.eye(2, 3, dtype=np.float32)
        spec = precondor.SessionSpec("s", [precondor.Layer("w", 2, 3)], "muon")
        with precondor.Client(one.address) as client, client.open_session(spec).join() as worker:
            self.assertEqual(worker.precondition(0, 0, gradient, 1).result().decision, "PRECONDITIONED")
            before = one.pids[-1]
            (self.folder / "new").write_text("0\n", encoding="utf-8")
            with self.assertLogs("precondor", "WARNING"):
                (self.folder / "new").rename(lost)
                answer = worker.precondition(1, 0, gradient, 1)
                wait_for("the loss", lambda: answer.ready() or one.pids[-1] != before)
                lost.unlink()
                self.assertIn(answer.result().decision, ("SKIP", "PRECONDITIONED"))  # of the lost device, or after its shard's return
                wait_for("another process", lambda: one.pids[-1] != before)
            self.assertEqual(worker.precondition(2, 0, gradient, 1).result().decision, "PRECONDITIONED")

    def test_a_gpu_that_is_not_there_is_told(self):
        with self.assertRaisesRegex(precondor.UnavailableError, "end with status 1: .*cannot start.*CUDA devices: cudaErrorNoDevice"):
            server.LocalServer(gpus={"GPU-0": "64MiB"}, timeout=TIMEOUT_S)

    def test_gradients_that_leave_their_gpu_are_told(self):
        """The model moved to its GPU after the Preconditioner was made; gradients in bf16."""
        for later, options, told in ((True, {}, "the model is on a GPU, and a server computes on the CPU"),
                                     (False, {"gradient_dtype": "bf16"}, "through the host's memory: gradient_dtype: expected F32.*cuda.md.$")):
            model = nn.Linear(4, 3)
            with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
                if not later:
                    stack.enter_context(host_as_device())
                pre = stack.enter_context(precondor.torch.Preconditioner(
                    model, "local", method="muon", client=precondor.ClientOptions(connect_timeout=TIMEOUT_S), **options))
                stack.enter_context(host_as_device())
                pre.make_optimizer(0.1)
                model(torch.ones(2, 4)).sum().backward()
                pre.step()
            self.assertEqual([bool(re.search(told, str(one.message))) for one in caught], [True], [str(one.message) for one in caught])

    def test_names_of_gpus(self):
        weight = torch.zeros(1)
        with host_as_device():
            self.assertEqual(_device.gpu_name(weight), uuid_of(0))
            with mock.patch.object(_device, "is_part_of_gpu", return_value=True):
                self.assertEqual(_device.gpu_name(weight), uuid_of(0).replace("GPU", "MIG"))
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="MIG-1,MIG-2"):
                self.assertEqual(_device.gpu_name(weight), "MIG-1")

    def test_memory(self):
        model = nn.Linear(1024, 1024, bias=False)  # f32: 4 MiB
        free = 4 << 20
        with host_as_device(free=free):
            for memory, allowed in ((None, f"{free // 2} bytes of {uuid_of(0)} .0.5 of what was free."),
                                    (0.25, f"{free // 4} bytes of {uuid_of(0)} .0.25 of"), ("1MiB", f"1MiB of {uuid_of(0)}:")):
                with self.subTest(memory), self.assertRaisesRegex(
                        precondor.ResourceExhaustedError, rf"needs \d+ bytes.*may take {allowed}.*local_memory="):
                    precondor.torch.Preconditioner(model, "local", method="muon", client=precondor.ClientOptions(local_memory=memory))
            with precondor.torch.Preconditioner(model, "local", method="muon",
                                                client=precondor.ClientOptions(local_memory="512MiB", connect_timeout=TIMEOUT_S)) as pre:
                pre.make_optimizer(0.1)
                model(torch.ones(2, 1024)).sum().backward()
                pre.step()
                self.assertEqual(pre.device_plane(), {"backends": ["cuda"], "in_ring": 1, "over_socket": 0, "reason": ""})
            for memory in (0, 1.5, True):
                with self.subTest(memory), self.assertRaisesRegex(precondor.InvalidArgumentError, "local_memory: expected a share"):
                    precondor.torch.Preconditioner(model, "local", method="muon", client=precondor.ClientOptions(local_memory=memory))
        with self.assertRaisesRegex(precondor.InvalidArgumentError, "local_memory: expected bytes, .* for a server on the CPU"):
            precondor.torch.Preconditioner(model, "local", method="muon", client=precondor.ClientOptions(local_memory=0.5))
        with self.assertRaisesRegex(precondor.InvalidArgumentError, 'local_memory: expected None with an address other than "local"'):
            precondor.torch.Preconditioner(model, "127.0.0.1:1", session="s", client=precondor.ClientOptions(local_memory=0.5))
        with self.assertRaisesRegex(precondor.ResourceExhaustedError, "servers may take 1MiB: give them more with .*local_memory="):
            precondor.torch.Preconditioner(model, "local", method="muon", client=precondor.ClientOptions(local_memory="1MiB"))


class FullyShardedTest(LocalCase):
    def test_gradients_in_parts_meet_on_the_device_of_their_shard(self):
        _, address = self.start("one", "--backend=cuda")
        ranks = self.ranks([{}, {}])
        wanted = self.ask(ranks, "train_in_parts", address=address, session="host", devices=[None, None])
        got = self.ask(ranks, "train_in_parts", address="local", session="", devices=[2, 3])
        self.expect_same(got, wanted)
        self.expect_in_rings(got, torch_local.STEPS * len(got[0][1]["delegates"]))


if __name__ == "__main__":
    PROGRAM = test_program.parse("--server").server
    os.environ.update(MACHINE)
    test_program.run()
