# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of a step to numbers, and refuses combinations of options that are not supported."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Optional, Tuple, Union

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError, check_mapping, check_text, expect_instance, invalid
from .._session import SessionSpec, traits_of
from ._exchange import clip_of, methods_of
from ._optimizer import BaseOptimizer, check_optimizer

_MAX_SAMPLES = 1 << 40  # the servers' limit


def check_types(model: Any, optimizer: Any, texts: Mapping[str, Any], mappings: Mapping[str, Any],
                groups: Mapping[str, Tuple[Any, type]]) -> None:
    """Raises InvalidArgumentError, which names it, for an argument of another type. SessionSpec checks others.

    Args:
        model, optimizer: The arguments of Preconditioner.
        texts, mappings: Arguments by name that have to be of type str or None, or dicts or None.
        groups: Arguments by name, with the class of each.
    """
    if not isinstance(model, nn.Module):
        raise invalid("model", "a torch.nn.Module", model)
    if optimizer is not None:
        check_optimizer("optimizer", optimizer)
    for what, value in texts.items():
        if value is not None:
            check_text(what, value)
    for what, value in mappings.items():
        check_mapping(what, value)
    for what, (value, kind) in groups.items():
        expect_instance(what, value, kind)


def number_of(loss: Union[float, torch.Tensor, None]) -> float:
    """Returns the loss as a float; NaN for None. Raises InvalidArgumentError if it is no number."""
    if loss is None:
        return float("nan")
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise InvalidArgumentError(f"loss: expected a number or a tensor of one, got a {loss.dtype} tensor of shape "
                                       f"{list(loss.shape)}", "INVALID_ARGUMENT")
        loss = loss.detach()
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"loss: expected a number or a tensor of one, got {loss!r}", "INVALID_ARGUMENT") from None


def count_of(samples: int) -> int:
    try:
        count = operator.index(samples)
    except TypeError:
        count = 0
    if not 0 < count <= _MAX_SAMPLES:
        raise InvalidArgumentError(f"samples: expected a whole number of 1 ... {_MAX_SAMPLES}, got {samples!r}",
                                   "INVALID_ARGUMENT")
    return count


def rate_of(given: Optional[float], optimizer: Optional[torch.optim.Optimizer], needed: bool, weight: nn.Parameter) -> Optional[float]:
    """Returns a step's learning rate: the given one, or that of the optimizer's group of `weight`, or of the first if none has it.
    Raises InvalidArgumentError if it is needed and unknown."""
    if given is None and optimizer is not None:
        groups = optimizer.param_groups
        own = next((group for group in groups if any(one is weight for one in group["params"])), groups[0])
        given = float(own["lr"]) * (own["lr_scale"] if isinstance(optimizer, BaseOptimizer) else 1.0)
    if given is None and needed:
        raise InvalidArgumentError("scaling KL_CLIP needs the learning rate: give optimizer= to Preconditioner, or "
                                   "learning_rate= to step, or the method option scaling NORM_RESCALE", "INVALID_ARGUMENT")
    return given


def check_options(spec: SessionSpec, *, sharded: bool, overlap: bool, several: bool) -> None:
    """Refuses options that cannot be combined.

    Args:
        spec: The session's description.
        sharded: The model's parameters are divided, by fully_shard or tensor parallelism.
        overlap: Gradients are sent during the backward pass.
        several: There are several ranks, or DistributedDataParallel.

    Raises:
        UnimplementedError, InvalidArgumentError: The combination is not supported.
    """
    if sharded and (spec.exchange not in ("DELEGATE", "SHARDED") or overlap):
        raise UnimplementedError(
            f"exchange {spec.exchange}{', overlap' * overlap}: expected DELEGATE or SHARDED, without overlap, for a model in parts",
            "UNIMPLEMENTED", "UNSPECIFIED", "A rank has a part of every gradient, and only after the backward pass")
    if spec.exchange == "SHARDED" and not sharded:
        raise InvalidArgumentError("exchange SHARDED: expected a model under fully_shard or tensor parallelism", "INVALID_ARGUMENT")
    if overlap and several and spec.exchange != "DIRECT":
        raise InvalidArgumentError(
            f"overlap: expected exchange DIRECT with several ranks or DistributedDataParallel, got {spec.exchange}",
            "INVALID_ARGUMENT", "UNSPECIFIED", "The gradients that leave have to be there before the job has averaged them")
    whole = [layer.name for layer, method in zip(spec.layers, methods_of(spec)) if traits_of(method).whole_updates]
    if spec.fallback.policy != "NEVER" and whole:
        raise InvalidArgumentError(
            f"fallback: {len(whole)} layers, the first of them {whole[0]}, have methods whose answers are whole updates: first order "
            "would train them by plain gradient descent at that rate", "INVALID_ARGUMENT", "UNSPECIFIED",
            "Leave fallback out, or give these layers a method whose answers suit AdamW (docs/use/methods/choosing.md)")
    clips = clip_of(spec)
    for place, clip in clips.items():
        if not _is_number(clip) or clip != clips[min(clips)]:
            raise InvalidArgumentError(
                f"layer {spec.layers[place].name}: scaling_clip: expected a number, one for all layers, got {clip!r}",
                "INVALID_ARGUMENT", "UNSPECIFIED", "A schedule of it is for clients that follow it; or scaling NORM_RESCALE")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
