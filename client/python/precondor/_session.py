# SPDX-License-Identifier: Apache-2.0
"""Description of a session as Python values, with the fields of kernels/base/session_spec.h."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np

from . import _core
from ._errors import InvalidArgumentError, check_number, check_text, check_whole, expect_instance, invalid

# Methods by name, in the order of the C++ library.
METHODS: Dict[str, _core.MethodTraits] = {traits.name: traits for traits in _core.known_methods()}

Option = Union[bool, int, float, str]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight matrix [d_out, d_in].

    Attributes:
        name: Unique in the session.
        d_out: Number of rows.
        d_in: Number of columns.
        has_bias: The last column is the folded bias.
        shape: Dimensions of the tensor from which the matrix is made, with its elements in row-major order; for methods
            with a factor for each dimension. Empty: [d_out, d_in].
    """

    name: str
    d_out: int
    d_in: int
    has_bias: bool = False
    shape: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Method:
    """A method by name, with options. An absent option has the method's default; docs/use/methods lists all options."""

    name: str = "mkor"
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LayerMethod:
    """Layers, by their indexes in the session, with a method and statistics of their own."""

    method: Method
    layers: Sequence[int]
    statistics: str = "SIGNED"


@dataclasses.dataclass(frozen=True)
class Fallback:
    """When the job falls back to first order, in which gradients are averaged alone. docs/use/methods/mkor_h.md explains it.

    Attributes:
        policy: "NEVER"; "LOSS_RATE": when the loss decreases slowly; "AT_STEP": at a step.
        at_step: AT_STEP: the first step in first order.
        beta: LOSS_RATE: "slow" means below this share of the phase's mean decrease per step, in [0, 1].
        rate_decay: Weight of the past in the smoothed decrease per step, in [0, 1).
        min_steps: Steps of a phase before the first decision, at least 1.
        patience_steps: Consecutive slow steps before a decision, at least 1.
        lr_jump: Relative change of the learning rate in one step that begins a new phase, positive.

    Raises:
        InvalidArgumentError: A field has another type. From open_session and Preconditioner: an unknown policy, a number
            outside its range, or AT_STEP without at_step.
    """

    policy: str = "NEVER"
    at_step: Optional[int] = None
    beta: float = 0.1
    rate_decay: float = 0.99
    min_steps: int = 200
    patience_steps: int = 50
    lr_jump: float = 0.1

    def __post_init__(self) -> None:
        checks = {"str": check_text, "float": check_number, "int": check_whole,
                  "Optional[int]": lambda what, value: value is None or check_whole(what, value)}
        for field in dataclasses.fields(self):
            checks[str(field.type)](f"fallback.{field.name}", getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class SessionSpec:
    """A session's description. All ranks open the session with equal descriptions.

    Attributes:
        name: Unique on a coordinator, [A-Za-z0-9._-]{1,128}.
        layers: In an order that all ranks share. Calls identify a layer by its index.
        method: Method of all layers except those of layer_methods. A name means that method with its defaults.
        world_size: Number of ranks.
        seed: Seed of every random choice.
        exchange: "DIRECT" (every rank sends every gradient, and the server averages them), "DELEGATE" (the job has
            averaged, and one rank sends each layer, see delegates), "SHARDED" (the job has averaged, and every rank sends its parts
            of the averages), or "REPLAY" or "PULL_FACTORS" (the job has averaged, and every rank preconditions the
            average itself: the server returns the vectors of each update, or the factors).
        statistics: "SIGNED" (sketches), "MEAN", "PER_WORKER_MEAN" or "COVARIANCE".
        sketches: Number of SIGNED vectors of a rank; 0 means ceil(16 / world_size).
        inv_freq, warmup_steps: Statistics are sent at steps below warmup_steps and at multiples of inv_freq.
        statistics_dtype, gradient_dtype: Types on the wire: "f32", "f16" or "bf16".
        fallback: When the job falls back to first order.
        layer_methods: Layers with another method or other statistics.
        delegates: DELEGATE: the rank that sends each layer's gradient. Empty: rank layer % world_size, unless the servers
            choose by Client.rank_devices; Worker.spec then has them.
    """

    name: str
    layers: Sequence[Layer]
    method: Union[Method, str] = "mkor"
    world_size: int = 1
    seed: int = 0
    exchange: str = "DIRECT"
    statistics: str = "SIGNED"
    sketches: int = 0
    inv_freq: int = 10
    warmup_steps: int = 10
    statistics_dtype: str = "f16"
    gradient_dtype: str = "f32"
    fallback: Fallback = Fallback()
    layer_methods: Sequence[LayerMethod] = ()
    delegates: Sequence[int] = ()


def delegate_of(spec: SessionSpec, layer: int) -> int:
    """Returns the rank that sends the layer's gradient in DELEGATE."""
    return spec.delegates[layer] if spec.delegates else layer % spec.world_size


def as_method(method: Union[Method, str], what: str = "method") -> Method:
    """Returns the method that argument `what` names. Raises InvalidArgumentError if it is neither a name nor a Method."""
    if isinstance(method, str):
        return Method(method)
    if not isinstance(method, Method):
        raise invalid(what, "a name or a precondor.Method", method)
    if not isinstance(method.options, Mapping):
        raise invalid(f"{what}.options", "a dict", method.options)
    check_text(f"{what}.name", method.name)
    return method


def traits_of(method: Union[Method, str], what: str = "method") -> _core.MethodTraits:
    """Returns the traits of the method that argument `what` names; they do not depend on its options. Raises
    InvalidArgumentError for an unknown name."""
    name = as_method(method, what).name
    if name not in METHODS:
        raise InvalidArgumentError(f"{what}: expected one of {', '.join(METHODS)}, got {name!r}", "INVALID_ARGUMENT")
    return METHODS[name]


def _method_dict(method: Union[Method, str], what: str = "method") -> Dict[str, Any]:
    method = as_method(method, what)
    options = {name: value.item() if isinstance(value, np.generic) else value for name, value in method.options.items()}
    return {"name": method.name, "options": options}


def _items(what: str, values: Sequence[Any], kind: type) -> Sequence[Any]:
    """Returns `values`. Raises InvalidArgumentError unless it is a sequence of instances of `kind`."""
    expected = f"a sequence of precondor.{kind.__name__}"
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__"):
        raise invalid(what, expected, values)
    values = list(values)
    for place, value in enumerate(values):
        if not isinstance(value, kind):
            raise invalid(f"{what}[{place}]", f"a precondor.{kind.__name__}", value)
    return values


def to_dict(spec: SessionSpec) -> Dict[str, Any]:
    """Converts a description to the form that _core takes. Raises InvalidArgumentError for a field of another type."""
    if not isinstance(spec, SessionSpec):
        raise invalid("spec", "a precondor.SessionSpec", spec)
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    fields["layers"] = [{**dataclasses.asdict(layer), "shape": list(layer.shape)} for layer in _items("layers", spec.layers, Layer)]
    fields["method"] = _method_dict(spec.method)
    fields["delegates"] = list(spec.delegates)
    fields["fallback"] = dataclasses.asdict(expect_instance("fallback", spec.fallback, Fallback))
    fields["layer_methods"] = [
        {"method": _method_dict(one.method, f"layer_methods[{place}].method"), "statistics": one.statistics, "layers": list(one.layers)}
        for place, one in enumerate(_items("layer_methods", spec.layer_methods, LayerMethod))
    ]
    return fields


def from_dict(fields: Mapping[str, Any]) -> SessionSpec:
    """Converts a description from the form that _core returns."""
    exceptions = tuple(LayerMethod(Method(**one["method"]), tuple(one["layers"]), one["statistics"])
                       for one in fields["layer_methods"])
    layers = tuple(Layer(**{**layer, "shape": tuple(layer["shape"])}) for layer in fields["layers"])
    return SessionSpec(**{**fields, "layers": layers, "method": Method(**fields["method"]), "layer_methods": exceptions,
                          "delegates": tuple(fields["delegates"]), "fallback": Fallback(**fields["fallback"])})


def statistics_of(method: Method, statistics: str, what: str = "method") -> str:
    """Returns `statistics`, or the method's default if that is empty."""
    return statistics or traits_of(method, what).default_statistics


def expect_whole_updates(what: str, method: Method) -> None:
    """Raises InvalidArgumentError for a method whose answers are not whole updates, or that takes statistics."""
    if method.name in METHODS and METHODS[method.name].whole_updates:
        return
    whole = ", ".join(name for name, traits in METHODS.items() if traits.whole_updates)
    raise InvalidArgumentError(f"{what}: expected one of {whole}, which take no statistics, got {method.name}", "INVALID_ARGUMENT")


def compile_pattern(what: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(check_text(what, pattern))
    except re.error as error:
        raise InvalidArgumentError(f"{what}: expected a regular expression, got {pattern!r}: {error}",
                                   "INVALID_ARGUMENT") from None


def by_pattern(layers: Sequence[Optional[Layer]], methods: Mapping[str, Union[Method, str]],
               statistics: str) -> Tuple[LayerMethod, ...]:
    """Returns SessionSpec.layer_methods. A layer has the method of the first pattern that matches its whole name. A
    None in `layers` is an index that no pattern may match."""
    places: Dict[str, List[int]] = {pattern: [] for pattern in methods}
    for pattern in methods:
        matching = compile_pattern("layer_methods", pattern).fullmatch
        found = [place for place, layer in enumerate(layers) if layer is not None and matching(layer.name)]
        if not found:
            raise InvalidArgumentError(f"layer_methods: no layer's whole name matches {pattern!r}; there are "
                                       f"{[layer.name for layer in layers if layer is not None]}", "INVALID_ARGUMENT")
        taken = {place for others in places.values() for place in others}
        places[pattern] = [place for place in found if place not in taken]
    made: List[LayerMethod] = []
    for pattern, found in places.items():
        what = f"layer_methods: {pattern!r}"
        method = as_method(methods[pattern], what)
        of_method = statistics_of(method, statistics, what)
        if found:
            made.append(LayerMethod(method, tuple(found), of_method))
    return tuple(made)
