#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Preconditioner that fails, is dropped or is replaced leaves nothing behind."""

import gc
import os
import subprocess
import sys
import tempfile
from unittest import mock

import torch
from torch import nn

import precondor
import torch_case
from cluster import wait_for
from interop_test import Server, TIMEOUT_S
from precondor import server
from precondor.torch import Preconditioner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.attention, self.head = nn.Linear(6, 6), nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(self.attention(x, x, x)[0])


def left_on(model):
    """Returns the traces that a Preconditioner could leave on a model: hooks and attributes."""
    hooks = [(name, kind, len(getattr(module, kind))) for name, module in model.named_modules()
             for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")]
    own = [(name, sorted(vars(module))) for name, module in model.named_modules()]
    of_parameters = [(name, sorted(vars(parameter)), len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()))
                     for name, parameter in model.named_parameters()]
    return hooks, own, of_parameters


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def train(model, pre, steps=3, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        result = pre.step(loss)
        optimizer.step()
    return set(result.decisions.values())


class LifetimeTest(torch_case.ServerCase):
    def make(self, model, name="", address="", **options):
        """Not closed at the end, unlike ServerCase.preconditioner."""
        return Preconditioner(model, address or self.server.address, session=name or self.name, method="mkor", **options)

    def has_session(self, name):
        """Whether the server has a session of the name, which then has another description than this one."""
        with precondor.Client(self.server.address) as client:
            try:
                client.open_session(precondor.SessionSpec(name, [precondor.Layer("other", 2, 3)], "identity")).close()
            except precondor.FailedPreconditionError:
                return True
        return False

    def expect_nothing_left(self, call):
        """Expects that repeated calls, of which the first may start what a process has once, leave nothing."""
        call()
        gc.collect()
        before = threads(), descriptors()
        for _ in range(3):
            call()
        gc.collect()
        wait_for(f"threads and descriptors as before, {before}", lambda: threads() <= before[0] and descriptors() <= before[1], TIMEOUT_S)

    # --- failures -----------------------------------------------------------------------------------------------------

    def test_a_corrected_cell_trains(self):
        """A name that is taken is told in the first forward pass; the next attempts on the model do not hear of it."""
        model = Net()
        clean = left_on(model)
        first = self.make(model)
        train(model, first)
        first.close()
        self.assertEqual(left_on(model), clean)
        for number, corrected in enumerate(({"client": precondor.ClientOptions(replace=True)}, {"name": self.name + "-other"})):
            with self.subTest(corrected=corrected):
                failed = self.make(model)  # a notebook keeps it by its last traceback
                self.expect(precondor.FailedPreconditionError, "is there already.*replace=True", model, torch.randn(5, 2, 6))
                self.assertEqual(left_on(model), clean)
                self.expect(precondor.FailedPreconditionError, "has been closed", failed.step, 1.0)
                pre = self.make(model, **corrected)
                self.assertEqual(train(model, pre), {"PRECONDITIONED"})
                pre.close(end_session=number == 1)
                self.assertEqual(left_on(model), clean)

    def test_one_that_was_given_up_before_its_first_pass_does_not_speak_for_the_model(self):
        model = Net()
        first = self.make(model)
        train(model, first)
        first.close()
        given_up = self.make(model)
        pre = self.preconditioner(model, client=precondor.ClientOptions(replace=True))
        self.assertEqual(train(model, pre), {"PRECONDITIONED"})
        self.expect(precondor.FailedPreconditionError, "has been closed", given_up.step, 1.0)
        half = self.preconditioner(model, self.name + "-half", skip=["head"])
        rest = self.preconditioner(model, self.name + "-rest", skip=["(?!head).*"])  # of other layers: both may wait
        train(model, half, 1)
        train(model, rest, 1)

    def test_a_server_that_is_away_at_the_join(self):
        model = Net()
        clean = left_on(model)
        with tempfile.TemporaryDirectory() as folder:
            other = Server(self.server.process.args[0], folder)
            failed = self.make(model, address=other.address, client=precondor.ClientOptions(rpc_timeout=0.5))
            other.stop()
        self.expect(precondor.UnavailableError, other.address, model, torch.randn(5, 2, 6))
        self.assertEqual(left_on(model), clean)
        model(torch.randn(5, 2, 6)).sum().backward()  # names no dead address
        self.assertEqual(train(model, self.preconditioner(model)), {"PRECONDITIONED"})
        self.expect(precondor.FailedPreconditionError, "has been closed", failed.step, 1.0)

    def test_a_failure_leaves_nothing_although_a_traceback_keeps_the_object(self):
        model = Net()
        clean = left_on(model)
        kept = []

        def no_server():
            with self.assertRaises(precondor.UnavailableError) as caught:
                self.make(model, address="127.0.0.1:1", client=precondor.ClientOptions(connect_timeout=0.05))
            kept.append(caught.exception)

        def wrong_option():
            with self.assertRaises(precondor.InvalidArgumentError) as caught:
                self.make(model, statistics=precondor.Statistics("COVARIANT"))
            kept.append(caught.exception)

        def no_other_rank():
            pre = self.make(model)
            late = precondor.DeadlineExceededError("not every other rank", "DEADLINE_EXCEEDED")
            with mock.patch.object(precondor.Session, "join", side_effect=late), \
                    self.assertRaises(precondor.DeadlineExceededError) as caught:
                model(torch.randn(5, 2, 6))
            kept.append((caught.exception, pre))

        for fails in (no_server, wrong_option, no_other_rank):
            with self.subTest(fails=fails.__name__):
                self.expect_nothing_left(fails)
                self.assertEqual(left_on(model), clean)
                self.assertFalse(self.has_session(self.name))

    # --- objects that are dropped -------------------------------------------------------------------------------------

    def test_a_dropped_one_leaves_nothing(self):
        """Neither where it has trained nor where it has not; the last loss, with its graph, is kept as in a notebook."""
        model = Net()
        clean = left_on(model)
        losses = []

        def trains():
            pre = self.make(model, client=precondor.ClientOptions(replace=True), overlap=True)
            train(model, pre)
            losses.append(model(torch.randn(5, 2, 6)).square().mean())

        def attaches():
            pre = self.make(model, client=precondor.ClientOptions(replace=True))
            optimizer = pre.make_optimizer(0.01)
            pre.attach(optimizer)
            train(model, pre, optimizer=optimizer)

        def makes():
            self.make(model, self.name + "-unused", client=precondor.ClientOptions(replace=True))

        for drops in (trains, attaches, makes):
            with self.subTest(drops=drops.__name__):
                self.expect_nothing_left(drops)
                self.assertEqual(left_on(model), clean)
                losses.clear()

    def test_an_optimizer_that_is_attached_again_makes_one_step(self):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        steps = []
        for name in ("first", "second"):
            pre = self.preconditioner(model, f"{self.name}-{name}")
            pre.attach(optimizer)
            for step in range(2):
                optimizer.zero_grad()
                model(torch.randn(5, 2, 6)).square().mean().backward()
                optimizer.step()
            steps.append(pre)
        self.assertEqual([pre.step_number for pre in steps], [2, 2])

    def test_a_local_server_ends_with_its_last_user(self):
        self.enterContext(local_folder())
        models = Net(), Net()
        pres = [Preconditioner(model, "local", method="mkor") for model in models]
        pid = server.shared().pid
        for model, pre in zip(models, pres):
            self.assertEqual(train(model, pre), {"PRECONDITIONED"})
        for cell in range(3):  # run again: the name is bound to the new one before the old one is dropped
            pre = Preconditioner(models[0], "local", method="mkor")
            train(models[0], pre)
            self.assertEqual(server.shared().pid, pid)
        pres[0].close()
        del pre, pres[0]
        gc.collect()
        self.assertTrue(os.path.exists(f"/proc/{pid}"), "the other model uses it")
        self.assertEqual(train(models[1], pres[0]), {"PRECONDITIONED"})
        pres.clear()
        gc.collect()
        self.assertFalse(os.path.exists(f"/proc/{pid}"))
        self.assertEqual(os.listdir(tempfile.tempdir), [])

    def test_cells_that_each_make_a_server_leave_one(self):
        self.enterContext(local_folder())
        model = Net()
        for _ in range(5):
            own = server.LocalServer()
            pre = self.make(model, address=own.address)
            self.assertEqual(train(model, pre), {"PRECONDITIONED"})
        self.assertEqual(len(os.listdir(tempfile.tempdir)), 1)
        del pre, own
        gc.collect()
        self.assertEqual(os.listdir(tempfile.tempdir), [])

    def test_a_program_that_closes_nothing_ends_with_its_threads(self):
        """Python aborts the process if a thread comes back from C++ after its end."""
        program = f"""
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # called last
import torch
from precondor.torch import Preconditioner
model = torch.nn.Linear(3, 2)
pre = Preconditioner(model, {self.server.address!r}, session={self.name!r}, method="mkor")
loss = model(torch.ones(4, 3)).square().mean()
loss.backward()
pre.step(loss)
"""
        done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "['MainThread']\n"), done.stderr)


class local_folder:
    """A folder of its own for local servers."""

    def __enter__(self):
        self._folder, self._before = tempfile.TemporaryDirectory(), tempfile.tempdir
        tempfile.tempdir = self._folder.name

    def __exit__(self, *unused):
        tempfile.tempdir = self._before
        self._folder.cleanup()


if __name__ == "__main__":
    torch_case.main()
