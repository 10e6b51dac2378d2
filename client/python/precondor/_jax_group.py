# SPDX-License-Identifier: Apache-2.0
"""Ranks of a JAX run: the devices of a mesh, which may be those of several processes."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, multihost_utils
from jax.sharding import Mesh, PartitionSpec

from ._errors import InvalidArgumentError, PrecondorError, UnimplementedError, invalid

_MOST_BYTES = 2048
_MOST_CPU_BYTES = 65536  # JAX copies arrays of this size at once
_FAILED = -1  # of a rank that raised an error; below 0, which is that of a step that is skipped

# Of a rank, a step's scalars and the rank's shares: an i32, whether the rank may use its answers, and the answers.
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
