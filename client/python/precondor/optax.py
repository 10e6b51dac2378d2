# SPDX-License-Identifier: Apache-2.0
"""Precondor for JAX: an optax gradient transformation for any pytree, jitted or not. docs/use/jax.md is the manual.

This module imports jax and optax; `import precondor` does not.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from . import migrate
from ._errors import InvalidArgumentError, check_mapping
from ._jax_connection import Connection, Group
from ._options import ClientOptions
from ._session import Layer, Method, SessionSpec, as_method, by_pattern, expect_whole_updates

__all__ = ["PrecondorState", "Transformation", "kron", "scale_by_precondor"]

# Longer sides, usually a vocabulary, get no factor, because its decomposition costs d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})


class _State(NamedTuple):
    step: jax.Array
    vectors: Any


@jax.tree_util.register_pytree_with_keys_class
class PrecondorState(_State):
    """State of the transformation.

    Attributes:
        step: Number of the next step, i32.
        vectors: Adam's state for the leaves that are no layers; None if all leaves are layers.
        connection: The run's, of the transformation whose `init` made the state; None in a copy and in one that was read from a
            file. It is no leaf. optax.inject_hyperparams makes a new transformation at each trace, and each goes on with it.
    """

    connection: Optional[Connection] = None

    def tree_flatten_with_keys(self) -> Tuple[Any, Optional[Connection]]:
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._fields], self.connection

    @classmethod
    def tree_unflatten(cls, connection: Optional[Connection], leaves: Sequence[Any]) -> PrecondorState:
        made = cls(*leaves)
        made.connection = connection
        return made

    def __reduce__(self) -> Tuple[Any, ...]:  # for pickle and copy
        return PrecondorState, tuple(self)


class Transformation(optax.GradientTransformationExtraArgs):
    """Result of scale_by_precondor: an optax transformation for one training run, with its connection."""

    connection: Connection

    @property
    def spec(self) -> Optional[SessionSpec]:
        """The session's description; None before the first `update`."""
        return self.connection.spec

    def read_factors(self) -> List[np.ndarray]:
        """Reads the servers' state of the layers, for a checkpoint: uint8 arrays, for `factors`.

        Call it in every process when the last step's updates are ready (`jax.block_until_ready`), and save what it returns in
        process 0 with the optimizer's state. The other processes get an empty list.

        Raises:
            FailedPreconditionError: no step has been made, or the transformation is closed.
        """
        return self.connection.read_factors()

    def close(self, end_session: bool = False) -> None:
        """Gives the rank back and disconnects, as the end of the process does.

        Args:
            end_session: End the session too, so that the servers free its factors. A session without a name given by
                the user is always ended.
        """
        self.connection.close(end_session)


