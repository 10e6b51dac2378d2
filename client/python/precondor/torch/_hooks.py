# SPDX-License-Identifier: Apache-2.0
"""Hooks of modules and parameters."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn


# Whether the call is one of torch.compile, which makes a graph of it.
is_tracing: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class Hook:
    """A module's hook, which does nothing while the module is traced. Copies of the module (an average of weights, a teacher)
    get one that does nothing."""

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
    """Of a hook on a node without another owner."""

    def __init__(self, node: Any, handle: Any) -> None:
        self._node = node
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def right_after_forward(module: nn.Module, hook: Hook) -> Any:
    """Calls `hook` before the hooks of a forward pass that are there already, which may give another output; the handle."""
    handle = module.register_forward_hook(hook)
    module._forward_hooks.move_to_end(handle.id, last=False)  # torch 2's prepend=True
    return handle


def after_forward(module: nn.Module, call: Callable[..., Any]) -> Any:
    """Calls `call` when a forward pass of the module has ended, from torch 2.1 on also when it has raised; the handle."""
    always = {"always_call": True} if "always_call" in inspect.signature(module.register_forward_hook).parameters else {}
    return module.register_forward_hook(Hook(call), **always)


def after_accumulation(parameter: nn.Parameter, call: Callable[[], None]) -> Any:
    """Calls `call` whenever a backward pass has added to parameter.grad; a handle with remove()."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(lambda unused: call())
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    return _NodeHandle(node, node.register_hook(lambda *unused: call()))
