# SPDX-License-Identifier: Apache-2.0
"""The servers of a job with the address "local", which its first rank starts: one on the CPU, or a shard on each of the
job's GPUs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from .. import server
from .._client import Session
from .._errors import InvalidArgumentError, PrecondorError, ResourceExhaustedError, UnavailableError, invalid
from . import _device
from ._group import Group

_SHARE = 0.5  # of a GPU's free memory, which leaves the trainer as much
_LEAST = 1 << 20  # of --memory-limit
_ADVICE = "The first rank starts a shard on each rank's GPU, and has to see them all: with Slurm, --gpu-bind=none"
_START_S = 120.0  # until the shards of several GPUs take calls

_sessions = itertools.count()
_of_job: Optional[server.LocalServer] = None  # of several ranks: it ends with this process


class JobServer:
    """The server of a job, which may be several processes, by the arguments of Preconditioner. Making it, and start(), are collective.

    Attributes:
        session: Name of the session.
        devices: Client.rank_devices; empty if no rank's first layer is on a GPU, or no server of this host is asked.
        are_own: Whether the job starts them.
        on_gpus: Whether it starts a shard on each rank's GPU.
        delegate: Whether gradients of several ranks stay on their GPUs if one rank sends each layer.
    """

    def __init__(self, group: Group, slots: Sequence[Any], address: str, session: str, memory: Union[float, str, None]) -> None:
        """Raises InvalidArgumentError for a missing `session`, and for a `memory` that is neither a share nor bytes."""
        self.are_own = address == "local"
        if not session and not self.are_own:
            raise InvalidArgumentError("session: expected a name, got none", "INVALID_ARGUMENT")
        self.session = session or group.gather(f"local-{os.getpid()}-{next(_sessions)}")[0]
        # Elsewhere the process need not load CUDA's libraries.
        asks = self.are_own or (group.size > 1 and address.startswith("unix:"))
        devices: List[bytes] = group.gather(_device.identity(slots[0].matrix.weight)) if asks else []
        self.devices = devices if any(devices) else []
        self.on_gpus = self.are_own and all(devices)  # own servers are always asked
        self.delegate = self.on_gpus and group.size > 1
        if memory is not None and not self.are_own:
            raise invalid("client.local_memory", 'None with an address other than "local"', memory)
        self._share = None if isinstance(memory, str) or not self.on_gpus else _checked_share(memory)
        if memory is not None and self._share is None and not isinstance(memory, str):
            raise invalid("client.local_memory", 'bytes, such as "16GiB", for a server on the CPU', memory)
        self._group, self._slots, self._address, self._memory = group, slots, address, memory
        self._limits = ""

    def start(self, held: contextlib.ExitStack) -> str:
        """Starts the job's own servers. Returns the coordinator's address. Those of a single rank end when no user's `held` has them
        any more. Raises InvalidArgumentError if the ranks are on several hosts."""
        global _of_job
        if not self.are_own:
            return self._address
        group = self._group
        hosts = set(group.gather(socket.gethostname()))
        if len(hosts) > 1:
            raise InvalidArgumentError(f'address: expected ranks on one host with "local", got {len(hosts)} hosts', "INVALID_ARGUMENT",
                                       advice="Start precondor-server on one of them, and give its host:port")
        gpus = self._gpus() if self.on_gpus else {}

        def begin() -> server.LocalServer:
            arguments = [] if gpus or self._memory is None else [f"--memory-limit={self._memory}"]
            try:
                made = server.LocalServer(arguments, gpus=gpus, timeout=_START_S if gpus else 30.0)
            except UnavailableError as error:
                raise UnavailableError(error.message, error.code, error.reason, error.advice or (_ADVICE if len(gpus) > 1 else "")) from None
            made.limits = ", ".join(f"{_text(limit)} of {name}" for name, limit in gpus.items()) or str(self._memory or "8GiB")
            return made

        kind = (*gpus, self._memory) if gpus or self._memory is not None else None
        own = group.check(lambda: server.shared(kind, begin) if group.rank == 0 else None)
        if group.size > 1:
            _of_job = own
        held.enter_context(contextlib.nullcontext(own))
        address, self._limits = group.gather(("", "") if own is None else (own.address, own.limits))[0]
        return str(address)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Context that adds to the error of a model that does not fit how to give the job's own servers more memory."""
        try:
            yield
        except ResourceExhaustedError as error:
            if not self.are_own:
                raise
            share = "" if self._share is None else f" ({self._share:g} of what was free)"
            raise ResourceExhaustedError(
                error.message, error.code, error.reason,
                f"The job's own servers may take {self._limits}{share}: give them more with client=ClientOptions(local_memory=...), "
                "leave layers out with skip=, or choose method=\"mkor\" with a small rank") from None

    def _gpus(self) -> Dict[str, Union[int, str]]:
        """Returns --memory-limit by GPU, as CUDA_VISIBLE_DEVICES names it: ranks may number GPUs differently. Collective."""
        weight = self._slots[0].matrix.weight
        limits: Dict[str, Union[int, str]] = {}
        for name, free in self._group.gather((_device.gpu_name(weight), _device.free_bytes(weight))):
            if self._share is None:
                limits[name] = self._memory
                continue
            limits[name] = max(_LEAST, min(int(self._share * free), limits.get(name, free)))
        return limits


def _text(limit: Union[int, str]) -> str:
    return limit if isinstance(limit, str) else f"{limit} bytes"


def _checked_share(memory: Optional[float]) -> float:
    if memory is None:
        return _SHARE
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory <= 1:
        raise invalid("client.local_memory", 'a share of a GPU\'s free memory, above 0 and at most 1, or bytes, such as "16GiB"', memory)
    return float(memory)


def end_session(session: Session, address: str) -> None:
    """Ends the session, unless it has ended with its server."""
    with contextlib.suppress(PrecondorError):
        if not server.has_ended(address):
            session.close()
