# SPDX-License-Identifier: Apache-2.0
"""What a session is: the fields of kernels/base/session_spec.h, as values."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Sequence, Union

from . import _core
from ._errors import InvalidArgumentError

# By name, in the order of the core's table.
METHODS: Dict[str, _core.MethodTraits] = {traits.name: traits for traits in _core.known_methods()}

Option = Union[bool, int, float, str]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight matrix [d_out, d_in]. With has_bias the last of its d_in columns is the folded bias.

    shape: the dimensions of the tensor that it is, of which its elements are the same row-major sequence, for methods
    with a factor for each; empty: [d_out, d_in].
    """

    name: str
    d_out: int
    d_in: int
    has_bias: bool = False
    shape: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Method:
    """A method by name, with options; what is left out has its default. docs/methods has them."""

    name: str = "mkor"
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LayerMethod:
    """Layers, by their places in the session, that have a method and statistics of their own."""

    method: Method
    layers: Sequence[int]
    statistics: str = "SIGNED"


@dataclasses.dataclass(frozen=True)
class SessionSpec:
    """A session's description. All ranks open it with the same one.

    name: unique on a coordinator, [A-Za-z0-9._-]{1,128}.
    layers: in an order that all ranks share; calls name a layer by its place.
    method: of all layers but those of layer_methods; a name stands for a Method of defaults.
    world_size: ranks. seed: keys every random choice.
    exchange: "DIRECT" (every rank sends every gradient, the server averages), "DELEGATE" (the job has averaged, rank
        layer % world_size sends), or "REPLAY" or "PULL_FACTORS" (the job has averaged, and every rank preconditions the
        average itself: the server returns what statistics add to the factors, or the factors).
    statistics: "SIGNED" (sketches: vectors a rank, 0 for ceil(16 / world_size)), "MEAN", "PER_WORKER_MEAN", "COVARIANCE".
    inv_freq, warmup_steps: statistics are sent at steps below warmup_steps and at multiples of inv_freq.
    staleness_steps: 0 to use a step's own statistics for it, 1 for those before it.
    statistics_dtype, gradient_dtype: on the wire; "f32", "f16", "bf16".
    fallback: options of the fallback to first order, e.g. {"policy": "LOSS_RATE"}; docs/methods/mkor_h.md.
    on_shard_loss: "WAIT" or "DEGRADE".
    data_plane: "GRPC", or "COLLECTIVE" to have gradients summed on their way (docs/collective.md): in exchange DIRECT,
        for gradients in f32, with all ranks and shards on one host.
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
    staleness_steps: int = 0
    statistics_dtype: str = "f16"
    gradient_dtype: str = "f32"
    fallback: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_shard_loss: str = "WAIT"
    layer_methods: Sequence[LayerMethod] = ()
    data_plane: str = "GRPC"


def traits_of(method: Union[Method, str]) -> _core.MethodTraits:
    """What the method is like, whatever its options. InvalidArgumentError: no method has this name."""
    name = method if isinstance(method, str) else method.name
    if name not in METHODS:
        raise InvalidArgumentError(f"method: expected one of {', '.join(METHODS)}, got {name!r}", "INVALID_ARGUMENT")
    return METHODS[name]


def _method_dict(method: Union[Method, str]) -> Dict[str, Any]:
    if isinstance(method, str):
        method = Method(method)
    return {"name": method.name, "options": dict(method.options)}


def to_dict(spec: SessionSpec) -> Dict[str, Any]:
    """What _core takes."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    fields["layers"] = [{**dataclasses.asdict(layer), "shape": list(layer.shape)} for layer in spec.layers]
    fields["method"] = _method_dict(spec.method)
    fields["fallback"] = dict(spec.fallback)
    fields["layer_methods"] = [
        {"method": _method_dict(one.method), "statistics": one.statistics, "layers": list(one.layers)}
        for one in spec.layer_methods
    ]
    return fields


def from_dict(fields: Mapping[str, Any]) -> SessionSpec:
    """What _core gives."""
    exceptions = tuple(LayerMethod(Method(**one["method"]), tuple(one["layers"]), one["statistics"])
                       for one in fields["layer_methods"])
    layers = tuple(Layer(**{**layer, "shape": tuple(layer["shape"])}) for layer in fields["layers"])
    return SessionSpec(**{**fields, "layers": layers, "method": Method(**fields["method"]), "layer_methods": exceptions})
