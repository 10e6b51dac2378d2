# SPDX-License-Identifier: Apache-2.0
"""Ranks of a JAX run: the devices of a mesh, which may be those of several processes."""

from __future__ import annotations

import concurrent.futures
from typing import Any, Callable, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback, multihost_utils
from jax.sharding import Mesh, PartitionSpec

from ._errors import InvalidArgumentError, PrecondorError

_MOST_BYTES = 2048

# Of a rank, a step's scalars and the rank's shares: an i32, whether the rank may use its answers, and the answers.
Callback = Callable[..., Tuple[Any, Any, List[np.ndarray]]]


class Group:
    """Every device of the mesh is a rank, in the mesh's order, and has a share of each matrix's rows. Without a mesh this
    process is the only rank."""

    def __init__(self, mesh: Optional[Mesh]) -> None:
        processes = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
        if len(processes or {0}) != jax.process_count():
            raise InvalidArgumentError(
                f"mesh: expected one with devices of all {jax.process_count()} processes, got {mesh and mesh.devices.tolist()}",
                "INVALID_ARGUMENT")
        self.size = 1 if mesh is None else int(mesh.size)
        self._mesh = mesh if self.size > 1 else None

    @property
    def is_first_process(self) -> bool:
        return jax.process_index() == 0

    def share(self, rows: int) -> int:
        """Number of a rank's rows of a matrix. The last ranks may have fewer, or none."""
        return -(-rows // self.size)

    def call(self, callback: Callback, scalars: Sequence[Any], stacks: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
        """Calls `callback(rank, *scalars, shares)` for each rank of this process, whenever the computation runs.

        Args:
            callback: See Callback. Its shares are the rank's parts [layers, share, d_in] of the stacks, with zeros for rows
                that there are not, and so are the answers.
            scalars: Values that are equal on all devices.
            stacks: f32 [layers, d_out, d_in].

        Returns:
            The i32; whether all ranks may use their answers; and the answers, [layers, d_out, d_in].
        """
        if self._mesh is None:
            return _io_callback(callback, 0, scalars, stacks)
        axes = self._mesh.axis_names

        def of_device(scalars: Sequence[Any], shares: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
            number, usable, answers = _io_callback(callback, jax.lax.axis_index(axes), scalars, shares)
            # A sum over all devices: a process that ends after its last step must not end the servers of one that has not.
            return number, jax.lax.pmin(usable.astype(jnp.int32), axes) > 0, answers

        whole, rows = PartitionSpec(), PartitionSpec(None, axes)
        padded = [jnp.pad(one, ((0, 0), (0, self.share(one.shape[1]) * self.size - one.shape[1]), (0, 0))) for one in stacks]
        number, usable, answers = _shard_map(of_device, self._mesh, (whole, rows), (whole, whole, rows))(tuple(scalars), padded)
        return number, usable, [answer[:, :one.shape[1]] for answer, one in zip(answers, stacks)]

    def from_first(self, make: Callable[[], str]) -> str:
        """Returns what `make` returns in the first process, once every process has called this. Also for use while tracing."""
        if jax.process_count() == 1:
            return make()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a thread that traces cannot compute
            return thread.submit(_broadcast, make).result()


def _io_callback(callback: Callback, rank: Any, scalars: Sequence[Any], shares: Sequence[jax.Array]) -> Tuple[Any, Any, List[jax.Array]]:
    shapes = [jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in shares]
    return io_callback(callback, (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_), shapes),
                       rank, *scalars, list(shares))


def _broadcast(make: Callable[[], str]) -> str:
    failure, text = None, ""
    if jax.process_index() == 0:
        try:
            text = make()
        except PrecondorError as error:  # the others must not wait
            failure, text = error, str(error)
    # As i32, because a sum of bytes is one: whether it is an error, and characters.
    message = np.zeros(1 + _MOST_BYTES, np.int32)
    encoded = text.encode()[:_MOST_BYTES]
    message[0], message[1:1 + len(encoded)] = failure is not None, np.frombuffer(encoded, np.uint8)
    message = np.asarray(multihost_utils.broadcast_one_to_all(message))
    text = bytes(message[1:].astype(np.uint8)).rstrip(b"\0").decode(errors="replace")
    if failure is not None:
        raise failure
    if message[0]:
        raise PrecondorError(f"process 0: {text}")
    return text


def _shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map  # pylint: disable=import-outside-toplevel
    return shard_map(function, mesh, in_specs, out_specs, check_rep=False)
