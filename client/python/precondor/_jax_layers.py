# SPDX-License-Identifier: Apache-2.0
"""Splits the tree of a JAX model into layers for the servers and vectors for Adam."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import jax
import jax.numpy as jnp

from ._errors import InvalidArgumentError
from ._session import Layer


class Split:
    """Splits a tree's leaves into stacks of layers, with the indexes `places`, and `vectors`, the other leaves by index.

    A stack has one layer; that of a scanned leaf has as many as the leaf's first dimension.
    """

    def __init__(self, tree: Any, scanned: Any = None) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._names = [".".join(_name_of(key) for key in path) or "weight" for path, _ in paths]
        self.leaves: List[Any] = [leaf for _, leaf in paths]
        is_scanned = self._flags(scanned)
        self._counts = [jnp.shape(leaf)[0] if flag and jnp.ndim(leaf) > 0 else 0 for leaf, flag in zip(self.leaves, is_scanned)]
        self._dims = [tuple(side for side in jnp.shape(leaf)[1 if count else 0:] if side > 1)
                      for leaf, count in zip(self.leaves, self._counts)]
        self.places = [place for place, leaf in enumerate(self.leaves)
                       if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and len(self._dims[place]) > 1]
        self.vectors = {place: leaf for place, leaf in enumerate(self.leaves) if place not in self.places}
        if not self.places:
            raise InvalidArgumentError("updates: expected a tree with a real array of two or more dimensions, got "
                                       f"{dict(zip(self._names, (jnp.shape(leaf) for leaf in self.leaves)))}", "INVALID_ARGUMENT")

    def _flags(self, scanned: Any) -> List[bool]:
        if scanned is None:
            return [False] * len(self.leaves)
        flags, structure = jax.tree_util.tree_flatten(scanned)
        if structure != self._structure:
            raise InvalidArgumentError(f"scanned_layers: expected a tree like that of the updates, {self._structure}, got {structure}",
                                       "INVALID_ARGUMENT")
        return [bool(flag) for flag in flags]

    def layers(self) -> List[Layer]:
        """Layers of all stacks, in order."""
        found: List[Layer] = []
        for place in self.places:
            dims, count = self._dims[place], self._counts[place]
            names = [f"{self._names[place]}.{index}" for index in range(count)] if count else [self._names[place]]
            found += [Layer(name, *_matrix_shape(dims), shape=dims) for name in names]
        return found

    def stacks(self) -> List[jax.Array]:
        """One f32 array [layers, d_out, d_in] for each of `places`."""
        return [self.leaves[place].astype(jnp.float32).reshape(self._counts[place] or 1, *_matrix_shape(self._dims[place]))
                for place in self.places]

    def joined(self, stacks: Sequence[jax.Array], vectors: Mapping[int, Any]) -> Any:
        """Returns a tree of the original structure, shapes and types."""
        parts: Dict[int, Any] = {**vectors, **dict(zip(self.places, stacks))}
        return jax.tree_util.tree_unflatten(
            self._structure,
            [parts[place].reshape(jnp.shape(leaf)).astype(leaf.dtype) for place, leaf in enumerate(self.leaves)])


def _name_of(key: Any) -> str:
    return str(next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)))


def _matrix_shape(dims: Sequence[int]) -> Tuple[int, int]:
    return dims[0], math.prod(dims[1:])
