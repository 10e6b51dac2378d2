# SPDX-License-Identifier: Apache-2.0
"""LAMB after You et al. 2019 (arXiv:1904.00962), with the conventions of apex's FusedLAMB;
docs/use/methods/optimizers.md."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _check(name: str, value: float, low: float, high: float = math.inf, low_included: bool = True) -> None:
    if not (low <= value if low_included else low < value) or not value < high:
        raise ValueError(f"Lamb: {name}: expected a number in {'[' if low_included else '('}{low}, {high}), got {value}")


class Lamb(torch.optim.Optimizer):
    """Adam with a step length in proportion to each tensor's own norm.

        g <- g / max(1, |all gradients| / max_grad_norm)
        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w <- w - lr ratio u,  ratio = |w| / |u|

    The norm of all gradients is over all parameter groups. It clips the gradients that step() finds, which are
    preconditioned already. The ratio is 1 where |w| or |u| is 0, and in groups without weight decay unless `nvlamb` is
    set; the paper itself is nvlamb=True, max_grad_norm=0. Put biases and normalisation weights into a group with
    weight_decay 0.

    For parameters of f16 and bf16, moments and computation are f32, also in a checkpoint. step() does not wait for the
    device. A gradient that is not finite makes the weights and moments that it reaches not finite, as in Adam: skip the
    steps that torch.cuda.amp.GradScaler or the preconditioner's answer SKIP says to skip.

    Raises:
        ValueError: An option is out of range; the message names it.
        RuntimeError: A gradient is sparse or complex; nothing was changed.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.01, max_grad_norm: float = 1.0, nvlamb: bool = False) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm,
                                      nvlamb=nvlamb))

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        _check("lr", group["lr"], 0)
        _check("betas[0]", group["betas"][0], 0, 1)
        _check("betas[1]", group["betas"][1], 0, 1)
        _check("eps", group["eps"], 0, low_included=False)
        _check("weight_decay", group["weight_decay"], 0)
        _check("max_grad_norm", group["max_grad_norm"], 0)
        for other in self.param_groups[:1]:
            if group["max_grad_norm"] != other["max_grad_norm"]:
                raise ValueError(f"Lamb: max_grad_norm: expected {other['max_grad_norm']} as in the first group, since the "
                                 f"norm is over all groups, got {group['max_grad_norm']}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Returns what `closure` returns, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self._with_gradients():
            if p.grad.is_sparse or p.grad.is_complex():
                kind = "sparse" if p.grad.is_sparse else "complex"
                raise RuntimeError(f"Lamb: expected dense real gradients, got a {kind} one of shape {list(p.shape)}")
        divisor = self._clip_divisor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, divisor)
        return loss

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """As any optimizer's, but moments keep their f32 beside parameters of f16 and bf16."""
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for name, p in zip(saved, itertools.chain.from_iterable(group["params"] for group in self.param_groups)):
            for moment in _MOMENTS if name in state_dict["state"] else ():
                self.state[p][moment] = state_dict["state"][name][moment].to(p.device, copy=True)

    def _with_gradients(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None)

    def _clip_divisor(self) -> Dict[torch.device, torch.Tensor]:
        """max(1, |all gradients| / max_grad_norm), on every device that has a gradient; empty: no clipping."""
        norms = [torch.linalg.vector_norm(p.grad, dtype=_work_type(p)) for p in self._with_gradients()]
        limit = self.param_groups[0]["max_grad_norm"]
        if limit == 0 or not norms:
            return {}
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]))
        divisor = (total / limit).clamp(min=1.0)
        return {device: divisor.to(device) for device in {norm.device for norm in norms}}

    def _update(self, group: Dict[str, Any], p: torch.Tensor, divisor: Dict[torch.device, torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        work = _work_type(p)
        state = self.state[p]
        if not state:
            state["step"] = 0
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(p, dtype=work, memory_format=torch.preserve_format)
        state["step"] += 1
        m, v = (state[moment] for moment in _MOMENTS)

        g = p.grad.to(work)
        if divisor:
            g = g / divisor[p.device].to(work)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (v / (1 - beta2**state["step"])).sqrt_().add_(group["eps"])
        u = (m / (1 - beta1**state["step"])).div_(root)
        w = p.to(work)
        if group["weight_decay"] != 0:
            u.add_(w, alpha=group["weight_decay"])
        if group["weight_decay"] != 0 or group["nvlamb"]:
            u.mul_(_trust_ratio(w, u))
        p.copy_(w.sub(u, alpha=group["lr"]))


def _work_type(p: torch.Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _trust_ratio(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    above, below = torch.linalg.vector_norm(w), torch.linalg.vector_norm(u)
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))
