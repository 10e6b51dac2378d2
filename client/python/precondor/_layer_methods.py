# SPDX-License-Identifier: Apache-2.0
"""Methods that a user assigns to layers by patterns of their names, in any framework."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._errors import InvalidArgumentError
from ._session import METHODS, Layer, LayerMethod, Method, traits_of


def as_method(method: Union[Method, str]) -> Method:
    return Method(method) if isinstance(method, str) else method


def statistics_of(method: Method, statistics: str) -> str:
    """Returns `statistics`, or the method's default if that is empty."""
    return statistics or traits_of(method).default_statistics


def expect_whole_updates(what: str, method: Method) -> None:
    """Raises InvalidArgumentError for a method whose answers are not whole updates, or that takes statistics."""
    if traits_of(method).whole_updates:
        return
    whole = ", ".join(name for name, traits in METHODS.items() if traits.whole_updates)
    raise InvalidArgumentError(f"{what}: expected one of {whole}, which take no statistics, got {method.name}", "INVALID_ARGUMENT")


def compile_pattern(what: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
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
    return tuple(
        LayerMethod(as_method(methods[pattern]), tuple(found), statistics_of(as_method(methods[pattern]), statistics))
        for pattern, found in places.items() if found)
