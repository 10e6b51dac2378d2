# SPDX-License-Identifier: Apache-2.0
"""Hooks of modules that also serve under torch.compile.

Where a module is traced, Python code of a hook is lost or breaks the graph. There the hook adds a tap to the graph
instead: a function that returns the module's output, and whose backward pass calls Python with the input and the
output's gradient.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn

from .._errors import FailedPreconditionError

# Whether torch.compile is tracing the current call.
is_tracing: Callable[[], bool] = torch.compiler.is_compiling


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


# Receives a call in a compiled graph: the input and the output's gradient.
Tell = Callable[[torch.Tensor, torch.Tensor], None]

_keys = itertools.count()
_hooks: "weakref.WeakValueDictionary[int, TappedHook]" = weakref.WeakValueDictionary()


def lost_call(layer: str, step: int) -> FailedPreconditionError:
    """The error of a layer with a gradient whose call compiled code has lost."""
    return FailedPreconditionError(
        f"layer {layer}: it has a gradient, but step {step}, which takes statistics, saw no call of it", "FAILED_PRECONDITION", "UNSPECIFIED",
        "nn.MultiheadAttention is seen outside compiled code alone; what else calls its weight and not its module, skip= leaves out")


class Switch:
    """Whether forward passes that begin now run hooks and get taps. Compiled code is guarded by it, so that steps without
    statistics have a graph without taps."""

    def __init__(self) -> None:
        self.on = True


# The leaf's gradient needs the output, so that the graph keeps the call. The key is a tensor, whose value is not guarded,
# so that blocks that are compiled separately share their graphs.
@torch.library.custom_op("precondor::tap", mutates_args=())
def _tell(x: torch.Tensor, grad: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    hook = _hooks.get(int(key))
    if hook is not None:
        hook.tell(x, grad)
    return torch.zeros((), dtype=torch.float32, device="cpu")


@_tell.register_fake
def _(x: torch.Tensor, grad: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    del x, grad, key
    return torch.zeros((), dtype=torch.float32, device="cpu")


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, x: torch.Tensor, leaf: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        del leaf
        ctx.save_for_backward(x, key)
        return output.clone()  # an operation in place may follow

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        x, key = ctx.saved_tensors
        return grad, None, _tell(x.detach(), grad.detach(), key), None


class TappedHook(Hook):
    """A layer's forward hook. While the switch is on, it runs `call` if Python calls the module, and adds a tap if the module is
    traced."""

    def __init__(self, call: Callable[..., Any], tell: Tell, switch: Switch) -> None:
        super().__init__(call)
        self.tell = tell
        self._switch = switch
        key = next(_keys)
        _hooks[key] = self
        self._key = torch.tensor(key, dtype=torch.int64, device="cpu")
        self._leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def __call__(self, module: nn.Module, inputs: Tuple[Any, ...], output: Any) -> Any:
        if not is_tracing():
            return super().__call__(module, inputs, output) if self._switch.on else None
        if not self._switch.on or not torch.is_grad_enabled() or not inputs or not isinstance(output, torch.Tensor) or \
                not output.requires_grad:
            return None
        return _Tap.apply(output, inputs[0].detach().to(output.dtype), self._leaf, self._key)


def is_compiled(model: nn.Module) -> bool:
    """Returns whether the model, or a part of it, is compiled."""
    return any(hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
               for module in model.modules())


def guard_hooks() -> bool:
    """Makes compiled code check for modules' hooks, in the whole process. Returns False if torch has not imported its
    compiler yet.

    By default compiled code does not check: a graph of the model, or of another model of its class, that was compiled
    before the hooks would stay in use. The first call discards the graphs compiled so far, because they do not check
    either.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()
    return True


def original(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)
