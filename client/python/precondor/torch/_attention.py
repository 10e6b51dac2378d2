# SPDX-License-Identifier: Apache-2.0
"""Observes the projections of nn.MultiheadAttention, which are not called as modules.

The attention's forward pass calls torch.nn.functional.linear by that name. While an observed forward pass runs, the
name refers to a function of this module, which calls the original one and reports calls with known weights.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._layers import Matrix

# Receives a call: its matrix, the input, the output, and how many of the weight's rows lie before and behind those
# used.
Tell = Callable[[Matrix, torch.Tensor, torch.Tensor, Tuple[int, int]], None]

# Global, because the process has one such name. Taps are entered and left in any order.
_entered: "List[Tap]" = []
_true: Callable[..., torch.Tensor] = nn.functional.linear


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    output = _true(x, weight, bias)
    for tap in _entered:
        tap.look(x, weight, output)
    return output


class Tap:
    """Observes the calls of one attention between enter() and leave(). Not thread-safe."""

    def __init__(self, matrices: Sequence[Matrix], tell: Tell) -> None:
        self._matrices = {id(matrix.weight): matrix for matrix in matrices}
        self._tell = tell

    def enter(self, *unused: Any) -> None:
        """Begins observing. Called before the forward pass."""
        global _true  # pylint: disable=global-statement
        if nn.functional.linear is not _linear:
            _true = nn.functional.linear
            nn.functional.linear = _linear
        if self not in _entered:
            _entered.append(self)

    def leave(self, *unused: Any) -> None:
        """Ends observing. Called after the forward pass, and when the preconditioner is closed: before torch 2.1 a
        forward pass that raises does not call it."""
        if self in _entered:
            _entered.remove(self)
        if not _entered and nn.functional.linear is _linear:
            nn.functional.linear = _true

    def look(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """Reports a call of linear if its weight is known."""
        # A part of the packed weight is a view of it.
        matrix = self._matrices.get(id(weight)) or self._matrices.get(id(weight._base))
        if matrix is not None and output.grad_fn is not None:
            before = weight.storage_offset() // weight.shape[1]
            self._tell(matrix, x, output, (before, matrix.weight.shape[0] - before - weight.shape[0]))
