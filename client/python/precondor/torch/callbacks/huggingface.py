# SPDX-License-Identifier: Apache-2.0
"""Callback for transformers.Trainer. It needs the event on_pre_optimizer_step (transformers 4.46 or later)."""

from __future__ import annotations

import pathlib
import uuid
from typing import Any, Dict, List, Optional

import torch
import transformers

from .. import Preconditioner
from . import _saved


FILE = "precondor.pt"  # in each of Trainer's checkpoints
_NAME = "precondor"  # in the checkpoint's TrainerState.stateful_callbacks: which file goes with it


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
    training. Trainer's checkpoints have the servers' factors and momentum, and a resumed training goes on with them, or warns that they
    are missing. Checkpoints of a search, and those with save_only_model, have none.

    Args:
        address, options: Those of Preconditioner.
        save_factors: False: checkpoints have no factors.

    Raises:
        NotImplementedError: For transformers before 4.46. When training begins, for fp16 (use bf16), DeepSpeed, or several
            GPUs in one process.

    The beginning of training also raises the errors of Preconditioner.
    """

    def __init__(self, address: str, *, save_factors: bool = True, **options: Any) -> None:
        if not hasattr(transformers.TrainerCallback, "on_pre_optimizer_step"):
            raise NotImplementedError("PrecondorCallback: expected transformers 4.46 or later, which tell of a step before it is "
                                      f"made, got {transformers.__version__}")
        self._address = address
        self._options, self._saves = options, save_factors
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
            _saved.resume(self.preconditioner, lambda: _read(args, state))
        self._hook = model.register_forward_hook(self._keep_loss)

    def _keep_loss(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model.training and isinstance(output, dict) and output.get("loss") is not None:
            self._losses.append(output["loss"].detach())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        loss = torch.stack(self._losses).mean() if self._losses else None
        self._losses.clear()
        self.preconditioner.step(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if control.should_save and self._saves and not (args.save_only_model or state.is_hyper_param_search):
            state.stateful_callbacks[_NAME] = {"id": uuid.uuid4().hex, "step": state.global_step,
                                               "file": str((_folder(args, state) / FILE).absolute())}

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        mark = state.stateful_callbacks.get(_NAME, {})
        if self.preconditioner is None or mark.get("step") != state.global_step:
            return
        saved = self.preconditioner.state_dict(factors=True)
        if state.is_world_process_zero:
            part = _folder(args, state) / f"{FILE}.part"
            torch.save({"id": mark["id"], "state": saved}, part)
            part.replace(mark["file"])

    def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        self._hook.remove()
        self.preconditioner.close(end_session=True)
        self.preconditioner = None


def _folder(args: Any, state: Any) -> pathlib.Path:
    """Returns that of the step's checkpoint."""
    return pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _read(args: Any, state: Any) -> Optional[Dict[str, Any]]:
    """Returns the preconditioner's state in the checkpoint from which Trainer resumes, if it has one. Trainer does not tell where the
    checkpoint lies."""
    mark = state.stateful_callbacks.get(_NAME, {})
    given = [args.resume_from_checkpoint] if isinstance(args.resume_from_checkpoint, str) else []
    for file in (mark.get("file", ""), *(pathlib.Path(folder) / FILE for folder in (*given, _folder(args, state)))):
        if mark.get("step") == state.global_step and pathlib.Path(file).is_file():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            if saved["id"] == mark["id"]:
                return saved["state"]
    return None
