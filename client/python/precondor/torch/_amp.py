# SPDX-License-Identifier: Apache-2.0
"""The part of a step that uses AMP's GradScaler."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._exchange import Slot
from ._group import Group


def optimized(optimizer: torch.optim.Optimizer) -> Set[nn.Parameter]:
    """Returns the parameters that the optimizer trains."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def unscale(scaler: Optional[Any], optimizer: Optional[torch.optim.Optimizer], slots: Sequence[Slot], group: Group,
            averages: bool, sharded: bool) -> Tuple[float, bool]:
    """Unscales the gradients. Returns the loss scale that statistics still have, and whether all gradients of all ranks
    are finite.

    Args:
        scaler: AMP's GradScaler, or None.
        optimizer: The optimizer whose gradients are unscaled.
        slots: The session's layers.
        group: The job's ranks.
        averages: step() averages the gradients, and not DDP.
        sharded: The model is under fully_shard or tensor parallelism.

    Raises:
        UnimplementedError: A scaler for a model in parts.
        InvalidArgumentError: No optimizer, an optimizer without all layers, or unscale_ was called although step()
            averages.
    """
    if scaler is None or not scaler.is_enabled():
        return 1.0, True
    if sharded:
        raise UnimplementedError("scaler: is not supported for a model in parts", "UNIMPLEMENTED", "UNSPECIFIED",
                                 "bf16 needs none: MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    if optimizer is None:
        raise InvalidArgumentError("scaler: needs an optimizer: make_optimizer(), or optimizer= of Preconditioner", "INVALID_ARGUMENT")
    own = optimized(optimizer)
    stranger = next((slot for slot in slots if not own >= set(slot.matrix.parameters())), None)
    if stranger is not None:
        raise InvalidArgumentError(
            f"scaler: layer {stranger.layer.name}: expected its parameters in optimizer= of Preconditioner",
            "INVALID_ARGUMENT", "UNSPECIFIED",
            "The scaler unscales one optimizer here. Leave out layers that it does not train: skip=")
    gradients = [one.grad._values() if one.grad.is_sparse else one.grad for one in own if one.grad is not None]
    finite = all(bool(torch.isfinite(one).all()) for one in gradients)
    if averages:
        finite = group.all(finite)
    if not finite and gradients:
        gradients[0].fill_(float("inf"))  # otherwise this rank's scaler would not detect another rank's overflow
    loss_scale = scaler.get_scale()
    try:
        scaler.unscale_(optimizer)
    except RuntimeError as error:
        if "already been called" not in str(error):
            raise
        if averages:
            raise InvalidArgumentError(
                "scaler: unscale_ has been called, and this rank's scaler does not know of the other ranks' overflows",
                "INVALID_ARGUMENT", "UNSPECIFIED", "Leave unscale_ to step(), and clip after it") from None
    return loss_scale, finite
