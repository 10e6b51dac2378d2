# SPDX-License-Identifier: Apache-2.0
"""Chooses the methods of a model's layers if the user names none. docs/results.md has the measurements behind the
choice."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import AbstractSet, Any, Callable, Dict, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from .._session import Method, as_method, traits_of
from ._layers import Chosen
from ._optimizer import BaseOptimizer

# For vectors, which the optimizer trains. torch's default for the second beta suits longer runs.
_BETAS = (0.95, 0.95)
# For embeddings, which the optimizer trains: multiple of the learning rate of all other parameters.
_EMBEDDING_SCALE = 4.0
# For linear layers at a model's ends, and for weights that a layer shares with an embedding. Longer sides, usually a
# vocabulary, get no factor, because its decomposition costs d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})
# For convolutions, whose eigenbases change faster than a refresh each 10 steps can follow.
_SOAP_OF_CONVOLUTIONS = Method("soap", {"max_factor_dim": 2048, "refresh_interval": 5})
# In the names of classes of optimizers that normalize each update. Others, such as SGD, apply it as it is, or are unknown.
_NORMALIZING = re.compile("adam|adagrad|adadelta|adafactor|rmsprop|rprop|lamb|lion|muon", re.IGNORECASE)


@dataclasses.dataclass
class Recipe:
    """The methods of a model's weights.

    Attributes:
        method: For layers.
        embeddings: For weights that only embeddings have; None: the optimizer trains them.
        tied: For weights that embeddings share with another module; None: the optimizer trains them.
        experts: For stacks of experts; None: the optimizer trains them.
        is_default: method is muon, for hidden linear layers, and the other layers have soap.
        needs_optimizer: Neither an optimizer nor its groups have been made, and check_optimizer has not been called.
    """

    method: Method
    embeddings: Optional[Method]
    tied: Optional[Method]
    experts: Optional[Method]
    is_default: bool
    needs_optimizer: bool

    def layer_methods(self, given: Optional[Mapping[str, Union[Method, str]]], chosen: Chosen) -> Dict[str, Union[Method, str]]:
        """Returns the user's patterns, which come first, and those of the recipe."""
        methods = dict(given or {})
        for names, method in ((chosen.convolutions, _SOAP_OF_CONVOLUTIONS), (chosen.ends, _SOAP)):
            if self.is_default and names:
                # A group, so that the key differs from a user's pattern, which it would replace.
                methods[f"(?:{'|'.join(map(re.escape, names))})"] = method
        return methods

    @property
    def embedding_scale(self) -> float:
        """lr_scale of the embeddings that the optimizer trains."""
        return _EMBEDDING_SCALE if self.is_default else 1.0

    def optimizer_options(self, options: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the options of BaseOptimizer except groups and learning rate."""
        return {"betas": _BETAS, **options} if self.is_default else dict(options)

    def check_optimizer(self, optimizer: Optional[torch.optim.Optimizer], methods: Sequence[str],
                        whole_updates: Callable[[], AbstractSet[nn.Parameter]]) -> None:
        """Warns once, before the first step, if no optimizer is known for whole updates, or if the one that was given normalizes
        them again.

        Args:
            optimizer: The one that was given; None: none was.
            methods: Those of the layers.
            whole_updates: Returns the parameters of layers whose answers are whole updates.
        """
        needs, self.needs_optimizer = self.needs_optimizer, False
        whole = whole_updates() if needs else ()
        if not whole or (optimizer is not None and not _normalizes(optimizer, whole)):
            return
        named = " and ".join(sorted({name for name in methods if traits_of(name).whole_updates}))
        # With an optimizer= of the user's the default is another method.
        sgd = "" if self.is_default else "give one that applies them as they are (SGD) as optimizer=; "
        warnings.warn(f"Preconditioner: answers of {named} are whole updates, which "
                      f"{'AdamW and the like' if optimizer is None else type(optimizer).__name__} would normalize again: make the "
                      f"optimizer with make_optimizer() or of param_groups(); {sgd}or name a method whose answers suit any "
                      "optimizer: method=\"mkor\"")


def _normalizes(optimizer: torch.optim.Optimizer, whole: AbstractSet[nn.Parameter]) -> bool:
    """Returns whether the optimizer divides the updates of one of these parameters by their size."""
    own = isinstance(optimizer, BaseOptimizer)
    names = [base.__name__ for base in type(optimizer).__mro__]
    if not own and ("SGD" in names or not any(_NORMALIZING.search(name) for name in names)):
        return False
    return any(parameter in whole for group in optimizer.param_groups if not (own and group["plain"])
               for parameter in group["params"])


def choose(method: Union[Method, str, None], embeddings: Union[Method, str, None], experts: Union[Method, str, None], exchange: str,
           fallback: Any, optimizer: Optional[torch.optim.Optimizer]) -> Recipe:
    """Returns the user's method if there is one, otherwise the default.

    The default is muon for hidden linear layers and experts, soap for other layers and for weights that a layer shares
    with an embedding, and the optimizer for weights that only embeddings have. It is mkor if these methods do not suit:
    with an optimizer that does not apply whole updates unchanged, in the exchanges REPLAY and PULL_FACTORS, and with a
    fallback, after which only the optimizer acts.
    """
    takes_updates = optimizer is None or (
        isinstance(optimizer, BaseOptimizer) and any(group["plain"] for group in optimizer.param_groups))
    by_default = method is None and takes_updates and exchange not in ("REPLAY", "PULL_FACTORS") and not fallback
    of_embeddings = as_method(embeddings, "embeddings") if embeddings else None
    tied = _SOAP if by_default and embeddings is None else of_embeddings
    chosen = as_method(("muon" if by_default else "mkor") if method is None else method)
    of_experts = as_method(experts, "experts") if experts else chosen if experts is None and traits_of(chosen).whole_updates else None
    return Recipe(chosen, of_embeddings, tied, of_experts, by_default, True)
