# SPDX-License-Identifier: Apache-2.0
"""Callback for transformers.Trainer. It needs the event on_pre_optimizer_step (transformers 4.46 or later)."""

from __future__ import annotations

from typing import Any, List, Optional

import torch
import transformers

from .. import Preconditioner


class PrecondorCallback(transformers.TrainerCallback):
    """Preconditions gradients in transformers.Trainer.

        Trainer(..., callbacks=[PrecondorCallback("127.0.0.1:7070", session="bert-run-7", method="mkor")])

    Arguments are those of Preconditioner except model and optimizer. Layers are preconditioned after Trainer's
    clipping. The reported loss is that of the model's output in training ({"loss": ...}), as the mean over accumulated
    batches. preconditioner.metrics() has numbers for a logger. The session ends with the training. It is not part of
    Trainer's checkpoints, so a resumed training needs another session name and begins with new factors.

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
        self._hook = model.register_forward_hook(self._keep_loss)

    def _keep_loss(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model.training and isinstance(output, dict) and output.get("loss") is not None:
            self._losses.append(output["loss"].detach())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        loss = torch.stack(self._losses).mean() if self._losses else None
        self._losses.clear()
        self.preconditioner.step(loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        assert self.preconditioner is not None
        self._hook.remove()
        self.preconditioner.close(end_session=True)
        self.preconditioner = None
