# SPDX-License-Identifier: Apache-2.0
"""What a training loop gives to a step, as the numbers that it stands for."""

from __future__ import annotations

import operator
from typing import Union

import torch

from .._errors import InvalidArgumentError

_MAX_SAMPLES = 1 << 40  # the servers'


def number_of(loss: Union[float, torch.Tensor, None]) -> float:
    """NaN for None."""
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
