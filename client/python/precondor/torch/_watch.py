# SPDX-License-Identifier: Apache-2.0
"""The hooks by which a Preconditioner follows its model. They do not keep it alive."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Dict, List, Sequence

from ._attention import Tap
from ._compiled import Switch, TappedHook
from ._exchange import Slot
from ._hooks import Hook, after_accumulation, after_forward, right_after_forward
from ._layers import Chosen, Matrix


def _weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that calls the bound method for as long as others hold its object."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = weak()
        if bound is not None:
            bound(*arguments)

    return call


def watch(held: contextlib.ExitStack, layers: Sequence[Slot], chosen: Chosen, switch: Switch, *, on_forward: Callable[..., None],
          on_tap: Callable[..., None], on_call: Callable[..., None], on_gradient: Callable[..., None], overlap: bool) -> None:
    """Adds the hooks.

    Args:
        held: Removes them when it is closed.
        layers, chosen: The session's layers, and the modules that have them.
        switch: Taps in compiled code use it.
        on_forward, on_tap, on_call, on_gradient: Methods of the Preconditioner that the hooks call.
        overlap: Also gradients of parameters are followed.
    """
    on_forward, on_tap, on_call, on_gradient = map(_weakly, (on_forward, on_tap, on_call, on_gradient))
    slots: Dict[Matrix, List[Slot]] = {}
    for slot in layers:
        slots.setdefault(slot.matrix, []).append(slot)
    held.callback(setattr, switch, "on", False)
    for module, matrix in chosen.matrices:
        own = slots[matrix]
        if module is not None:
            held.callback(right_after_forward(module, TappedHook(
                lambda module, inputs, output, own=own: on_forward(own, module, inputs, output),
                lambda x, grad, own=own: on_tap(own, x, grad), switch)).remove)
        if overlap:
            for parameter in matrix.parameters():
                held.callback(after_accumulation(parameter, lambda own=own, of=id(parameter): on_gradient(own, of)).remove)
    for attention, matrices in chosen.attentions.items():
        tap = Tap(matrices, lambda matrix, x, output, around: on_call(slots[matrix], x, output, around))
        held.callback(tap.leave)
        held.callback(attention.register_forward_pre_hook(Hook(tap.enter)).remove)
        held.callback(after_forward(attention, tap.leave).remove)
