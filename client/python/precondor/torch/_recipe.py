# SPDX-License-Identifier: Apache-2.0
"""Chooses the methods of a model's layers if the user names none. docs/use/results.md has the measurements behind the
choice."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import AbstractSet, Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .._errors import check_number
from .._options import Selection
from .._session import METHODS, Fallback, Method, SessionSpec, as_method, traits_of
from ._arguments import check_types
from ._exchange import slots_of
from ._group import inside
from ._layers import (CONVOLUTION, EMBEDDINGS, END, EXPERT, GATE, HIDDEN, NARROW, NORMED, OTHER, SCORES, TABLE, TIED, UNKNOWN, WORDS, Choice, Chosen,
                      Matrix, choose as choose_layers, exceptions, plain_name)
from ._optimizer import BaseOptimizer, groups_of

_MUON, _MKOR = Method("muon"), Method("mkor")
# docs/use/methods/muon.md has what the factor is worth.
_MUON_WITH_FACTOR = Method("muon", {"input_factor": True, "max_factor_dim": 2048})
# Sides longer than max_factor_dim, usually a vocabulary, get no factor, because its decomposition costs d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})
# Eigenbases of convolutions change faster than a refresh each 10 steps can follow.
_SOAP_OF_CONVOLUTIONS = Method("soap", {"max_factor_dim": 2048, "refresh_interval": 5})
# The optimizer trains the layer, and layer_methods can still name it.
_AVERAGE = Method("identity")

# The recipe: how the weights of each kind are trained, in most models, in models with recurrent modules, and in those most of whose
# matrices are of no kind. A number: by the optimizer, with this multiple of its learning rate, which is meant to be twice AdamW's own.
RECIPE: Dict[str, Tuple[Union[Method, float], ...]] = {
    HIDDEN:      (_MUON_WITH_FACTOR,      _MUON_WITH_FACTOR,      _MKOR),
    SCORES:      (_MUON,                  _MUON,                  _MKOR),
    NARROW:      (_MUON,                  _MUON,                  _MKOR),
    EXPERT:      (_MUON,                  _MUON,                  .5),
    GATE:        (_MUON,                  _MUON,                  .5),
    CONVOLUTION: (_SOAP_OF_CONVOLUTIONS,  _SOAP_OF_CONVOLUTIONS,  _MKOR),
    END:         (_SOAP,                  _AVERAGE,               _AVERAGE),
    TIED:        (_SOAP,                  _SOAP,                  .5),
    WORDS:       (4.0,                    1.0,                    .5),
    NORMED:      (_SOAP,                  1.0,                    .5),
    TABLE:       (1.0,                    1.0,                    .5),
    UNKNOWN:     (1.0,                    1.0,                    .5),  # muon if most matrices are of this kind
    OTHER:       (1.0,                    1.0,                    .5),  # and behind methods whose answers are no whole updates
}
# Betas of the optimizer that make_optimizer makes, in these models; None: AdamW's own, .9 and .999.
BETAS = ((0.95, 0.95), (0.95, 0.95), None)
MOST, RECURRENT, LEFT = range(3)

# Places in a sequence, in names of layers.
_NUMBERS = re.compile(r"(?<![^.])(expert|group)?\d+(?![^.])")
# In the names of classes of optimizers that normalize each update. Others, such as SGD, apply it as it is, or are unknown.
_NORMALIZING = re.compile("ada(m|n|grad|delta|factor)|ademamix|came|kron|lamb|lars|lion|muon|novograd|prodigy|r(ms)?prop|shampoo|"
                          "sign(sgd|um)|soap|sophia", re.IGNORECASE)


@dataclasses.dataclass
class Recipe:
    """The methods of a model's weights.

    Attributes:
        method: For layers without another.
        by_kind: As in a column of RECIPE.
        betas: As in BETAS.
        is_default: method is muon, for hidden linear layers.
        needs_optimizer: Neither an optimizer nor its groups have been made, and check_optimizer has not been called.
        given: The user's patterns of layers' names.
    """

    method: Method
    by_kind: Mapping[str, Union[Method, float]]
    betas: Optional[Tuple[float, float]] = None
    is_default: bool = False
    needs_optimizer: bool = True
    given: Mapping[str, Union[Method, str]] = dataclasses.field(default_factory=dict)

    def before_factors(self) -> "Recipe":
        """Returns the default of earlier releases, whose sessions and checkpoints this one goes on with: without input factors."""
        by_kind = {kind: _MUON if method is _MUON_WITH_FACTOR else method for kind, method in self.by_kind.items()}
        return dataclasses.replace(self, method=by_kind[HIDDEN], by_kind=by_kind) if self.is_default else self

    def layer_methods(self, given: Optional[Mapping[str, Union[Method, str]]], matrices: Iterable[Matrix]) -> Dict[str, Union[Method, str]]:
        """Returns the user's patterns, which come first, and those of the recipe."""
        self.given = given or {}
        methods = dict(self.given)
        for kind in (SCORES, NARROW, CONVOLUTION, END):
            names = [layer.name for matrix in matrices if matrix.kind == kind for layer in matrix.layers()]
            if names and self.by_kind[kind] != self.method:
                # A group, so that the key differs from a user's pattern, which it would replace.
                methods[f"(?:{'|'.join(map(re.escape, names))})"] = self.by_kind[kind]
        return methods

    def scale(self, kind: str) -> float:
        """Returns the multiple of the optimizer's learning rate for a kind of weight."""
        value = self.by_kind.get(kind)
        return value if isinstance(value, float) else self.by_kind[OTHER]

    def scales(self, model: nn.Module, chosen: Chosen) -> Dict[nn.Parameter, float]:
        """Returns multiples of the optimizer's learning rate."""
        return {parameter: self.scale(chosen.kinds.get(parameter, OTHER)) for parameter in model.parameters()}

    def optimizer_options(self, options: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the options of BaseOptimizer except groups and learning rate."""
        return {**({"betas": self.betas} if self.betas else {}), **options}

    def describe(self, layers: Iterable[Tuple[str, str, Matrix]], left: Iterable[Tuple[str, str, Optional[nn.Parameter]]],
                 scales: Mapping[nn.Parameter, float]) -> str:
        """Returns a table of layers and other parameters, of how each is trained, and why. Rows that differ only in numbers that
        are a part of their names are one.

        Args:
            layers: Name, method as label_of() returns it, and matrix of each.
            left: Names of the other parameters, with the reason, or the kind, of each, and the parameter.
            scales: As scales() returns them.
        """
        rows: List[Tuple[str, str, str, Optional[nn.Parameter]]] = []
        for name, method, matrix in layers:  # layer_methods leaves layers by their gradients alone as they are
            named = matrix.method is None and any(re.fullmatch(one, name) for one in self.given)
            rows.append((name, method, "layer_methods" if named else matrix.kind, matrix.weight))
        for name, reason, parameter in left:
            rows.append((name, "nothing" if reason == "frozen" else "optimizer", reason, parameter))
        alike: Dict[Tuple[str, str, str], List[str]] = {}
        for name, method, why, weight in rows:
            traits = METHODS.get(method.partition(" ")[0])
            scale = 1.0 if method == "nothing" or traits is not None and traits.whole_updates else scales.get(weight, 1.0)
            method += f", {scale:g} x rate" if scale != 1.0 else ""
            alike.setdefault((_NUMBERS.sub("*", name), method, why), []).append(name)
        shown = [("layer or parameter", "trained by", "why")]
        shown += [(f"{names[0]} (x {len(names)})" if len(names) > 1 else names[0], *row[1:]) for row, names in alike.items()]
        widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {method:{widths[1]}}  {why}" for name, method, why in shown)

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
        whole = whole_updates() if needs else set()
        if needs and isinstance(optimizer, BaseOptimizer) and not whole.issuperset(
                parameter for group in optimizer.param_groups if group["plain"] for parameter in group["params"] if parameter.requires_grad):
            warnings.warn("Preconditioner: optimizer= applies gradients as whole updates that are none. Give make_optimizer(), or whatever "
                          "made its groups, the model and the options of Preconditioner")
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

    The default is a column of RECIPE. It is mkor if whole updates do not suit: with an optimizer that does not apply them unchanged,
    in the exchanges REPLAY and PULL_FACTORS, and with a fallback, after which only the optimizer acts. Warns of a model most of whose
    matrices are no layers.

    Args:
        model: The model.
        choice: The user's choice of layers, without methods of the recipe.
        method, exchange, fallback, optimizer: The arguments of Preconditioner.
    """
    takes_updates = optimizer is None or (
        isinstance(optimizer, BaseOptimizer) and (optimizer.of_default or any(group["plain"] for group in optimizer.param_groups)))
    by_default = method is None and takes_updates and exchange not in ("REPLAY", "PULL_FACTORS") and fallback.policy == "NEVER"
    recipe = _of_model(MOST) if by_default else _of_method(as_method("mkor" if method is None else method))
    recipe, chosen = _layers_of(model, choice, recipe)
    if by_default and any(chosen.kinds.get(matrix.weight) == GATE for _, matrix in chosen.matrices):
        recipe, chosen = _layers_of(model, choice, _of_model(RECURRENT))
    left = _most_left(model, chosen, by_default)
    if not left:
        return recipe, chosen
    what = "no layers, and are left to the optimizer"
    if by_default:
        owns, layers = _layers_of(model, choice, dataclasses.replace(recipe, by_kind={**recipe.by_kind, UNKNOWN: _MUON}))
        if not _most_left(model, layers, by_default):
            recipe, chosen, what = owns, layers, "in modules that it does not know. muon trains them by their gradients"
            left = [name for name in left if name not in layers.others]
        else:
            other, layers = _layers_of(model, choice, _of_model(LEFT))
            if layers.matrices:
                recipe, chosen = other, layers
                what += ". method is therefore mkor, and make_optimizer() makes AdamW at half of lr, as the default's is about twice AdamW's"
    warnings.warn(f"Preconditioner: most of the model's weights are {what}: {', '.join(left[:3])}. register_layer() makes layers of modules, "
                  "and parameter_methods= of other matrices")
    return recipe, chosen


def make_optimizer(model: nn.Module, lr: float, *, weight_decay: float = 0.01, method: Union[Method, str, None] = None,
                   skip: Sequence[str] = (), layer_methods: Optional[Mapping[str, Union[Method, str]]] = None,
                   parameter_methods: Optional[Mapping[str, Union[Method, str]]] = None, selection: Selection = Selection(),
                   **options: Any) -> BaseOptimizer:
    """Returns the optimizer that Preconditioner.make_optimizer() would return, without a Preconditioner: for a framework that wants the
    optimizer before it distributes the model. Give it to the Preconditioner as optimizer=.

    Args:
        model: That of Preconditioner.
        lr, weight_decay, options: Those of Preconditioner.make_optimizer().
        method, skip, layer_methods, parameter_methods, selection: Those of Preconditioner, which gets the same.

    Raises:
        InvalidArgumentError: An option is invalid, or a pattern matches nothing.
    """
    check_types(model, None, {}, {"layer_methods": layer_methods, "parameter_methods": parameter_methods}, {"selection": (selection, Selection)})
    check_number("weight_decay", weight_decay, 0.0, math.inf)
    model = inside(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Preconditioner warns of the model
        recipe, chosen = choose(model, Choice(skip, selection, parameter_methods or {}), method, "", Fallback(), None)
    matrices = [matrix for _, matrix in chosen.matrices]
    methods = {place: one.method for one in exceptions(matrices, recipe.layer_methods(layer_methods, matrices), "") for place in one.layers}
    whole = {parameter for slot in slots_of(matrices) if traits_of(methods.get(slot.place, recipe.method)).whole_updates
             for parameter in slot.matrix.parameters()}
    made = BaseOptimizer(groups_of(model, whole, weight_decay, recipe.scales(model, chosen)), lr, **recipe.optimizer_options(options))
    made.of_default = method is None
    made.expect_preconditioner()
    return made


def label_of(spec: SessionSpec, place: int) -> str:
    """Returns the name of a layer's method, and whether it has an input factor."""
    method = as_method(next((one.method for one in spec.layer_methods if place in one.layers), spec.method))
    has_factor = method.options.get("input_factor") and spec.layers[place].d_in <= method.options.get("max_factor_dim", 8192)
    return f"{method.name} with input factor" if has_factor else method.name


def _of_model(column: int) -> Recipe:
    """Returns the default of a kind of model."""
    by_kind = {kind: row[column] for kind, row in RECIPE.items()}
    return Recipe(by_kind[HIDDEN], by_kind, BETAS[column], is_default=by_kind[HIDDEN] is _MUON_WITH_FACTOR)


def _of_method(method: Method) -> Recipe:
    """Returns the recipe of a user's method."""
    whole = method if traits_of(method).whole_updates else 1.0
    return Recipe(method, {HIDDEN: method, SCORES: method, NARROW: method, CONVOLUTION: method, END: method, EXPERT: whole, GATE: whole,
                           TIED: 1.0, WORDS: 1.0, NORMED: 1.0, TABLE: 1.0, OTHER: 1.0})


def _layers_of(model: nn.Module, choice: Choice, recipe: Recipe) -> Tuple[Recipe, Chosen]:
    """Returns the recipe with the user's selection, and the layers."""
    by_kind = dict(recipe.by_kind)
    for option, kinds in (("embeddings", (TIED, WORDS, NORMED, TABLE)), ("experts", (EXPERT,))):
        given = getattr(choice.selection, option)
        for kind in kinds if given is not None else ():
            by_kind[kind] = as_method(given, f"selection.{option}") if given else by_kind[WORDS if kind == WORDS else OTHER]
    # docs/develop/lab/default.md has what this is worth.
    divides_fused = by_kind[HIDDEN].name in (_MUON.name, _SOAP.name)
    return dataclasses.replace(recipe, by_kind=by_kind), choose_layers(model, dataclasses.replace(choice, divides_fused=divides_fused, by_kind={
        kind: value for kind, value in by_kind.items() if isinstance(value, Method)}))


def _most_left(model: nn.Module, chosen: Chosen, counts_skipped: bool) -> List[str]:
    """Returns the names of the matrices that are no layers, the largest first, if most are none; otherwise []. Those of embeddings do
    not count, nor frozen ones, nor, without `counts_skipped`, those that skip and skip_types leave out."""
    embeddings = {parameter for module in model.modules() if isinstance(module, EMBEDDINGS) for parameter in module._parameters.values()}
    sizes = {plain_name(name): parameter.numel() for name, parameter in model.named_parameters()
             if parameter.requires_grad and parameter.dim() > 1 and parameter not in embeddings}
    left: List[str] = [name for name in sizes if name in chosen.others and (counts_skipped or not chosen.others[name].startswith("skip"))]
    if 2 * sum(sizes[name] for name in left) <= sum(sizes.values()):
        return []
    return sorted(left, key=sizes.__getitem__, reverse=True)
