# SPDX-License-Identifier: Apache-2.0
"""The session of a JAX run, and its ranks: the devices of a mesh, which may be those of several processes."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import socket
import sys
import threading
import uuid
import warnings
from collections.abc import Sequence
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, multihost_utils
from jax.sharding import Mesh, PartitionSpec

from . import server
from ._client import Client, Future, Worker, lost_since, warn_of_lost_updates
from ._errors import (AbortedError, FailedPreconditionError, InvalidArgumentError, PrecondorError, UnimplementedError, check_text,
                      invalid)
from ._options import ClientOptions, check_for_calls
from ._session import Layer, SessionSpec


_log = logging.getLogger("precondor")
_MOST_BYTES = 2048
_MOST_CPU_BYTES = 65536  # JAX copies arrays of this size at once
_FAILED = -1  # of a rank that raised an error; below 0, which is that of a step that is skipped

# A rank's scalars of a step and its shares: an i32, whether the rank may use its answers, and the answers.
Callback = Callable[..., Tuple[Any, Any, List[np.ndarray]]]


class Group:
    """Every device of the mesh is a rank, in the mesh's order, and has a share of each matrix's rows. Without a mesh this
    process is the only rank."""

    def __init__(self, mesh: Optional[Mesh]) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise invalid("mesh", "a jax.sharding.Mesh", mesh)
        self.size = 1 if mesh is None else int(mesh.size)
        self._processes = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
        self.mesh = mesh if self.size > 1 else None
        self._failures: Dict[int, BaseException] = {}  # of this process's ranks, in the step that they failed in

    def check(self) -> None:
        """Raises InvalidArgumentError if a process of the run has no device in the mesh."""
        if self._processes != jax.process_count():
            raise InvalidArgumentError(
                f"mesh: expected one with devices of all {jax.process_count()} processes, got devices of {self._processes}",
                "INVALID_ARGUMENT")

    @property
    def is_first_process(self) -> bool:
        return jax.process_index() == 0

    def share(self, rows: int) -> int:
        """Number of a rank's rows of a matrix. The last ranks may have fewer, or none."""
        return -(-rows // self.size)

    def call(self, callback: Callback, scalars: Sequence[Any], stacks: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
        """Calls `callback(rank, *scalars, shares)` for each rank of this process, whenever the computation runs.

        Args:
            callback: See Callback. Its shares are the rank's parts [layers, share, d_in] of the stacks, with zeros for missing
                rows. The answers have this form too.
            scalars: Values that are equal on all devices.
            stacks: f32 [layers, d_out, d_in].

        Returns:
            The i32; whether all ranks may use their answers; and the answers, [layers, d_out, d_in].
        """
        if self.mesh is None:
            number, usable, answers = _io_callback(callback, 0, scalars, stacks)
            return number, usable > 0, answers
        self._refuse_deadlock([self.share(one.shape[1]) * one.shape[2] * one.shape[0] * 4 for one in stacks])
        axes = self.mesh.axis_names

        def of_device(scalars: Sequence[Any], shares: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
            rank = jax.lax.axis_index(axes)
            number, usable, answers = _io_callback(functools.partial(self._caught, callback), rank, scalars, shares)
            # Over all devices: a process that ends after its last step must not end the servers of one that has not, and a
            # rank that fails must not leave the others waiting.
            outcome = jax.lax.pmin(usable, axes)
            number = io_callback(self._raise_failure, jax.ShapeDtypeStruct((), jnp.int32), rank, number, outcome)
            return number, outcome > 0, answers

        whole, rows = PartitionSpec(), PartitionSpec(None, axes)
        padded = [jnp.pad(one, ((0, 0), (0, self.share(one.shape[1]) * self.size - one.shape[1]), (0, 0))) for one in stacks]
        number, usable, answers = _shard_map(of_device, self.mesh, (whole, rows), (whole, whole, rows))(tuple(scalars), padded)
        return number, usable, [answer[:, :one.shape[1]] for answer, one in zip(answers, stacks)]

    def _refuse_deadlock(self, share_bytes: Sequence[int]) -> None:
        """Raises UnimplementedError where JAX can wait without limit: on the CPU it copies a callback's larger arrays on threads that
        other callbacks and collectives may all have."""
        assert self.mesh is not None
        if self.mesh.devices.flat[0].platform == "cpu" and max(share_bytes) > _MOST_CPU_BYTES:
            raise UnimplementedError(f"mesh: expected shares of up to {_MOST_CPU_BYTES} bytes on CPU devices, got {max(share_bytes)}",
                                     "UNIMPLEMENTED", advice="A mesh of CPU devices is for tests: use one device, without a mesh")

    def _caught(self, callback: Callback, rank: Any, step: Any, *others: Any) -> Tuple[Any, Any, List[np.ndarray]]:
        """Calls the callback. If it raises, keeps the error and answers _FAILED."""
        try:
            number, usable, answers = callback(rank, step, *others)
            return number, np.int32(usable), answers
        except Exception as error:  # pylint: disable=broad-except
            self._failures[int(rank)] = error
            return np.int32(step), np.int32(_FAILED), [np.zeros(np.shape(share), np.float32) for share in others[-1]]

    def _raise_failure(self, rank: Any, number: Any, outcome: Any) -> Any:
        if int(outcome) != _FAILED:
            return np.asarray(number)
        raise self._failures.pop(int(rank), None) or PrecondorError("another device's part of the step failed; its process has the error")

    def from_first(self, make: Callable[[], str]) -> str:
        """Returns what `make` returns in the first process, once every process has called this. Raises in all of them if it
        raises. Also for use while tracing."""
        return self.in_all(lambda: make() if self.is_first_process else "")[0]

    def in_all(self, make: Callable[[], str]) -> List[str]:
        """Returns what `make` returns in each process. Raises in all of them if it raises in one. Also for use while tracing."""
        if jax.process_count() == 1:
            return [make()]
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a thread that traces cannot compute
            return thread.submit(_gather, make).result()


def _io_callback(callback: Callback, rank: Any, scalars: Sequence[Any], shares: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
    shapes = [jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in shares]
    return io_callback(callback, (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32), shapes),
                       rank, *scalars, list(shares))


def _gather(make: Callable[[], str]) -> List[str]:
    failure, text = None, ""
    try:
        text = make()
    except Exception as error:  # pylint: disable=broad-except
        failure, text = error, f"{type(error).__name__}: {error}"
    # As i32, because sums are: whether it is an error, and characters.
    message = np.zeros(1 + _MOST_BYTES, np.int32)
    encoded = text.encode()[:_MOST_BYTES]
    message[0], message[1:1 + len(encoded)] = failure is not None, np.frombuffer(encoded, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(message))
    texts = [bytes(one[1:].astype(np.uint8)).rstrip(b"\0").decode(errors="replace") for one in every]
    if failure is not None:
        raise failure
    for process, one in enumerate(every):
        if one[0]:
            raise PrecondorError(f"process {process}: {texts[process]}")
    return texts


def _shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map  # pylint: disable=import-outside-toplevel
    return shard_map(function, mesh, in_specs, out_specs, check_rep=False)


class Connection:
    """Opened by the first `update`. Thread-safe: callbacks run on threads of JAX, one a rank."""

    def __init__(self, address: str, session: str, group: Group, factors: Sequence[np.ndarray], options: ClientOptions) -> None:
        check_text("address", address)
        self.name = check_text("session", session)
        if isinstance(factors, (str, bytes)) or not isinstance(factors, (Sequence, np.ndarray)):
            raise invalid("factors", "the result of read_factors()", factors)
        self.group = group
        self.spec: Optional[SessionSpec] = None
        self._is_new_name = not session
        self._factors = factors
        self._address, self._options = address, check_for_calls("client", options)
        # Equal for connections of equal arguments. Factors are large: the same object counts.
        self.arguments = (address, session, group.mesh, id(factors), self._options)
        self._lock = threading.Lock()
        self._client: Optional[Client] = None
        self._server: Optional[server.LocalServer] = None  # ends when nothing has it
        self._server_address = ""
        self._unused = False
        self._restored_step: Optional[int] = None
        self._workers: Dict[int, Worker] = {}  # by rank, as the next three
        self._next_steps: Dict[int, int] = {}
        self._lost: Dict[int, Mapping[str, int]] = {}
        self._failures: Dict[int, Tuple[Optional[int], Exception]] = {}  # of the last call, with its step
        self._closed = False

    @property
    def is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def raise_failure(self, step: Any) -> None:
        """Raises the error of the last step. JAX itself loses it if the step's inputs were still being computed; its results are then
        arbitrary bytes. A compiled step raises it in exchange(). `step` is that of the next call's state: if it is known and the
        failed step's, the caller tries again."""
        known = None if isinstance(step, jax.core.Tracer) else int(step)  # waits for the last step
        with self._lock:
            failures, self._failures = list(self._failures.values()), {}
        for failed, error in failures:
            if failed is None or failed != known:
                raise error

    def open(self, spec: SessionSpec) -> None:
        """Opens the session at the first call; all processes make it. Later calls must have an equal description
        (InvalidArgumentError). The description's name is not looked at."""
        with self._lock:
            if self._closed:
                raise FailedPreconditionError(f"session {self.name}: this transformation is closed", "FAILED_PRECONDITION")
            if self.spec is None:
                self._open(spec)
            elif dataclasses.replace(spec, name=self.name) != self.spec:
                raise InvalidArgumentError(
                    f"updates: expected the tree of the first call, {_shapes(self.spec)}, got {_shapes(spec)}",
                    "INVALID_ARGUMENT", advice="One transformation is for one model: make another for another")

    def _open(self, spec: SessionSpec) -> None:
        self.group.check()
        host, address, self.name = self.group.from_first(self._place).split("\n")
        spec = dataclasses.replace(spec, name=self.name)
        self.group.in_all(lambda: self._connect(host, address))
        restored = self.group.from_first(lambda: self._restore(spec))
        if restored:
            self._restored_step = int(restored)
        else:
            self.group.in_all(lambda: self._open_session(spec))
        self.spec = spec
        atexit.register(self._close_at_exit)

    def _place(self) -> str:
        """Returns this host, and the server's address and the session's name for all processes."""
        self._server = server.shared() if self._address == "local" else None
        address = self._address if self._server is None else self._server.address
        return "\n".join((socket.gethostname(), address, self.name or f"optax-{uuid.uuid4().hex}"))

    def _connect(self, host: str, address: str) -> str:
        if self._address == "local" and host != socket.gethostname():
            raise InvalidArgumentError(f'address: expected processes on one host with "local", got {host} and {socket.gethostname()}',
                                       "INVALID_ARGUMENT", advice="Start precondor-server on one of them, and give its host:port")
        self._server_address = address
        self._client = Client(address, self._options)
        return ""

    def _open_session(self, spec: SessionSpec) -> str:
        assert self._client is not None
        self._unused = self._client.open_session(spec).unused
        return ""

    def _restore(self, spec: SessionSpec) -> str:
        """Replaces the session by one with the given factors. Returns their step; "" if there are none."""
        if len(self._factors) == 0:
            return ""
        if len(self._factors) != 1 + len(spec.layers) or np.size(self._factors[0]) != 8:
            raise InvalidArgumentError(f"factors: expected what read_factors() returned for {len(spec.layers)} layers, got "
                                       f"{len(self._factors)} arrays", "INVALID_ARGUMENT")
        assert self._client is not None
        encoded_step, *states = (np.asarray(one).tobytes() for one in self._factors)
        step = int.from_bytes(encoded_step, "little")
        self._client.close_session(spec.name)
        self._client.restore_session(spec, step, states)
        return str(step)

    def exchange(self, rank: Any, step: Any, loss: Any, finite: Any, shares: Sequence[Any]) -> Tuple[Any, Any, List[np.ndarray]]:
        """A rank's part of one step. Returns the next step's number, whether (1) the answers may be used, and the answers."""
        rank, step = int(rank), int(step)
        with self._lock:
            failed, error = self._failures.get(rank, (step, None))
            if error is not None and failed != step:
                self._failures[rank] = None, error  # JAX has lost it, and may lose it again: until raise_failure()
        if error is not None and failed != step:
            raise error
        try:
            answers, usable = self._exchange(rank, step, float(loss), bool(finite), shares)
        except Exception as error:  # pylint: disable=broad-except
            if isinstance(error, AbortedError) and step < self._next_steps.get(rank, 0):
                error = FailedPreconditionError(
                    f"session {self.name}: step {step} has been made, and the state from before it came again with other gradients",
                    "FAILED_PRECONDITION", advice="To accumulate gradients, as optax.MultiSteps does, take the mean of the batches' gradients "
                    "and call `update` once: docs/use/jax.md, Accumulation. For another run make another transformation")
            with self._lock:
                self._failures[rank] = step, error
            _log.error("session %s: step %d: %s", self.name, step, error)  # JAX may lose the exception
            raise error from None
        with self._lock:
            self._failures.pop(rank, None)
            self._next_steps[rank] = step + 1
        return np.int32(step + 1), np.int32(usable), answers

    def _exchange(self, rank: int, step: int, loss: float, finite: bool, shares: Sequence[Any]) -> Tuple[List[np.ndarray], bool]:
        worker, layers = self._joined(rank, step)
        answers = [np.zeros(np.shape(share), np.float32) for share in shares]
        pairs = [pair for share, answer in zip(shares, answers) for pair in zip(np.asarray(share), answer)]
        futures = [self._precondition(worker, step, place, layer, *pair) if finite else worker.abstain_gradient(step, place)
                   for place, (layer, pair) in enumerate(zip(layers, pairs))]
        usable = all([future.result().decision != "SKIP" for future in futures])  # a list: waits for each
        worker.report_step(step, loss, 1, 0.0, finite=usable)
        lost = worker.status().lost_updates
        warn_of_lost_updates(self.name, lost_since(self._lost.get(rank, {}), lost))
        self._lost[rank] = lost
        return answers, usable

    def _precondition(self, worker: Worker, step: int, place: int, layer: Layer, gradient: np.ndarray, answer: np.ndarray) -> Future:
        if self.group.size == 1:
            return worker.precondition(step, place, gradient, 1, out=answer, more=True)
        share = self.group.share(layer.d_out)
        first = worker.rank * share
        rows = max(0, min(share, layer.d_out - first))
        parts = [(first, rows, 0, layer.d_in, True)] if rows > 0 else []
        return worker.precondition(step, place, gradient[:rows].reshape(1, -1), 1, answer[:rows].reshape(1, -1), parts=parts)

    def read_factors(self) -> List[np.ndarray]:
        """Returns the next step's number and every layer's state, in the first process; nothing in the others. All call it."""
        with self._lock:
            if self.spec is None or not self._workers or self._closed:
                raise FailedPreconditionError(f"session {self.name}: read_factors: expected a step before it, and before close()",
                                              "FAILED_PRECONDITION")
            worker, layers = next(iter(self._workers.values())), len(self.spec.layers)
            next_step = max(self._next_steps.values())
        found: List[np.ndarray] = []

        def read() -> str:
            found.append(np.frombuffer(next_step.to_bytes(8, "little"), np.uint8))
            found.extend(np.frombuffer(worker.read_factors(place), np.uint8) for place in range(layers))
            return ""

        for one in self._workers.values():
            one.flush()
        self.group.from_first(str)  # all have flushed
        self.group.from_first(read)  # none goes on before it
        return found

    def _joined(self, rank: int, step: int) -> Tuple[Worker, Sequence[Layer]]:
        with self._lock:
            if self._client is None or self.spec is None or self._closed:
                raise FailedPreconditionError(f"session {self.name}: not connected; call or trace `update` in this process first, "
                                              "and before close()", "FAILED_PRECONDITION")
            client, layers, worker = self._client, self.spec.layers, self._workers.get(rank)
        if worker is None:
            if self._restored_step not in (None, step):
                raise FailedPreconditionError(f"factors: expected those of the state's step {step}, got those of step {self._restored_step}",
                                              "FAILED_PRECONDITION")
            if step > 0 and self._unused:
                warnings.warn(f"session {self.name} is new and the state is of step {step}: its factors begin anew")
            worker = client.join(self.name, rank, step)  # waits for the other ranks
            with self._lock:
                self._workers[rank] = worker
        return worker, layers

    def _close_at_exit(self) -> None:
        try:
            if getattr(sys, "last_value", None) is None:  # otherwise a step may wait for what has ended with the program
                jax.effects_barrier()  # steps that still run, which JAX itself awaits only later
        except Exception:  # pylint: disable=broad-except
            pass
        finally:
            self.close()

    def close(self, end_session: bool = False) -> None:
        atexit.unregister(self._close_at_exit)
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed or self._client is None:
            return
        try:
            if server.has_ended(self._server_address):  # and the session with it
                pass
            elif end_session or self._is_new_name:  # the first process ends it for all
                if self.group.is_first_process:
                    self._client.close_session(self.name)
            else:
                with contextlib.suppress(PrecondorError):  # if the servers have ended, there are no ranks to give back
                    for worker in self._workers.values():
                        worker.close(leave=True)
        except PrecondorError:
            if end_session:
                raise
        finally:
            for worker in self._workers.values():
                worker.close()
            self._client.close()


def _shapes(spec: SessionSpec) -> Dict[str, List[int]]:
    return {layer.name: list(layer.shape) for layer in spec.layers}
