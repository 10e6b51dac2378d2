# SPDX-License-Identifier: Apache-2.0
"""Hooks of modules and parameters."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn


# Whether torch.compile is tracing the current call.
is_tracing: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class Hook:
    """A module's hook, which does nothing while torch.compile traces the module. In a copy of the module (an average of
    weights, a teacher) the hook does nothing either."""

    def __init__(self, call: Optional[Callable[..., Any]] = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None and not is_tracing():
            self._call(*arguments)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> Tuple[type, Tuple[()]]:
        return Hook, ()


class _NodeHandle:
    """Handle of a hook on an autograd node, which it keeps alive."""

    def __init__(self, node: Any, handle: Any) -> None:
        self._node = node
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def right_after_forward(module: nn.Module, hook: Hook) -> Any:
    """Registers `hook` to run before the module's existing forward hooks, which may replace the output. Returns the
    handle."""
    handle = module.register_forward_hook(hook)
    module._forward_hooks.move_to_end(handle.id, last=False)  # like torch 2's prepend=True
    return handle


def after_forward(module: nn.Module, call: Callable[..., Any]) -> Any:
    """Registers `call` to run after each forward pass of the module; from torch 2.1 on also after one that raised.
    Returns the handle."""
    always = {"always_call": True} if "always_call" in inspect.signature(module.register_forward_hook).parameters else {}
    return module.register_forward_hook(Hook(call), **always)


def after_accumulation(parameter: nn.Parameter, call: Callable[[], None]) -> Any:
    """Registers `call` to run after each addition of a backward pass to parameter.grad. Returns a handle with
    remove()."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(lambda unused: call())
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    return _NodeHandle(node, node.register_hook(lambda *unused: call()))
