# SPDX-License-Identifier: Apache-2.0
"""The methods of a model's layers where the user names none. docs/results.md has the measurements behind them."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any, Dict, Mapping, Optional, Union

import torch

from .._layer_methods import as_method
from .._session import Method, traits_of
from ._layers import Chosen
from ._optimizer import BaseOptimizer

# Of vectors, which the optimizer trains; torch's own default for the second is for longer runs.
_BETAS = (0.95, 0.95)
# Of embeddings, which the optimizer trains: a multiple of the rate of all else.
_EMBEDDING_SCALE = 4.0
# Of linear layers at a model's ends, and of weights that one shares with an embedding. A longer side, mostly a vocabulary, has no factor: its decompositions cost d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})
# Of convolutions, whose eigenbases turn faster than 10 steps can follow.
_SOAP_OF_CONVOLUTIONS = Method("soap", {"max_factor_dim": 2048, "refresh_interval": 5})


@dataclasses.dataclass
class Recipe:
    """method: of layers. embeddings, tied, experts: of weights that embeddings alone have, of those that another module has too, and of
    stacks of experts; None where they are left to the optimizer. is_default: method is muon, of hidden linear layers, and the others have soap. needs_optimizer: the user has named no method and has shown no optimizer yet that
    takes whole updates as such."""

    method: Method
    embeddings: Optional[Method]
    tied: Optional[Method]
    experts: Optional[Method]
    is_default: bool
    needs_optimizer: bool

    def layer_methods(self, given: Optional[Mapping[str, Union[Method, str]]], chosen: Chosen) -> Dict[str, Union[Method, str]]:
        """The user's, which come first, and those of the recipe."""
        methods = dict(given or {})
        for names, method in ((chosen.convolutions, _SOAP_OF_CONVOLUTIONS), (chosen.ends, _SOAP)):
            if self.is_default and names:
                methods[f"(?:{'|'.join(map(re.escape, names))})"] = method  # no user's pattern: an equal one would be replaced
        return methods

    @property
    def embedding_scale(self) -> float:
        """lr_scale of embeddings that the optimizer trains."""
        return _EMBEDDING_SCALE if self.is_default else 1.0

    def optimizer_options(self, options: Mapping[str, Any]) -> Dict[str, Any]:
        """What make_optimizer gives to BaseOptimizer beside groups and rate."""
        return {"betas": _BETAS, **options} if self.is_default else dict(options)

    def check_optimizer(self) -> None:
        """Warns, once, before the first step of an optimizer that is not known to take whole updates."""
        if self.needs_optimizer:
            self.needs_optimizer = False
            warnings.warn("Preconditioner: answers of the default methods, muon and soap, are whole updates, which AdamW and the like "
                          "would normalize again: make the optimizer with make_optimizer() or of param_groups(); or name a "
                          "method whose answers suit any optimizer: method=\"mkor\"")


def choose(method: Union[Method, str, None], embeddings: Union[Method, str, None], experts: Union[Method, str, None], exchange: str,
           fallback: Any, optimizer: Optional[torch.optim.Optimizer]) -> Recipe:
    """method, where one is named. Otherwise muon for hidden linear layers and experts, soap for all others and for weights that a layer shares with
    an embedding, and the optimizer for what embeddings alone have; or mkor where these cannot serve: with an optimizer that does not
    take whole updates as such, in the exchanges of workers with factors, and with a fallback to the optimizer alone."""
    takes_updates = optimizer is None or (
        isinstance(optimizer, BaseOptimizer) and any(group["plain"] for group in optimizer.param_groups))
    by_default = method is None and takes_updates and exchange not in ("REPLAY", "PULL_FACTORS") and not fallback
    of_embeddings = as_method(embeddings) if embeddings else None
    tied = _SOAP if by_default and embeddings is None else of_embeddings
    chosen = as_method(method or ("muon" if by_default else "mkor"))
    of_experts = as_method(experts) if experts else chosen if experts is None and traits_of(chosen).whole_updates else None
    return Recipe(chosen, of_embeddings, tied, of_experts, by_default, by_default and optimizer is None)
