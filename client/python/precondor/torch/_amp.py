# SPDX-License-Identifier: Apache-2.0
"""The part of a step that looks for gradients that are not finite, and uses AMP's GradScaler."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._exchange import Slot
from ._group import Group
from ._layers import has_gradient
from ._optimizer import parameters_of
from ._sharded import local

_COPIED = 1 << 18  # gradients of so many elements are copied and added up faster than each gets its norm


def trained_by(optimizer: Optional[torch.optim.Optimizer], model: nn.Module, layers: Iterable[nn.Parameter]) -> List[nn.Parameter]:
    """Returns the parameters that a step changes: the optimizer's and those of layers; without an optimizer the model's."""
    if optimizer is None:
        return list(model.parameters())
    # By id, because a tensor's hash is slow.
    return list({id(one): one for one in (*(one for group in optimizer.param_groups for one in group["params"]), *layers)}.values())


def gradients_of(parameters: Iterable[nn.Parameter]) -> List[torch.Tensor]:
    """Returns this rank's parts of the gradients. A frozen parameter has none."""
    return [_values(parameter.grad) for parameter in parameters if has_gradient(parameter)]


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Returns whether no value is infinite or NaN. Reads each value once, and waits once for each device and type."""
    kinds: Dict[Tuple[torch.device, torch.dtype], List[torch.Tensor]] = {}
    for one in gradients:
        kinds.setdefault((one.device, one.dtype), []).append(one)

    def have_finite_sum(alike: List[torch.Tensor]) -> bool:
        wide = torch.float32 if alike[0].element_size() < 4 else None
        few = sum(one.numel() for one in alike) <= _COPIED
        values = torch._C._nn.flatten_dense_tensors(alike) if few else torch.stack(torch._foreach_norm(alike, 2, dtype=wide))
        return math.isfinite(values.sum(dtype=wide).item())

    # A value that is not finite makes the sum not finite. So may large ones.
    return all(map(have_finite_sum, kinds.values())) or all(bool(torch.isfinite(one).all()) for one in gradients)


def skip_text(step: int, model: nn.Module) -> str:
    """Returns the warning of a step that is skipped."""
    name = next((name for name, one in model.named_parameters() if not are_finite(gradients_of([one]))), None)
    what = "another rank has a gradient that" if name is None else f"the gradient of {name}"
    return (f"Preconditioner: step {step}: {what} is not finite. The step is skipped: all gradients become None, and no factors change. "
            "Later skipped steps are told by StepResult.skipped alone")


def _values(grad: torch.Tensor) -> torch.Tensor:
    grad = local(grad)
    grad = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(grad) if grad.is_complex() else grad


def unscale(scaler: Optional[Any], optimizer: Optional[torch.optim.Optimizer], trained: Sequence[nn.Parameter],
            slots: Sequence[Slot], group: Group, averages: bool, differ: bool, sharded: bool) -> Tuple[float, bool]:
    """Unscales the gradients. Returns the loss scale that statistics still have, and whether all gradients of all ranks
    are finite.

    Args:
        scaler: AMP's GradScaler, or None.
        optimizer: The optimizer whose gradients are unscaled.
        trained: The parameters that the step changes.
        slots: The session's layers.
        group: The job's ranks.
        averages: step() averages the gradients, and not DDP.
        differ: The ranks' gradients, or their parts of them, differ.
        sharded: The model is under fully_shard or tensor parallelism.

    Raises:
        UnimplementedError: A scaler for a model in parts.
        InvalidArgumentError: No optimizer, an optimizer without all layers, or unscale_ was called although step()
            averages.
    """
    if scaler is None or not scaler.is_enabled():
        finite = are_finite(gradients_of(trained))
        return 1.0, group.all(finite) if differ else finite
    if sharded:
        raise UnimplementedError("scaler: is not supported for a model in parts", "UNIMPLEMENTED", "UNSPECIFIED",
                                 "bf16 needs none: MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    if optimizer is None:
        raise InvalidArgumentError("scaler: needs an optimizer: make_optimizer(), or optimizer= of Preconditioner", "INVALID_ARGUMENT")
    own = parameters_of(optimizer)
    stranger = next((slot for slot in slots if not own >= set(slot.matrix.parameters())), None)
    if stranger is not None:
        raise InvalidArgumentError(
            f"scaler: layer {stranger.layer.name}: expected its parameters in optimizer= of Preconditioner",
            "INVALID_ARGUMENT", "UNSPECIFIED",
            "The scaler unscales one optimizer here. Leave out layers that it does not train: skip=")
    gradients = [_values(one.grad) for one in own if one.grad is not None]
    finite = are_finite(gradients)
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
                "INVALID_ARGUMENT", "UNSPECIFIED", "Leave unscale_ to step(), and clip after it, with a method such as mkor") from None
    return loss_scale, finite
