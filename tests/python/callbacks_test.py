#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The callbacks for transformers and Lightning do in their frameworks' loops what the two lines do in a loop of one's own."""

import contextlib
import pathlib
import shutil
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import numpy as np
import torch
import transformers
from torch import nn

import precondor
import test_program
from precondor.torch import Preconditioner, make_optimizer
from precondor.torch.callbacks import huggingface, lightning
from torch_rank import ask, results, running

base = sys.modules[lightning.Callback.__module__.split(".")[0]]
pl = getattr(base, "pytorch", base)
server = None
ranks = None  # pipes to two
RANK_DEADLINE_S = 300  # they import both frameworks
ROWS, BATCH, STEPS, RATE = 48, 8, 12, 0.05
OPTIONS = {"method": "mkor", "statistics": precondor.Statistics("MEAN", inv_freq=3, warmup_steps=3, dtype="f32")}
CLIP = 0.05  # of the default's gradients


class Model(nn.Module):
    """Gives {"loss", "logits"}, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def data():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.tanh(x[:, :3] * 2)


def rows():
    return [{"x": x, "labels": y} for x, y in zip(*data())]


def by_hand(name, accumulate, batch=BATCH, default=False, clip=None):
    """The weights after the same steps in a loop of our own."""
    model = Model()
    optimizer = make_optimizer(model, RATE) if default else torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = data()
    losses = []
    with Preconditioner(model, server.address, session=name, optimizer=optimizer, **({} if default else OPTIONS)) as pre:
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for part in range(accumulate):
                begin = (step * accumulate + part) * batch % ROWS
                loss = model(x[begin:begin + batch], y[begin:begin + batch])["loss"] / accumulate
                loss.backward()
                total += loss.item()
            losses.append(total)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            pre.step(total)
            optimizer.step()
    return weights(model), losses


def weights(model):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().numpy().copy() for p in model.parameters()]


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *unused):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class ByDefault(InOrder):
    def create_optimizer(self, model=None):
        self.optimizer = make_optimizer(self.model, self.args.learning_rate)
        return self.optimizer


class Sharded(InOrder):
    """accelerate uses no FSDP on CPUs: this switches it on."""

    def create_accelerator_and_postprocess(self):
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        self.accelerator.state.fsdp_plugin = plugin
        self.accelerator.state._shared_state["distributed_type"] = self.accelerator.state.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


class ShardedByDefault(ByDefault, Sharded):
    pass


def transformers_arguments(folder, **options):
    return transformers.TrainingArguments(folder, **{
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "logging_strategy": "no", "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "remove_unused_columns": False, "optim": "sgd", **options})


class Module(pl.LightningModule):
    def __init__(self, default=False):
        super().__init__()
        self.model, self.default = Model(), default

    def training_step(self, batch, _):
        return self.model(batch["x"], batch["labels"])["loss"]

    def configure_optimizers(self):
        return make_optimizer(self, RATE) if self.default else torch.optim.SGD(self.parameters(), lr=RATE)


class ShardedModule(Module):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def lightning_trainer(callback, folder, **options):
    return pl.Trainer(**{"max_steps": STEPS, "callbacks": [callback], "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                         "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder, **options})


def sharded_transformers(rank, address, session, folder, bf16=False, default=False):
    """The weights after training under FSDP2."""
    from accelerate.state import AcceleratorState
    del rank
    AcceleratorState._reset_state(reset_partial_state=True)
    model = Model()
    arguments = transformers_arguments(folder, bf16=bf16, fsdp=True, fsdp_config={"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP"})
    callback = huggingface.PrecondorCallback(address, session=session, **({} if default else OPTIONS))
    (ShardedByDefault if default else Sharded)(model, arguments, train_dataset=rows(), callbacks=[callback]).train()
    return weights(model), type(next(model.parameters())).__name__


def sharded_lightning(rank, address, session, folder, bf16=False, default=False):
    """The weights after training under FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    module = ShardedModule(default)
    mine = [row for place, row in enumerate(rows()) if place // BATCH % 2 == rank]
    callback = lightning.PrecondorCallback(address, session=session, **({} if default else OPTIONS))
    lightning_trainer(callback, folder, devices=2, use_distributed_sampler=False,
                      strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
                      precision="bf16-mixed" if bf16 else "32-true").fit(module, torch.utils.data.DataLoader(mine, batch_size=BATCH))
    return weights(module.model), type(next(module.parameters())).__name__


def sharded_by_hand(rank, address, session, folder):
    """The weights after training with the default under FSDP2, in a loop of our own."""
    from torch.distributed.fsdp import fully_shard
    del folder
    model = fully_shard(Model())
    x, y = data()
    with Preconditioner(model, address, session=session) as pre:
        optimizer = pre.make_optimizer(RATE)
        for step in range(STEPS):
            optimizer.zero_grad()
            begin = (2 * step + rank) * BATCH % ROWS
            model(x[begin:begin + BATCH], y[begin:begin + BATCH])["loss"].backward()
            pre.step()
            optimizer.step()
    return weights(model), type(next(model.parameters())).__name__


def resumed_transformers(rank, address, session, folder):
    """The weights after training by the default under DDP, after the second half of it from a checkpoint, and before."""
    from accelerate.state import AcceleratorState
    del rank
    found = []
    for path in (None, pathlib.Path(folder, f"checkpoint-{STEPS // 2}")):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = Model()
        arguments = transformers_arguments(folder, save_strategy="steps", save_steps=STEPS // 2)
        ByDefault(model, arguments, train_dataset=rows(), callbacks=[huggingface.PrecondorCallback(address, session=f"{session}-{path is None}")]).train(
            resume_from_checkpoint=path and str(path))
        found.append(weights(model))
    return (*found, weights(Model()))


FUNCTIONS = {function.__name__: function for function in (sharded_transformers, sharded_lightning, sharded_by_hand, resumed_transformers)}


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
        self.enterContext(warnings.catch_warnings(action="ignore"))  # theirs, of deprecations and of how many cores a loader might have

    def expect_same(self, train, **options):
        """`train` trains a Model in a framework with a session's name and batches a step; its weights and reported losses."""
        untouched = weights(Model())
        for accumulate in (1, 2):
            with self.subTest(accumulate=accumulate):
                expected, expected_losses = by_hand(f"{self.name}-hand-{accumulate}", accumulate, **options)
                got, losses = train(f"{self.name}-{accumulate}", accumulate)
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
                for one, other, first in zip(got, expected, untouched):
                    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
                    self.assertGreater(np.abs(one - first).max(), 1e-3)

    def test_transformers_trainer(self):
        def train(name, accumulate):
            model = Model()
            callback = huggingface.PrecondorCallback(server.address, session=name, **OPTIONS)
            patch, reported = remember_losses()
            with patch:
                InOrder(model, transformers_arguments(self.folder, gradient_accumulation_steps=accumulate), train_dataset=rows(),
                        callbacks=[callback]).train()
            self.assertIsNone(callback.preconditioner)
            return weights(model), reported

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

        arguments = transformers.TrainingArguments(
            self.folder, max_steps=2, per_device_train_batch_size=BATCH, logging_strategy="no", report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True, remove_unused_columns=False, optim="adamw_torch")
        for method, count in (("soap", 1), ("mkor", 0)):
            callback = huggingface.PrecondorCallback(server.address, session=f"{self.name}-{method}", method=method)
            with warnings.catch_warnings(record=True, action="always") as caught:
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
        def train(name, accumulate):
            module = Module()
            callback = lightning.PrecondorCallback(server.address, session=name, **OPTIONS)
            patch, reported = remember_losses()
            with patch:
                lightning_trainer(callback, self.folder, accumulate_grad_batches=accumulate).fit(
                    module, torch.utils.data.DataLoader(rows(), batch_size=BATCH))
            self.assertIsNone(callback.preconditioner)
            return weights(module.model), reported

        self.expect_same(train)

        class Two(Module):
            automatic_optimization = False

            def configure_optimizers(self):
                return super().configure_optimizers(), super().configure_optimizers()

        with self.assertRaisesRegex(NotImplementedError, "expected one optimizer under automatic optimization, got 2, manual"):
            lightning_trainer(lightning.PrecondorCallback(server.address, session="x"), self.folder).fit(
                Two(), torch.utils.data.DataLoader(rows(), batch_size=BATCH))

    def test_the_default(self):
        """With an optimizer of make_optimizer(), and gradients that are clipped before."""
        def in_transformers(name, accumulate):
            model = Model()
            arguments = transformers_arguments(self.folder, gradient_accumulation_steps=accumulate, max_grad_norm=CLIP)
            patch, reported = remember_losses()
            with patch:
                ByDefault(model, arguments, train_dataset=rows(),
                          callbacks=[huggingface.PrecondorCallback(server.address, session=f"{name}-transformers")]).train()
            return weights(model), reported

        def in_lightning(name, accumulate):
            module = Module(default=True)
            patch, reported = remember_losses()
            with patch:
                lightning_trainer(lightning.PrecondorCallback(server.address, session=f"{name}-lightning"), self.folder, gradient_clip_val=CLIP,
                                  accumulate_grad_batches=accumulate).fit(module, torch.utils.data.DataLoader(rows(), batch_size=BATCH))
            return weights(module.model), reported

        with warnings.catch_warnings(record=True, action="always") as caught:
            for train in (in_transformers, in_lightning):
                with self.subTest(train.__name__):
                    self.name = f"{self.name}-{train.__name__}"
                    self.expect_same(train, default=True, clip=CLIP)
        self.assertEqual([one for one in caught if "Preconditioner" in str(one.message)], [])

    def test_transformers_trainer_resumes(self):
        """The second half of a training, from a checkpoint, is that of the whole one."""
        def train(folder, **options):
            model = Model()
            ByDefault(model, transformers_arguments(folder, save_strategy="steps", save_steps=STEPS // 2), train_dataset=rows(),
                      callbacks=[huggingface.PrecondorCallback("local")]).train(**options)
            return weights(model)

        folder = pathlib.Path(self.folder, "first")
        wanted, checkpoint = train(folder), folder / f"checkpoint-{STEPS // 2}"
        for output in (folder, pathlib.Path(self.folder, "second")):
            with self.subTest(output.name):
                test_program.expect_close(train(output, resume_from_checkpoint=str(checkpoint)), wanted, 0)
        # It warns of a file of another checkpoint, and of none.
        for change in (lambda: shutil.copy(folder / f"checkpoint-{STEPS}" / huggingface.FILE, checkpoint), (checkpoint / huggingface.FILE).unlink):
            change()
            with self.assertWarnsRegex(UserWarning, "resumes with new factors and momentum"):
                got = train(folder, resume_from_checkpoint=str(checkpoint))
            self.assertFalse(all(np.array_equal(one, other) for one, other in zip(got, wanted)))
            train(folder)

    def test_transformers_trainer_resumes_under_ddp(self):
        for whole, resumed, first in self.in_ranks("resumed_transformers", session=self.name):
            self.assertGreater(np.abs(whole[0] - first[0]).max(), 1e-3)
            test_program.expect_close(resumed, whole, 0)

    def test_lightning_trainer_resumes(self):
        """The second half of a training, from a checkpoint, is that of the whole one."""
        def train(path=None):
            module = Module(default=True)
            callbacks = [lightning.PrecondorCallback("local"),
                         base.pytorch.callbacks.ModelCheckpoint(self.folder, every_n_train_steps=STEPS // 2, save_top_k=-1)]
            trainer = lightning_trainer(None, self.folder, callbacks=callbacks, enable_checkpointing=True)
            trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=BATCH), ckpt_path=path)
            return weights(module.model), trainer

        wanted, trainer = train()
        after = pathlib.Path(self.folder, "after.ckpt")
        trainer.save_checkpoint(after)
        state = torch.load(after, weights_only=True)["callbacks"]["PrecondorCallback"]
        self.assertEqual((state["step"], len(state["factors"])), (STEPS, 3))
        half, = pathlib.Path(self.folder).glob(f"*step={STEPS // 2}.ckpt")
        test_program.expect_close(train(half)[0], wanted, 0)

    def test_lightning_trainer_resumes_after_an_exception(self):
        class Failing(Module):
            def on_train_batch_end(self, *unused):
                if self.trainer.global_step == STEPS // 3:
                    raise KeyboardInterrupt

        def fit(module, callbacks, path=None):
            lightning_trainer(None, self.folder, callbacks=[lightning.PrecondorCallback("local"), *callbacks],
                              enable_checkpointing=bool(callbacks)).fit(
                module, torch.utils.data.DataLoader(rows(), batch_size=BATCH), ckpt_path=path)

        with self.assertRaises(SystemExit):
            fit(Failing(default=True), [base.pytorch.callbacks.OnExceptionCheckpoint(self.folder)])
        path, = pathlib.Path(self.folder).glob("*.ckpt")
        state = torch.load(path, weights_only=True)["callbacks"]["PrecondorCallback"]
        self.assertEqual(state["step"], STEPS // 3)
        with warnings.catch_warnings(record=True, action="always") as caught:
            fit(Module(default=True), [], path)
        self.assertEqual([one for one in caught if "new factors" in str(one.message)], [])

    def in_ranks(self, function, **options):
        return results(ask(ranks, function, RANK_DEADLINE_S, address=server.address, folder=self.folder, **options))

    def test_both_under_fsdp2(self):
        """Two ranks, of which each has every other batch."""
        wanted, _ = by_hand(f"{self.name}-hand", 1, 2 * BATCH)
        for function in ("sharded_transformers", "sharded_lightning"):
            for bf16, tolerance in ((False, 1e-6), (True, 2e-3)):
                with self.subTest(function, bf16=bf16):
                    for got, kind in self.in_ranks(function, bf16=bf16, session=f"{function}-{bf16}"):
                        self.assertEqual(kind, "DTensor")
                        test_program.expect_close(got, wanted, tolerance)

    def test_the_default_under_fsdp2(self):
        (wanted, _), _ = self.in_ranks("sharded_by_hand", session=self.name)
        for function in ("sharded_transformers", "sharded_lightning"):
            with self.subTest(function):
                for got, kind in self.in_ranks(function, default=True, session=f"{self.name}-{function}"):
                    self.assertEqual(kind, "DTensor")
                    test_program.expect_close(got, wanted, 0)


if __name__ == "__main__":
    def begin(own):
        global server
        server = own

    @contextlib.contextmanager
    def around(folder):
        global ranks
        environments = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} for rank in range(2)]
        with running(folder, environments, FUNCTIONS) as ranks:
            yield

    test_program.run_with_server(test_program.parse("--server").server, begin, around)
