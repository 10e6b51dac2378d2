# SPDX-License-Identifier: Apache-2.0
"""Callback for Lightning's Trainer (lightning or pytorch_lightning, 2.0 or later)."""

from __future__ import annotations

from typing import Any, Optional

import torch

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from .. import Preconditioner


class PrecondorCallback(Callback):
    """Preconditions gradients in Lightning's Trainer, for modules with one optimizer under automatic optimization.

        Trainer(..., callbacks=[PrecondorCallback("127.0.0.1:7070", session="bert-run-7", method="mkor")])

    Arguments are those of Preconditioner except model and optimizer. Layers are preconditioned before Lightning's
    clipping. The reported loss is training_step's, as the mean over accumulated batches. preconditioner.metrics() has
    numbers for a logger. The session ends with the training. It is not part of Lightning's checkpoints, so a resumed
    training needs another session name and begins with new factors.

    Raises:
        NotImplementedError: When training begins, for 16-mixed (use bf16-mixed), several optimizers or manual
            optimization.

    The beginning of training also raises the errors of Preconditioner.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self._address = address
        self._options = options
        self._loss: Optional[torch.Tensor] = None
        self.preconditioner: Optional[Preconditioner] = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.precision == "16-mixed":
            raise NotImplementedError("PrecondorCallback: precision 16-mixed is not supported; expected f32 or bf16-mixed")
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise NotImplementedError(f"PrecondorCallback: expected one optimizer under automatic optimization, got "
                                      f"{len(trainer.optimizers)}, {'automatic' if pl_module.automatic_optimization else 'manual'}")
        wrapped = isinstance(trainer.model, torch.nn.parallel.DistributedDataParallel)
        self.preconditioner = Preconditioner(trainer.model if wrapped else pl_module, self._address,
                                             optimizer=trainer.optimizers[0], **self._options)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Adds a batch's share of the step's loss, which Lightning has divided by the number of batches of a step."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.preconditioner is not None
        self.preconditioner.step(self._loss)
        self._loss = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.preconditioner is not None
        self.preconditioner.close(end_session=True)
        self.preconditioner = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.preconditioner is not None:
            self.preconditioner.close()
