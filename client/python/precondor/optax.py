# SPDX-License-Identifier: Apache-2.0
"""Precondor for JAX: an optax gradient transformation for any pytree, jitted or not. docs/jax.md is the manual.

This module imports jax and optax; `import precondor` does not.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import threading
import warnings
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from . import server
from ._client import Client, Security, Session, Worker
from ._errors import FailedPreconditionError, InvalidArgumentError, PrecondorError, UnimplementedError
from ._layer_methods import as_method, by_pattern, expect_whole_updates
from ._session import Layer, Method, SessionSpec

__all__ = ["PrecondorState", "Transformation", "scale_by_precondor"]

# Longer sides, usually a vocabulary, get no factor, because its decomposition costs d^3.
_SOAP = Method("soap", {"max_factor_dim": 2048})
_sessions = itertools.count()


class PrecondorState(NamedTuple):
    """State of the transformation.

    Attributes:
        step: Number of the next step, i32.
        vectors: Adam's state for the leaves that are no layers; None if all leaves are layers.
    """

    step: jax.Array
    vectors: Any


class Transformation(optax.GradientTransformationExtraArgs):
    """Result of scale_by_precondor: an optax transformation for one training run, with its connection."""

    connection: "_Connection"

    @property
    def spec(self) -> Optional[SessionSpec]:
        """The session's description; None before the first `update`."""
        return self.connection.spec

    def read_factors(self) -> List[np.ndarray]:
        """Reads the servers' state of every layer, for a checkpoint: one uint8 array per layer, for `factors`.

        Call it when the last step's updates are ready (`jax.block_until_ready`), and save it with the optimizer's state.

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
                       layer_methods: Optional[Mapping[str, Union[Method, str]]] = None, b1: float = 0.95, b2: float = 0.95,
                       seed: int = 0, on_shard_loss: str = "WAIT", factors: Sequence[np.ndarray] = (),
                       security: Security = Security(), **timeouts: float) -> Transformation:
    """Turns gradients into updates: by the servers for arrays with two or more dimensions, by Adam for all others.

    Chain it with weight decay and the learning rate, and with nothing that normalizes again::

        optimizer = optax.chain(scale_by_precondor(), optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(0.02))

    `update` takes the step's loss as `value`, for the status page and metrics; without one the loss is NaN. If a
    gradient is not finite, all updates of the step are 0 and no state changes. A transformation is for one run: call
    `update` once for each step, in order, beginning with the state's step. It works under jit, scan and on several
    local devices, but not under vmap or pmap.

    Args:
        address: The coordinator's: host:port or unix:/path; "local": a server that belongs to this process.
        session: A name by which a later process finds the factors again; "": a new name.
        method: "soap", "kron" or "muon", which take no statistics.
        layer_methods: Other methods, by regular expressions that match whole names of leaves (`params.Dense_0.kernel`).
        b1, b2: Adam's, for leaves that are no layers: vectors, scalars, and matrices with a side of 1.
        seed, on_shard_loss: See precondor.SessionSpec.
        factors: Transformation.read_factors() of the step that the state is of. The first `update` begins the session again
            with them, on any servers.
        security: See precondor.Client.
        **timeouts: Time-outs of precondor.Client.

    Raises:
        InvalidArgumentError: A method takes statistics. From `update`, when called or traced: no leaf is a matrix, a
            pattern matches no leaf, or the tree differs from the first call's.
        UnimplementedError: From `update`: jax.distributed has several processes.

    `update` also raises the errors of precondor.Client and open_session. A failure in a running step raises JAX's own
    error, which contains Precondor's message.
    """
    methods = {"method": as_method(method), **{f"layer_methods: {pattern!r}": as_method(one)
                                               for pattern, one in (layer_methods or {}).items()}}
    for what, one in methods.items():
        expect_whole_updates(what, one)
    connection = _Connection(address, session, factors, security, timeouts)
    adam = optax.scale_by_adam(b1, b2)

    def init(params: Any) -> PrecondorState:
        vectors = _Split(params).vectors
        return PrecondorState(jnp.zeros((), jnp.int32), adam.init(vectors) if vectors else None)

    def update(updates: Any, state: PrecondorState, params: Any = None, *, value: Any = math.nan,
               **unused: Any) -> Tuple[Any, PrecondorState]:
        del params, unused
        split = _Split(updates)
        layers = split.layers()
        connection.open(SessionSpec(connection.name, layers, as_method(method), seed=seed, on_shard_loss=on_shard_loss,
                                    layer_methods=by_pattern(layers, layer_methods or {}, "")))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in split.leaves]))
        shapes = [jax.ShapeDtypeStruct(split.leaves[place].shape, jnp.float32) for place in split.places]
        # The state orders the calls: each one's step is the result of the call before it.
        step, usable, answers = io_callback(
            connection.exchange, (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_), shapes),
            state.step, value, finite, [split.leaves[place].astype(jnp.float32) for place in split.places])
        vectors, scaled = state.vectors, {}
        if split.vectors:
            scaled, moved = adam.update(split.vectors, state.vectors)
            vectors = jax.tree_util.tree_map(lambda new, old: jnp.where(usable, new, old), moved, state.vectors)
            scaled = {place: jnp.where(usable, one, jnp.zeros_like(one)) for place, one in scaled.items()}
        return split.joined(answers, scaled), PrecondorState(step, vectors)

    transformation = Transformation(init, update)
    transformation.connection = connection
    return transformation


class _Split:
    """Splits a tree's leaves into layers, with the indexes `places`, and `vectors`, the other leaves by index."""

    def __init__(self, tree: Any) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._names = [".".join(_name_of(key) for key in path) or "weight" for path, _ in paths]
        self.leaves: List[Any] = [leaf for _, leaf in paths]
        self.places = [place for place, leaf in enumerate(self.leaves) if _is_layer(leaf)]
        self.vectors = {place: leaf for place, leaf in enumerate(self.leaves) if not _is_layer(leaf)}
        if not self.places:
            raise InvalidArgumentError("updates: expected a tree with a real array of two or more dimensions, got "
                                       f"{dict(zip(self._names, (jnp.shape(leaf) for leaf in self.leaves)))}", "INVALID_ARGUMENT")

    def layers(self) -> List[Layer]:
        return [Layer(self._names[place], *_matrix_shape(_dims(self.leaves[place])), shape=_dims(self.leaves[place]))
                for place in self.places]

    def joined(self, answers: Sequence[Any], vectors: Mapping[int, Any]) -> Any:
        """Returns a tree of the original structure and types."""
        parts = {**vectors, **dict(zip(self.places, answers))}
        return jax.tree_util.tree_unflatten(
            self._structure, [parts[place].astype(leaf.dtype) for place, leaf in enumerate(self.leaves)])


