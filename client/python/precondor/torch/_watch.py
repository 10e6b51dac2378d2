# SPDX-License-Identifier: Apache-2.0
"""The hooks by which a Preconditioner follows its model. They do not keep it alive.

The projections of nn.MultiheadAttention are not called as modules: its forward pass calls torch.nn.functional.linear by
that name. While an observed forward pass runs, the name refers to a function of this module, which calls the original
one and reports calls with known weights.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._exchange import Slot
from ._hooks import Hook, Switch, TappedHook
from ._layers import Chosen, Matrix

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
        linear = nn.functional.linear  # once: another thread's Tap may replace it meanwhile
        if linear is not _linear:
            _true = linear
            nn.functional.linear = _linear
        if self not in _entered:
            _entered.append(self)

    def leave(self, *unused: Any) -> None:
        """Ends observing. Called after the forward pass, also after one that raised, and when the preconditioner is closed."""
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


def _weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that calls the bound method for as long as others hold its object."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = weak()
        if bound is not None:
            bound(*arguments)

    return call


def watch(held: contextlib.ExitStack, layers: Sequence[Slot], fed: Collection[int], chosen: Chosen, switch: Switch, *,
          on_forward: Callable[..., None], on_tap: Callable[..., None], on_call: Callable[..., None],
          on_gradient: Callable[..., None], overlap: bool) -> None:
    """Adds the hooks.

    Args:
        held: Removes them when it is closed.
        layers, chosen: The session's layers, and the modules that have them.
        fed: Places of the layers whose methods take statistics. Forward passes of others are not followed.
        switch: Taps in compiled code use it.
        on_forward, on_tap, on_call, on_gradient: Methods of the Preconditioner that the hooks call.
        overlap: Also gradients of parameters are followed.
    """
    on_forward, on_tap, on_call, on_gradient = map(_weakly, (on_forward, on_tap, on_call, on_gradient))
    slots: Dict[Matrix, List[Slot]] = {}
    for slot in layers:
        slots.setdefault(slot.matrix, []).append(slot)
    followed = {slot.matrix for slot in layers if slot.place in fed}
    held.callback(setattr, switch, "on", False)
    for module, matrix in chosen.matrices:
        own = slots[matrix]
        if module is not None and matrix in followed:
            hook = TappedHook(lambda module, inputs, output, own=own: on_forward(own, module, inputs, output),
                              lambda x, grad, own=own: on_tap(own, x, grad), switch)
            held.callback(module.register_forward_hook(hook, prepend=True).remove)  # hooks of others may replace the output
        if overlap:
            for parameter in matrix.parameters():
                held.callback(parameter.register_post_accumulate_grad_hook(
                    lambda unused, own=own, of=id(parameter): on_gradient(own, of)).remove)
    for attention, matrices in chosen.attentions.items():
        if followed.isdisjoint(matrices):
            continue
        tap = Tap(matrices, lambda matrix, x, output, around: on_call(slots[matrix], x, output, around))
        held.callback(tap.leave)
        held.callback(attention.register_forward_pre_hook(Hook(tap.enter)).remove)
        held.callback(attention.register_forward_hook(Hook(tap.leave), always_call=True).remove)
