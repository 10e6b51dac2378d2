#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The callbacks for transformers and Lightning do in their frameworks' loops what the two lines do in a loop of one's own.

CTest runs it in deploy/torch2.sh's environment, which has both.
"""

import sys
import tempfile
import unittest
import unittest.mock
import warnings

import numpy as np

import test_program

import torch
from torch import nn

import precondor
from precondor.torch import Preconditioner
from precondor.torch.callbacks import huggingface, lightning

server = None
ROWS, BATCH, STEPS, RATE = 48, 8, 12, 0.05
OPTIONS = {"method": "mkor", "statistics": precondor.Statistics("MEAN", inv_freq=3, warmup_steps=3, dtype="f32")}


class Model(nn.Module):
    """Gives {"loss", "logits"}, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def data():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.tanh(x[:, :3] * 2)


def rows():
    return [{"x": x, "labels": y} for x, y in zip(*data())]


def by_hand(name, accumulate):
    """The weights after the same steps in a loop of our own."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = data()
    losses = []
    with Preconditioner(model, server.address, session=name, optimizer=optimizer, **OPTIONS) as pre:
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for part in range(accumulate):
                begin = (step * accumulate + part) * BATCH % ROWS
                loss = model(x[begin:begin + BATCH], y[begin:begin + BATCH])["loss"] / accumulate
                loss.backward()
                total += loss.item()
            losses.append(total)
            pre.step(total)
            optimizer.step()
    return weights(model), losses


def weights(model):
    return [p.detach().numpy().copy() for p in model.parameters()]


def remember_losses():
    """A patch, and the losses that callbacks report under it."""
    reported = []
    original = Preconditioner.step

    def step(self, loss=None, **options):
        reported.append(None if loss is None else float(loss))
        return original(self, loss, **options)

    return unittest.mock.patch.object(Preconditioner, "step", step), reported


class CallbacksTest(unittest.TestCase):
    def setUp(self):
        self.name = self.id().rsplit(".", 1)[-1]
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # theirs, of deprecations and of how many cores a loader might have

    def expect_same(self, train):
        """`train` trains a Model in a framework with a session's name and batches a step; its weights and reported losses."""
        untouched = weights(Model())
        for accumulate in (1, 2):
            with self.subTest(accumulate=accumulate):
                expected, expected_losses = by_hand(f"{self.name}-hand-{accumulate}", accumulate)
                got, losses = train(f"{self.name}-{accumulate}", accumulate)
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
                for one, other, first in zip(got, expected, untouched):
                    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
                    self.assertGreater(np.abs(one - first).max(), 1e-3)

    def test_transformers_trainer(self):
        import transformers

        def train(name, accumulate):
            model = Model()
            callback = huggingface.PrecondorCallback(server.address, session=name, **OPTIONS)
            arguments = transformers.TrainingArguments(
                self.folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulate,
                learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0, logging_strategy="no", report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=True, remove_unused_columns=False, optim="sgd")
            patch, reported = remember_losses()
            with patch:
                InOrder(model, arguments, train_dataset=rows(), callbacks=[callback]).train()
            self.assertIsNone(callback.preconditioner)
            return weights(model), reported

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *unused):
                return torch.utils.data.SequentialSampler(self.train_dataset)

        self.expect_same(train)
        with self.assertRaisesRegex(NotImplementedError, "fp16"):
            arguments = transformers.TrainingArguments(self.folder, use_cpu=True)
            arguments.fp16 = True
            huggingface.PrecondorCallback(server.address, session="x").on_train_begin(arguments, None, None, Model(), None)
        with self.assertRaisesRegex(NotImplementedError, "one GPU a process, got 2.*torchrun"):
            arguments = transformers.TrainingArguments(self.folder, use_cpu=True)
            arguments._n_gpu = 2
            huggingface.PrecondorCallback(server.address, session="x").on_train_begin(arguments, None, None, Model(), None)

    def test_whole_updates_under_accelerates_optimizer_are_told(self):
        """Trainer's optimizer is accelerate's, with AdamW in it."""
        import accelerate
        import transformers

        arguments = transformers.TrainingArguments(
            self.folder, max_steps=2, per_device_train_batch_size=BATCH, logging_strategy="no", report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True, remove_unused_columns=False, optim="adamw_torch")
        for method, count in (("soap", 1), ("mkor", 0)):
            callback = huggingface.PrecondorCallback(server.address, session=f"{self.name}-{method}", method=method)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                transformers.Trainer(Model(), arguments, train_dataset=rows(), callbacks=[callback]).train()
            told = [one for one in caught if "answers of soap are whole updates, which AdamW would normalize again" in str(one.message)]
            self.assertEqual(len(told), count)
        model = Model()
        with Preconditioner(model, server.address, session=self.name, **OPTIONS) as pre:
            optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=RATE))
            pre.attach(optimizer)
            model(*data())["loss"].backward()
            optimizer.step()
            self.assertEqual(pre.step_number, 1)

    def test_lightning_trainer(self):
        base = sys.modules[lightning.Callback.__module__.split(".")[0]]
        pl = getattr(base, "pytorch", base)

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = Model()

            def training_step(self, batch, _):
                return self.model(batch["x"], batch["labels"])["loss"]

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=RATE)

        def trainer(callback, **options):
            return pl.Trainer(max_steps=STEPS, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.folder, **options)

        def train(name, accumulate):
            module = Module()
            callback = lightning.PrecondorCallback(server.address, session=name, **OPTIONS)
            patch, reported = remember_losses()
            with patch:
                trainer(callback, accumulate_grad_batches=accumulate).fit(
                    module, torch.utils.data.DataLoader(rows(), batch_size=BATCH))
            self.assertIsNone(callback.preconditioner)
            return weights(module.model), reported

        self.expect_same(train)

        class Two(Module):
            automatic_optimization = False

            def configure_optimizers(self):
                return super().configure_optimizers(), super().configure_optimizers()

        with self.assertRaisesRegex(NotImplementedError, "expected one optimizer under automatic optimization, got 2, manual"):
            trainer(lightning.PrecondorCallback(server.address, session="x")).fit(
                Two(), torch.utils.data.DataLoader(rows(), batch_size=BATCH))


if __name__ == "__main__":
    def begin(own):
        global server
        server = own

    test_program.run_with_server(test_program.parse("--server").server, begin)
