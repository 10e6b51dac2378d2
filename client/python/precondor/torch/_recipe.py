# SPDX-License-Identifier: Apache-2.0
"""Chooses the methods of a model's layers if the user names none. docs/use/results.md has the measurements behind the
choice."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import AbstractSet, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .._options import Selection
from .._session import Fallback, Method, as_method, traits_of
from ._layers import EMBEDDINGS, Choice, Chosen, choose as choose_layers, plain_name, recurrent_matrices
from ._optimizer import BaseOptimizer

# For vectors, which the optimizer trains. torch's default for the second beta suits longer runs.
_BETAS = (0.95, 0.95)
# For Chosen.tables, which the optimizer trains: multiple of the learning rate of all other parameters.
_EMBEDDING_SCALE = 4.0
# For linear layers at a model's ends, and for weights that a layer shares with an embedding. Longer sides, usually a
# vocabulary, get no factor, because its decomposition costs d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})
# For convolutions, whose eigenbases change faster than a refresh each 10 steps can follow.
_SOAP_OF_CONVOLUTIONS = Method("soap", {"max_factor_dim": 2048, "refresh_interval": 5})
# For linear layers at the ends of a model with recurrent layers, or one whose other weights AdamW trains: AdamW trains them too.
_AVERAGE = Method("identity")
# In the names of classes of optimizers that normalize each update. Others, such as SGD, apply it as it is, or are unknown.
_NORMALIZING = re.compile("ada(m|n|grad|delta|factor)|ademamix|came|kron|lamb|lars|lion|muon|novograd|prodigy|r(ms)?prop|shampoo|"
                          "sign(sgd|um)|soap|sophia", re.IGNORECASE)


@dataclasses.dataclass
class Recipe:
    """The methods of a model's weights.

    Attributes:
        method: For layers.
        embeddings: For weights that only embeddings have; None: the optimizer trains them.
        tied: For weights that embeddings share with another module; None: the optimizer trains them.
        experts: For stacks of experts; None: the optimizer trains them.
        recurrent: For matrices of recurrent modules; None: the optimizer trains them.
        ends: For linear layers at the model's ends; None: method.
        is_default: method is muon, for hidden linear layers; convolutions have soap.
        needs_optimizer: Neither an optimizer nor its groups have been made, and check_optimizer has not been called.
    """

    method: Method
    embeddings: Optional[Method]
    tied: Optional[Method]
    experts: Optional[Method]
    recurrent: Optional[Method]
    ends: Optional[Method]
    is_default: bool
    needs_optimizer: bool = True

    def layer_methods(self, given: Optional[Mapping[str, Union[Method, str]]], chosen: Chosen) -> Dict[str, Union[Method, str]]:
        """Returns the user's patterns, which come first, and those of the recipe."""
        methods = dict(given or {})
        for names, method in ((chosen.convolutions, _SOAP_OF_CONVOLUTIONS if self.is_default else None), (chosen.ends, self.ends)):
            if method and names:
                # A group, so that the key differs from a user's pattern, which it would replace.
                methods[f"(?:{'|'.join(map(re.escape, names))})"] = method
        return methods

    @property
    def embedding_scale(self) -> float:
        """lr_scale of Chosen.tables."""
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


def choose(model: nn.Module, choice: Choice, method: Union[Method, str, None], exchange: str, fallback: Fallback,
           optimizer: Optional[torch.optim.Optimizer]) -> Tuple[Recipe, Chosen]:
    """Returns the methods and the layers: of the user's method if there is one, otherwise of the default.

    The default is muon for hidden linear layers, experts and recurrent modules, soap for other layers and for weights that
    a layer shares with an embedding, and the optimizer for weights that only embeddings have and, beside recurrent layers, for
    the ends. It is mkor if these methods
    do not suit: with an optimizer that does not apply whole updates unchanged, in the exchanges REPLAY and PULL_FACTORS, with
    a fallback, after which only the optimizer acts, and for a model most of whose matrices are no layers. Warns of such a
    model.

    Args:
        model: The model.
        choice: The user's choice of layers, without methods of the recipe.
        method, exchange, fallback, optimizer: The arguments of Preconditioner.
    """
    takes_updates = optimizer is None or (
        isinstance(optimizer, BaseOptimizer) and any(group["plain"] for group in optimizer.param_groups))
    by_default = method is None and takes_updates and exchange not in ("REPLAY", "PULL_FACTORS") and fallback.policy == "NEVER"
    recipe = _recipe_of("mkor" if method is None and not by_default else method, choice.selection)
    chosen = _layers_of(model, choice, recipe)
    recurrent = recurrent_matrices(model)
    if recipe.is_default and any(id(matrix.weight) in recurrent for _, matrix in chosen.matrices):
        recipe.ends, chosen.tables = _AVERAGE, set()
    left = _most_left(model, chosen, recipe.is_default)
    if not left:
        return recipe, chosen
    becomes = ""
    if recipe.is_default:
        other = dataclasses.replace(_recipe_of("mkor", choice.selection), ends=_AVERAGE)
        layers = _layers_of(model, choice, other)
        if layers.matrices:
            recipe, chosen, becomes = other, layers, "method is therefore mkor, and make_optimizer() makes AdamW. "
    warnings.warn(f"Preconditioner: most of the model's weights are no layers, and are left to the optimizer: {left}. {becomes}"
                  "register_layer() makes layers of modules, and parameter_methods= of other matrices")
    return recipe, chosen


def _recipe_of(method: Union[Method, str, None], selection: Selection) -> Recipe:
    """Returns the recipe of a method; of None: the default."""
    embeddings, experts = selection.embeddings, selection.experts
    of_embeddings = as_method(embeddings, "selection.embeddings") if embeddings else None
    tied = _SOAP if method is None and embeddings is None else of_embeddings
    chosen = as_method("muon" if method is None else method)
    whole = chosen if traits_of(chosen).whole_updates else None
    of_experts = as_method(experts, "selection.experts") if experts else whole if experts is None else None
    return Recipe(chosen, of_embeddings, tied, of_experts, whole, _SOAP if method is None else None, method is None)


def _layers_of(model: nn.Module, choice: Choice, recipe: Recipe) -> Chosen:
    return choose_layers(model, dataclasses.replace(choice, embeddings=recipe.embeddings, tied=recipe.tied, experts=recipe.experts,
                                                    recurrent=recipe.recurrent))


def _most_left(model: nn.Module, chosen: Chosen, counts_skipped: bool) -> str:
    """Returns the names of the largest matrices that are no layers, if most are none; otherwise "". Those of embeddings do not
    count, nor frozen ones, nor, without `counts_skipped`, those that skip and skip_types leave out."""
    embeddings = {parameter for module in model.modules() if isinstance(module, EMBEDDINGS) for parameter in module._parameters.values()}
    sizes = {plain_name(name): parameter.numel() for name, parameter in model.named_parameters()
             if parameter.requires_grad and parameter.dim() > 1 and parameter not in embeddings}
    left: List[str] = [name for name in sizes if name in chosen.left and (counts_skipped or not chosen.left[name].startswith("skip"))]
    if 2 * sum(sizes[name] for name in left) <= sum(sizes.values()):
        return ""
    return ", ".join(sorted(left, key=sizes.__getitem__, reverse=True)[:3])
