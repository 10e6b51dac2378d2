# SPDX-License-Identifier: Apache-2.0
"""Methods that a user assigns to layers by patterns of their names, in any framework."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._errors import InvalidArgumentError, check_text
from ._session import METHODS, Layer, LayerMethod, Method, as_method, traits_of


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