def scale_by_precondor(address: str = "local", *, session: str = "", method: Union[Method, str] = _SOAP,
                       layer_methods: Optional[Mapping[str, Union[Method, str]]] = None, scanned_layers: Any = None,
                       mesh: Optional[Mesh] = None, b1: float = 0.95, b2: float = 0.95, seed: int = 0,
                       factors: Sequence[np.ndarray] = (), client: ClientOptions = ClientOptions()) -> Transformation:
    """Turns gradients into updates: by the servers for arrays with two or more dimensions, by Adam for all others.

    Chain it with weight decay and the learning rate, and with nothing that normalizes again::

        optimizer = optax.chain(scale_by_precondor(), optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(0.02))

    `update` takes the step's loss as `value`, for the status page and metrics; without one the loss is NaN. If a
    gradient is not finite, all updates of the step are 0 and no state changes. A transformation is for one run: call
    `update` once for each step, in order, beginning with the state's step. It works under jit and scan, but not under
    vmap or pmap.

    Args:
        address: The coordinator's: host:port or unix:/path; "local": a server that belongs to the first process.
        session: A name by which a later process finds the factors again; "": a new name.
        method: "soap", "kron" or "muon", which take no statistics.
        layer_methods: Other methods, by regular expressions that match whole names of leaves (`params.Dense_0.kernel`).
        scanned_layers: A tree of bools like that of the parameters. A leaf of True is a stack of layers along its first
            dimension, as `lax.scan` takes it. Each has a layer of its own, with its index at the end of the leaf's name
            (`params.blocks.kernel.3`). None: no leaf is.
        mesh: The devices of the run, if its arrays are sharded over several or if jax.distributed has several processes. Each
            device sends and receives its share of every gradient's rows. None: the process's first device sends all.
        b1, b2: Adam's, for leaves that are no layers: vectors, scalars, and matrices with a side of 1.
        seed: See precondor.SessionSpec.
        factors: Transformation.read_factors() of the step that the state is of. The first `update` begins the session again
            with them, on any servers and any mesh. Process 0's count.
        client: Time-outs, security and the trace, as precondor.Client takes them. `replace` and `local_memory` are for
            Preconditioner, and have to be the defaults.

    Raises:
        InvalidArgumentError: A method takes statistics, the mesh lacks a process, or `client` sets what is for Preconditioner. From `update`, when called or traced: no
            leaf is a matrix, a pattern matches no leaf, or the tree differs from the first call's.

    `update` also raises the errors of precondor.Client and open_session. A failure in a running step raises JAX's own
    error, which contains Precondor's message.
    """
    layer_methods = check_mapping("layer_methods", layer_methods)
    for what, one in (("method", method), *((f"layer_methods: {pattern!r}", one) for pattern, one in layer_methods.items())):
        expect_whole_updates(what, as_method(one, what))
    connection = Connection(address, session, Group(mesh), factors, client)
    adam = optax.scale_by_adam(b1, b2)

    def init(params: Any) -> PrecondorState:
        vectors = _Split(params, scanned_layers).vectors
        return PrecondorState.tree_unflatten(connection, (jnp.zeros((), jnp.int32), adam.init(vectors) if vectors else None))

    def update(updates: Any, state: PrecondorState, params: Any = None, *, value: Any = math.nan,
               **unused: Any) -> Tuple[Any, PrecondorState]:
        del params, unused
        value = math.nan if value is None else value
        if jnp.ndim(value) != 0:
            raise InvalidArgumentError(f"value: expected the step's loss, got an array of shape {jnp.shape(value)}", "INVALID_ARGUMENT")
        split = _Split(updates, scanned_layers)
        layers = split.layers()
        before = state.connection
        run = before if before and before.arguments == connection.arguments and not before.is_closed else connection
        group = run.group
        run.raise_failure(state.step)
        run.open(SessionSpec("", layers, as_method(method), world_size=group.size, seed=seed,
                             exchange="SHARDED" if group.size > 1 else "DIRECT", layer_methods=by_pattern(layers, layer_methods, "")))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in split.leaves]))
        # The state orders the calls: each one's step is the result of the call before it.
        step, usable, answers = group.call(run.exchange, (state.step, value, finite), split.stacks())

        def if_usable(new: Any, old: Any) -> Any:
            return jax.tree_util.tree_map(lambda one, other: jnp.where(usable, one, other), new, old)

        vectors, scaled = state.vectors, {}
        if split.vectors:
            scaled, moved = adam.update(split.vectors, state.vectors)
            vectors = if_usable(moved, state.vectors)
        whole = split.joined(answers, scaled)
        state = PrecondorState.tree_unflatten(before and run, (step, vectors))
        return if_usable(whole, jax.tree_util.tree_map(jnp.zeros_like, whole)), state

    return _transformation(optax.GradientTransformationExtraArgs(init, update), connection)


def kron(learning_rate: Union[float, Callable[[Any], Any]] = 0.0003, *, address: str = "local", session: str = "",
         mesh: Optional[Mesh] = None, factors: Sequence[np.ndarray] = (), client: ClientOptions = ClientOptions(), weight_decay: float = 0.0,
         weight_decay_mask: Any = None, **arguments: Any) -> Transformation:
    """Makes PSGD Kron as distributed_kron's `kron` does, of whose arguments the servers take over.

    Args:
        learning_rate, weight_decay, weight_decay_mask: distributed_kron's.
        address, session, mesh, factors, client: See scale_by_precondor.
        **arguments: All other arguments of distributed_kron's `kron`, by name. precondor.migrate.distributed_kron says what
            becomes of them.

    Raises:
        InvalidArgumentError: An argument cannot be converted, or that function does not know its name.
    """
    scale = scale_by_precondor(address, session=session, mesh=mesh, factors=factors, client=client,
                               **migrate.distributed_kron(**arguments))
    decay = [optax.add_decayed_weights(weight_decay, weight_decay_mask)] if isinstance(weight_decay, jax.Array) or weight_decay > 0.0 else []
    return _transformation(optax.chain(scale, *decay, optax.scale_by_learning_rate(learning_rate)), scale.connection)


def _transformation(functions: optax.GradientTransformationExtraArgs, connection: Connection) -> Transformation:
    made = Transformation(*functions)
    made.connection = connection
    return made


class _Split:
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
