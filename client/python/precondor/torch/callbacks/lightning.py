# SPDX-License-Identifier: Apache-2.0
"""Callback for Lightning's Trainer (lightning or pytorch_lightning, 2.0 or later)."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Optional

import torch

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from ..._errors import PrecondorError
from .. import Preconditioner, _optimizer
from . import _saved


class PrecondorCallback(Callback):
    """Preconditions gradients in Lightning's Trainer, for modules with one optimizer under automatic optimization.

        class Module(LightningModule):
            def configure_optimizers(self):
                return precondor.torch.make_optimizer(self, lr=0.01)

        Trainer(..., callbacks=[PrecondorCallback("local")])

    Arguments are those of Preconditioner except model and optimizer; give make_optimizer the same. Another optimizer needs a method
    such as mkor. Layers are preconditioned after Lightning's clipping. The reported loss is training_step's, as the mean over
    accumulated batches. preconditioner.metrics() has numbers for a logger. The session ends with the training. Lightning's checkpoints
    have the servers' factors and momentum, and a resumed training goes on with them, or warns that they are missing. Those of an
    exception have them in a training of one process.

    Args:
        address, options: Those of Preconditioner.
        save_factors: False: checkpoints have no factors.

    Raises:
        NotImplementedError: When training begins, for 16-mixed (use bf16-mixed), several optimizers or manual
            optimization.

    The beginning of training also raises the errors of Preconditioner.
    """

    def __init__(self, address: str, *, save_factors: bool = True, **options: Any) -> None:
        self._address = address
        self._options, self._saves = options, save_factors
        self._loss: Optional[torch.Tensor] = None
        self._state: Optional[Dict[str, Any]] = None  # before and after the training: that of a checkpoint
        self._attached: Any = None
        self.preconditioner: Optional[Preconditioner] = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.precision == "16-mixed":
            raise NotImplementedError("PrecondorCallback: precision 16-mixed is not supported; expected f32 or bf16-mixed")
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise NotImplementedError(f"PrecondorCallback: expected one optimizer under automatic optimization, got "
                                      f"{len(trainer.optimizers)}, {'automatic' if pl_module.automatic_optimization else 'manual'}")
        optimizer = trainer.optimizers[0]
        wrapped = isinstance(trainer.model, torch.nn.parallel.DistributedDataParallel)
        self.preconditioner = Preconditioner(trainer.model if wrapped else pl_module, self._address, optimizer=optimizer, **self._options)
        if trainer.global_step > 0:
            _saved.resume(self.preconditioner, lambda: self._state)
        self._state = None
        # Lightning clips in the optimizer's closure, after on_before_optimizer_step.
        self._attached = _optimizer.attach(optimizer, self.preconditioner._parameters(), self._step)

    def state_dict(self) -> Dict[str, Any]:
        if self.preconditioner is None:
            return self._state or {}
        return self.preconditioner.state_dict(factors=True) if self._saves else {}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]) -> None:
        self._state = None  # load_state_dict follows if the checkpoint has one

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._state = state_dict

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Adds a batch's share of the step's loss, which Lightning has divided by the number of batches of a step."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def _step(self, unused: Any) -> None:
        assert self.preconditioner is not None
        self.preconditioner.step(self._loss)
        self._loss = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.preconditioner is not None
        if trainer.checkpoint_callback is not None:  # a checkpoint can be saved after the training
            self._state = self.state_dict()
        self._close(end_session=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Checkpoints of an exception are saved later. With several ranks, reading would wait for those without the exception.
        if trainer.world_size == 1 and self.preconditioner is not None:
            with contextlib.suppress(PrecondorError):
                self._state = self.state_dict()
        self._close(end_session=False)

    def _close(self, end_session: bool) -> None:
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.remove()
        closed, self.preconditioner = self.preconditioner, None
        if closed is not None:
            closed.close(end_session=end_session)