def _name_of(key: Any) -> str:
    return str(next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)))


def _dims(leaf: Any) -> Tuple[int, ...]:
    return tuple(side for side in jnp.shape(leaf) if side > 1)


def _matrix_shape(dims: Sequence[int]) -> Tuple[int, int]:
    return dims[0], math.prod(dims[1:])


def _is_layer(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and len(_dims(leaf)) > 1


class _Connection:
    """The session and this process's rank in it, opened by the first `update`."""

    def __init__(self, address: str, session: str, factors: Sequence[np.ndarray], security: Security,
                 timeouts: Mapping[str, float]) -> None:
        self.name = session or f"optax-{os.getpid()}-{next(_sessions)}"
        self.spec: Optional[SessionSpec] = None
        self._is_new_name = not session
        self._factors = factors
        self._address, self._security, self._timeouts = address, security, dict(timeouts)
        self._lock = threading.Lock()  # callbacks run on a thread of JAX
        self._client: Optional[Client] = None
        self._session: Optional[Session] = None
        self._worker: Optional[Worker] = None
        self._closed = False

    def open(self, spec: SessionSpec) -> None:
        """Opens the session at the first call. Later calls must have an equal description (InvalidArgumentError)."""
        if jax.process_count() > 1:
            raise UnimplementedError(f"jax.process_count: expected 1 process, got {jax.process_count()}", "UNIMPLEMENTED",
                                     advice="Use precondor.Client in each process, outside jit")
        with self._lock:
            if self._closed:
                raise FailedPreconditionError(f"session {self.name}: this transformation is closed", "FAILED_PRECONDITION")
            if self.spec is None:
                address = server.shared().address if self._address == "local" else self._address
                self._client = Client(address, security=self._security, **self._timeouts)
                self._session = self._client.open_session(spec)
                self.spec = spec
                atexit.register(self.close)
            elif spec != self.spec:
                raise InvalidArgumentError(
                    f"updates: expected the tree of the first call, {_shapes(self.spec)}, got {_shapes(spec)}",
                    "INVALID_ARGUMENT", advice="One transformation is for one model: make another for another")

    def exchange(self, step: Any, loss: Any, finite: Any, gradients: Sequence[Any]) -> Tuple[Any, Any, List[np.ndarray]]:
        """Makes one step. Returns the next step's number, whether the updates may be used, and the layers' updates, all
        0 if they may not be used."""
        step, finite = int(step), bool(finite)
        worker, layers = self._joined(step)
        futures = [
            worker.precondition(step, place, np.asarray(gradient).reshape(layer.d_out, layer.d_in), 1)
            if finite else worker.abstain_gradient(step, place)
            for place, (layer, gradient) in enumerate(zip(layers, gradients))]
        answers = [future.result().gradient for future in futures]
        usable = all(answer is not None for answer in answers)
        worker.report_step(step, float(loss), 1, 0.0, finite=usable)
        return np.int32(step + 1), np.bool_(usable), [
            (answer if usable else np.zeros(np.shape(gradient), np.float32)).reshape(np.shape(gradient))
            for answer, gradient in zip(answers, gradients)]

    def read_factors(self) -> List[np.ndarray]:
        with self._lock:
            if self._worker is None or self.spec is None or self._closed:
                raise FailedPreconditionError(f"session {self.name}: read_factors: expected a step before it, and before close()",
                                              "FAILED_PRECONDITION")
            self._worker.flush()
            return [np.frombuffer(self._worker.read_factors(place), np.uint8) for place in range(len(self.spec.layers))]

    def _joined(self, step: int) -> Tuple[Worker, Sequence[Layer]]:
        with self._lock:
            if self._session is None or self._client is None or self.spec is None or self._closed:
                raise FailedPreconditionError(f"session {self.name}: not connected; call or trace `update` in this process first, "
                                              "and before close()", "FAILED_PRECONDITION")
            if self._worker is None:
                if len(self._factors) > 0:
                    self._session.close()
                    self._session = self._client.restore_session(self.spec, step, [np.asarray(one).tobytes() for one in self._factors])
                elif step > 0 and self._session.created:
                    warnings.warn(f"session {self.name} is new and the state is of step {step}: its factors begin anew")
                self._worker = self._session.join(first_step=step)
            return self._worker, self.spec.layers

    def close(self, end_session: bool = False) -> None:
        atexit.unregister(self.close)
        with self._lock:
            if self._closed or self._client is None:
                self._closed = True
                return
            self._closed = True
            try:
                with contextlib.suppress(PrecondorError):  # if the servers have ended, there is no rank to give back
                    if self._worker is not None:
                        self._worker.leave()
                if self._session is not None and (end_session or self._is_new_name):
                    self._session.close()
            except PrecondorError:
                if end_session:
                    raise
            finally:
                if self._worker is not None:
                    self._worker.close()
                self._client.close()


def _shapes(spec: SessionSpec) -> Dict[str, List[int]]:
    return {layer.name: list(layer.shape) for layer in spec.layers}
