# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention's projections, which are no modules that are called.

Its forward pass calls torch.nn.functional.linear by that name. While one that is watched runs, the name stands for a
function that calls the true one and tells of the weights that it knows.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import nn

from ._layers import Matrix

# Told of a call: its matrix, the input, the output, and how many of the weight's rows lie before and behind those used.
Tell = Callable[[Matrix, torch.Tensor, torch.Tensor, Tuple[int, int]], None]


class Tap:
    """Watches the calls of one attention between enter() and leave(). One thread trains."""

    def __init__(self, matrices: Sequence[Matrix], tell: Tell) -> None:
        self._matrices = {id(matrix.weight): matrix for matrix in matrices}
        self._tell = tell
        self._true: Optional[Callable[..., torch.Tensor]] = None

    def enter(self, *unused: Any) -> None:
        """Before the forward pass."""
        if self._true is None:
            self._true = nn.functional.linear
            nn.functional.linear = self._linear

    def leave(self, *unused: Any) -> None:
        """After it; of one that has raised, before the next."""
        if self._true is not None:
            nn.functional.linear = self._true
            self._true = None

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        output = self._true(x, weight, bias)
        # A part of the packed weight is a view of it.
        matrix = self._matrices.get(id(weight)) or self._matrices.get(id(weight._base))
        if matrix is not None and output.grad_fn is not None:
            before = weight.storage_offset() // weight.shape[1]
            self._tell(matrix, x, output, (before, matrix.d_out - before - weight.shape[0]))
        return output
