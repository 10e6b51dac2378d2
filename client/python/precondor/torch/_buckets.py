# SPDX-License-Identifier: Apache-2.0
"""Averages gradients among the ranks where the servers average those of layers: of a plain model, and by
DistributedDataParallel's communication hook."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from typing import Any, Dict, Iterable, Optional, Sequence, Set

import torch
import torch.distributed as dist

from .._errors import InvalidArgumentError
from ._group import Group
from ._layers import has_gradient


class Rest:
    """DDP's communication hook for exchange DIRECT.

    Between begin() and end() it averages every parameter except the layers', whose gradients stay the rank's own;
    otherwise all parameters. DDP accepts one hook and keeps it permanently.
    """

    def __init__(self, ddp: Any) -> None:
        """Registers the hook. Raises InvalidArgumentError if DDP has another one."""
        self._group = ddp.process_group
        self._ranks: Optional[Group] = None  # the Preconditioner's
        self._own: Set[int] = set()
        self._flat: Dict[int, torch.Tensor] = {}  # by bucket; kept, because gloo's thread may use it when Python ends
        try:
            ddp.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        except RuntimeError as error:
            raise InvalidArgumentError(f"overlap: DistributedDataParallel takes no communication hook: {error}",
                                       "INVALID_ARGUMENT", "UNSPECIFIED",
                                       "It has one at most, and with overlap that is Preconditioner's") from None

    def begin(self, ranks: Group, layers: Iterable[torch.nn.Parameter]) -> None:
        self._ranks = ranks
        self._own = {id(parameter) for parameter in layers}

    def end(self) -> None:
        self._ranks = None
        self._own = set()

    def active(self) -> bool:
        return bool(self._own)

    def _reduce(self, bucket: Any) -> Any:
        whole = bucket.buffer()
        rest = [gradient for parameter, gradient in zip(bucket.parameters(), bucket.gradients())
                if id(parameter) not in self._own]
        if not rest:
            future = torch.futures.Future(devices=[whole.device] if whole.is_cuda else [])
            future.set_result(whole)
            return future
        size = sum(gradient.numel() for gradient in rest)
        flat = self._flat.get(bucket.index())
        if flat is None or flat.numel() != size or flat.dtype != whole.dtype:
            flat = self._flat[bucket.index()] = torch.empty(size, dtype=whole.dtype, device=whole.device)
        parts = flat.split([gradient.numel() for gradient in rest])
        for part, gradient in zip(parts, rest):
            part.copy_(gradient.reshape(-1))

        ranks = self._ranks

        def put_back(done: Any) -> torch.Tensor:
            with contextlib.nullcontext() if ranks is None else ranks.waiting("all_reduce of a bucket", ordered=False):
                done.value()  # raises the collective's error, which would be lost otherwise
            flat.div_(dist.get_world_size(self._group))
            for part, gradient in zip(parts, rest):
                gradient.copy_(part.view_as(gradient))
            return whole

        return dist.all_reduce(flat, group=self._group, async_op=True).get_future().then(put_back)


def average_rest(group: Group, model: torch.nn.Module, by_server: Iterable[torch.nn.Parameter], samples: int) -> None:
    """Averages the gradients of a plain model except those that the server averages."""
    layers = {id(parameter) for parameter in by_server}
    group.average_gradients([parameter for parameter in model.parameters()
                             if parameter.requires_grad and id(parameter) not in layers], samples)


def refuse_sparse(model: torch.nn.Module) -> None:
    """Raises InvalidArgumentError if a module makes sparse gradients, which are not averaged."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise InvalidArgumentError(f"module {name}: expected dense gradients of a plain model on several ranks, got sparse=True",
                                       "INVALID_ARGUMENT", "UNSPECIFIED", "Use sparse=False, or DistributedDataParallel")


class GradientFill:
    """Gives a rank of a plain model zeros for gradients that it lacks and another rank has, as other averages count them: experts may
    have different inputs on each rank. Begins after the first step with a layer that servers skip, as they do on all ranks, so that
    models that use all layers have no collective more.

    Attributes:
        fills: Whether it has begun.
    """

    def __init__(self, group: Group, parameters: Sequence[torch.nn.Parameter], may_begin: bool) -> None:
        self._group, self._parameters, self._may_begin = group, parameters, may_begin
        self.fills = False

    def fill(self) -> None:
        """Called before a step's gradients are looked at. Collective, if it has begun."""
        if not self.fills:
            return
        used = self._group.any_of(torch.tensor([has_gradient(parameter) for parameter in self._parameters])).tolist()
        for parameter, one in zip(self._parameters, used):
            if one and parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def look(self, skipped: Iterable[bool]) -> None:
        """Called with whether layers were skipped in a finite step. All ranks know the same."""
        self.fills = self.fills or self._may_begin and any(skipped)


def warn_of_other_weights(group: Group, model: torch.nn.Module) -> None:
    """Warns if a plain model's ranks begin with different weights. Collective."""
    norms = group.gather([float(parameter.detach().norm()) for parameter in model.parameters() if parameter.requires_grad])
    if any(not math.isclose(one, other, rel_tol=1e-4) for own in norms for one, other in zip(own, norms[0]) if not math.isnan(other)):
        warnings.warn("Preconditioner: the ranks' weights differ, and stay so: give every rank the same seed, or broadcast the weights")


_of_ddp: "weakref.WeakKeyDictionary[torch.nn.Module, Rest]" = weakref.WeakKeyDictionary()


def rest_of(ddp: torch.nn.Module) -> Rest:
    """Returns the hook of a DistributedDataParallel, which an earlier Preconditioner may have made.

    Raises:
        InvalidArgumentError: A Preconditioner with overlap that uses it is not closed, or DDP has another hook.
    """
    rest = _of_ddp.get(ddp)
    if rest is None:
        rest = _of_ddp[ddp] = Rest(ddp)
    if rest.active():
        raise InvalidArgumentError("overlap: DistributedDataParallel has another Preconditioner with overlap",
                                   "INVALID_ARGUMENT", "UNSPECIFIED", "Close it first")
    return rest
