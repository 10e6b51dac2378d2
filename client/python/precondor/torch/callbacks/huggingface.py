# SPDX-License-Identifier: Apache-2.0
"""Callback for transformers.Trainer. It needs the event on_pre_optimizer_step (transformers 4.46 or later)."""

from __future__ import annotations

import pathlib
from typing import Any, Dict, List, Optional

import torch
import transformers

from .. import Preconditioner
from . import _saved


FILE = "precondor.pt"  # in each of Trainer's checkpoints


class PrecondorCallback(transformers.TrainerCallback):
    """Preconditions gradients in transformers.Trainer.

        class Trainer(transformers.Trainer):
            def create_optimizer(self, model=None):
                self.optimizer = precondor.torch.make_optimizer(self.model, lr=self.args.learning_rate)
                return self.optimizer

        Trainer(..., callbacks=[PrecondorCallback("local")])

    Arguments are those of Preconditioner except model and optimizer; give make_optimizer the same. Another optimizer needs a method
    such as mkor. Layers are preconditioned after Trainer's clipping. The reported loss is that of the model's output in training
    ({"loss": ...}), as the mean over accumulated batches. preconditioner.metrics() has numbers for a logger. The session ends with the
    training. Trainer's checkpoints have the servers' factors and momentum, and a resumed training goes on with them.

    Raises:
        NotImplementedError: For transformers before 4.46. When training begins, for fp16 (use bf16), DeepSpeed, or several
            GPUs in one process.

    The beginning of training also raises the errors of Preconditioner.
    """

    def __init__(self, address: str, **options: Any) -> None:
        if not hasattr(transformers.TrainerCallback, "on_pre_optimizer_step"):
            raise NotImplementedError("PrecondorCallback: expected transformers 4.46 or later, which tell of a step before it is "
                                      f"made, got {transformers.__version__}")
        self._address = address
        self._options = options
        self._losses: List[torch.Tensor] = []
        self._hook: Any = None
        self.preconditioner: Optional[Preconditioner] = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
                       **unused: Any) -> None:
        if args.fp16 or args.deepspeed:
            name = "fp16" if args.fp16 else "deepspeed"
            raise NotImplementedError(f"PrecondorCallback: {name} is not supported; expected f32 or bf16 and whole weights")
        if args.n_gpu > 1:  # Trainer wraps the model in nn.DataParallel, which calls copies of it
            raise NotImplementedError(f"PrecondorCallback: expected one GPU a process, got {args.n_gpu}; start the program with "
                                      "torchrun")
        self.preconditioner = Preconditioner(model, self._address, optimizer=optimizer, **self._options)
        if state.global_step > 0:
            _saved.resume(self.preconditioner, _read(args, state))
        self._hook = model.register_forward_hook(self._keep_loss)

    def _keep_loss(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model.training and isinstance(output, dict) and output.get("loss") is not None:
            self._losses.append(output["loss"].detach())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        loss = torch.stack(self._losses).mean() if self._losses else None
        self._losses.clear()
        self.preconditioner.step(loss)

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        folder = _folder(args, state)
        if self.preconditioner is None or args.save_only_model:
            return
        saved = self.preconditioner.state_dict(factors=True)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(saved, folder / f"{FILE}.part")
            (folder / f"{FILE}.part").replace(folder / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        self._hook.remove()
        self.preconditioner.close(end_session=True)
        self.preconditioner = None


def _folder(args: Any, state: Any) -> pathlib.Path:
    """Returns that of the step's checkpoint."""
    return pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _read(args: Any, state: Any) -> Optional[Dict[str, Any]]:
    """Returns the preconditioner's state in the checkpoint from which Trainer resumes, if it has one. Trainer does not tell where a
    checkpoint lies that is given to train()."""
    given = args.resume_from_checkpoint
    for folder in (*((pathlib.Path(given),) if isinstance(given, str) else ()), _folder(args, state)):
        if (folder / FILE).is_file():
            return torch.load(folder / FILE, map_location="cpu", weights_only=True)
    return None
