# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a Preconditioner: its parameter groups, and a hook that calls the preconditioner before its step."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._layers import only_of_embeddings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class BaseOptimizer(torch.optim.Optimizer):
    """AdamW; in groups with plain=True w <- (1 - lr weight_decay) w - lr grad, for layers whose answers are whole
    updates.

    AdamW is that of torch, with its defaults, but weight_decay is 0.01 for groups that give none. A group's lr_scale
    multiplies its lr, also if a scheduler sets it. Preconditioner.make_optimizer makes one with the groups of a model.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, plain=False, lr_scale=1.0))

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Returns the result of `closure`, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate = group["lr"] * group["lr_scale"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - rate * group["weight_decay"])
                if group["plain"]:
                    p.add_(p.grad, alpha=-rate)
                else:
                    self._adam(group, p, rate)
        return loss

    def _adam(self, group: Dict[str, Any], p: torch.Tensor, rate: float) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        (beta1, beta2), (m, v) = group["betas"], (state[moment] for moment in _MOMENTS)
        m.lerp_(p.grad, 1 - beta1)
        v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        root = (v.sqrt() / (1 - beta2**state["step"])**0.5).add_(group["eps"])
        p.addcdiv_(m, root, value=-rate / (1 - beta1**state["step"]))


def groups_of(model: nn.Module, whole_updates: Set[nn.Parameter], weight_decay: float,
              embedding_scale: float) -> List[Dict[str, Any]]:
    """Returns groups of the trainable parameters. Matrices have weight decay; biases and other vectors have none.

    Args:
        model: The model.
        whole_updates: Parameters of layers whose answers are whole updates.
        weight_decay: For matrices.
        embedding_scale: lr_scale of weights that only embeddings have and that are not in `whole_updates`.
    """
    embeddings = only_of_embeddings(model)
    groups: Dict[Tuple[bool, bool, float], Dict[str, Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            plain, decays = parameter in whole_updates, parameter.dim() > 1
            scale = embedding_scale if parameter in embeddings and not plain else 1.0
            group = groups.setdefault((plain, decays, scale), {"params": [], "weight_decay": decays * weight_decay, "plain": plain,
                                                               "lr_scale": scale})
            group["params"].append(parameter)
    return list(groups.values())


def attach(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], step: Callable[[Any], None]) -> Any:
    """Makes optimizer.step() call step(loss) first, or after its closure if it has one. Returns a handle with remove().

    The loss is the result of the closure, or None. The optimizer must train all of `parameters`.

    Raises:
        UnimplementedError: torch before 2.0.
        InvalidArgumentError: LBFGS, or an optimizer that does not train every layer.
    """
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UnimplementedError(f"attach: needs torch 2.0 or later, got {torch.__version__}", "UNIMPLEMENTED", "UNSPECIFIED",
                                 "Call step() before optimizer.step()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("attach: LBFGS makes several backward passes a step; expected one", "INVALID_ARGUMENT")
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not own.issuperset(parameters):
        raise InvalidArgumentError("attach: expected an optimizer that trains every layer", "INVALID_ARGUMENT", "UNSPECIFIED",
                                   "Leave out layers that it does not train: skip=; or call step() yourself")

    def before(unused: Any, arguments: Tuple[Any, ...], options: Dict[str, Any]) -> Optional[Tuple[Any, Dict[str, Any]]]:
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            step(None)
            return None

        def both() -> Any:
            loss = closure()
            step(loss)
            return loss

        return arguments[:1], {**options, "closure": both}

    return optimizer.register_step_pre_hook(before)
