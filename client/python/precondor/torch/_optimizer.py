# SPDX-License-Identifier: Apache-2.0
"""The optimizer behind a Preconditioner: which parameters get what, and a step of both in one call."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._layers import only_of_embeddings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class BaseOptimizer(torch.optim.Optimizer):
    """AdamW, and in groups with plain=True w <- (1 - lr weight_decay) w - lr grad: for layers whose answer is a whole update.

    AdamW is torch's, with its defaults but for weight_decay 0.01 of groups that state none. A group's lr_scale multiplies its lr,
    whatever sets that. Preconditioner.make_optimizer makes one with the groups of a model.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, plain=False, lr_scale=1.0))

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Returns what `closure` returns, if one is given."""
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
    """Of the parameters that are trained: matrices decay, biases and other vectors do not. whole_updates: of layers whose
    answers are updates. embedding_scale: lr_scale of weights that embeddings alone have and that are not among those."""
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
    """Has optimizer.step() call step(loss) first, after a closure if it has one; a handle with remove(). The loss is what the
    closure gave, or None. parameters: that the optimizer has to train."""
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
