# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention's projections, which are no modules that are called.

Its forward pass calls torch.nn.functional.linear by that name. While any that is watched runs, the name stands for one
function of this module, which calls the true one and tells of the weights that it knows.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._layers import Matrix

# Told of a call: its matrix, the input, the output, and how many of the weight's rows lie before and behind those used.
Tell = Callable[[Matrix, torch.Tensor, torch.Tensor, Tuple[int, int]], None]

# Of the process: there is one name. Taps are entered and left in any order.
_entered: "List[Tap]" = []
_true: Callable[..., torch.Tensor] = nn.functional.linear


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    output = _true(x, weight, bias)
    for tap in _entered:
        tap.look(x, weight, output)
    return output


class Tap:
    """Watches the calls of one attention between enter() and leave(). One thread trains."""

    def __init__(self, matrices: Sequence[Matrix], tell: Tell) -> None:
        self._matrices = {id(matrix.weight): matrix for matrix in matrices}
        self._tell = tell

    def enter(self, *unused: Any) -> None:
        """Before the forward pass."""
        global _true  # pylint: disable=global-statement
        if nn.functional.linear is not _linear:
            _true = nn.functional.linear
            nn.functional.linear = _linear
        if self not in _entered:
            _entered.append(self)

    def leave(self, *unused: Any) -> None:
        """After it, and once more when no preconditioner watches any longer: before torch 2.1 one that raises is left by the latter."""
        if self in _entered:
            _entered.remove(self)
        if not _entered and nn.functional.linear is _linear:
            nn.functional.linear = _true

    def look(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """At a call of linear."""
        # A part of the packed weight is a view of it.
        matrix = self._matrices.get(id(weight)) or self._matrices.get(id(weight._base))
        if matrix is not None and output.grad_fn is not None:
            before = weight.storage_offset() // weight.shape[1]
            self._tell(matrix, x, output, (before, matrix.d_out - before - weight.shape[0]))
