# SPDX-License-Identifier: Apache-2.0
"""A preconditioner's part of a checkpoint, and the restoring of snapshots by the servers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import warnings
from collections.abc import Mapping
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, TypeVar, Union

import torch

from .._client import Client, Session, Worker
from .. import server
from .._errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError, PrecondorError, ResourceExhaustedError, UnavailableError, invalid
from .._options import Security
from .._session import SessionSpec
from ._exchange import Exchange, methods_of
from ._group import Group

_FORMAT = 1
_T = TypeVar("_T")


def make_state(spec: SessionSpec, step: int, snapshot_id: int, mode: str, exchange: Optional[Exchange], factors: bool) -> Dict[str, Any]:
    """Returns a state of plain values. A snapshot_id of 0 means none; `mode` is that of `step`; `factors`: they are to be added."""
    if exchange is not None and exchange.any_sent():
        warnings.warn(f"Preconditioner.state_dict(): step {step} was interrupted, and factors may have its gradients: a run that goes on from "
                      "this state is not exactly the one without the interruption")
    # torch.distributed.checkpoint wants of a file all that a new object's state has: so that has nothing of the exchange.
    return {"format": _FORMAT, "session": spec.name, "step": step, "snapshot_id": snapshot_id, "mode": mode, "has_factors": False,
            "layers": [dataclasses.astuple(layer) for layer in spec.layers], "methods": methods_of(spec),
            **({} if exchange is None else exchange.state(factors))}


def warn_of_local(address: str, factors: bool) -> None:
    """Warns of a state without factors where a later job will not find them."""
    if server.is_local(address) and not factors:
        warnings.warn("Preconditioner.state_dict(): a local server ends with its process, and the factors with it: a later job needs "
                      "state_dict(factors=True)")


def check_state(state: Mapping[str, Any], spec: SessionSpec, worker: Optional[Worker], exact: bool) -> None:
    """Raises FailedPreconditionError if the rank has joined, or if `exact` and the state has no factors and is of another session.
    Raises InvalidArgumentError unless the state is of these layers and methods."""
    if worker is not None:
        raise FailedPreconditionError("load_state_dict: call it before the first forward pass or step", "FAILED_PRECONDITION")
    if not isinstance(state, Mapping):
        raise invalid("state", "the result of state_dict()", state)
    if state.get("format") != _FORMAT:
        raise InvalidArgumentError(f"state: expected one of state_dict, of format {_FORMAT}, got format {state.get('format')}",
                                   "INVALID_ARGUMENT")
    expected = [dataclasses.astuple(layer) for layer in spec.layers]
    got = [(*layer[:-1], tuple(layer[-1])) for layer in state["layers"]]  # JSON has no tuples
    if expected != got:
        difference = next((f"layer {have[0]}: {have}, {want}" for have, want in zip(got, expected) if have != want),
                          f"{len(got)} layers, {len(expected)} layers")
        raise InvalidArgumentError(f"state: of another model: it has, and this has, {difference}", "INVALID_ARGUMENT")
    if exact and state["session"] != spec.name and not state.get("has_factors"):
        raise lacks_factors(f"session {spec.name}: the state is of session {state['session']}, and was saved without factors=True")
    for layer, had, has in zip(spec.layers, state.get("methods", methods_of(spec)), methods_of(spec)):
        if had != has:
            raise InvalidArgumentError(f"state: layer {layer.name}: it has the method {had}, this session has {has}",
                                       "INVALID_ARGUMENT", "UNSPECIFIED", f'Make the Preconditioner with method="{had}"')


def add_factors(state: Dict[str, Any], group: Group, worker: Optional[Worker]) -> Dict[str, Any]:
    """Adds every layer's factors to rank 0's state, as a tuple of uint8 tensors. Call it on every rank, once all have flushed.

    A tuple is one value to torch.distributed.checkpoint, which then needs no tensor of its size to load it into.
    """
    def read() -> None:
        if group.rank == 0:
            read_all = range(len(state["layers"])) if worker is not None else ()
            state["factors"] = tuple(_to_tensor(worker.read_factors(layer)) for layer in read_all)

    state["has_factors"] = True
    group.check(read)  # no rank sends anything more until rank 0 has read
    return state


def has_factors(state: Mapping[str, Any], group: Group) -> bool:
    """Whether rank 0's state has factors. Call it on every rank."""
    return bool(group.gather(bool(state.get("factors")))[0])


def _of_either(call: Callable[[SessionSpec], _T], specs: Tuple[SessionSpec, SessionSpec]) -> Tuple[_T, Tuple[SessionSpec, SessionSpec]]:
    """Calls with the first of the descriptions, or if the servers refuse it with the second, the default before it had factors: a job may
    have begun with an earlier release, or the servers may have no room for factors, of which a warning tells.

    Returns:
        The result, and both descriptions, first that of the call.
    """
    spec, other = specs
    try:
        return call(spec), specs
    except (FailedPreconditionError, ResourceExhaustedError) as error:
        # Others, such as that of a leader that has been replaced, do not concern the description. A restore gives no reason.
        if other == spec or error.reason not in ("SPEC_MISMATCH", "CAPACITY", "UNSPECIFIED"):
            raise
        try:
            result = call(other)
        except PrecondorError as second:
            # The error of the description that the job had names what the user has changed since, the other one names the factors.
            raise min(error, second, key=lambda one: "input_factor" in one.message) from None
        if isinstance(error, ResourceExhaustedError):
            warnings.warn(f"session {spec.name}: muon goes on without input factors, for which the servers have no room: {error.message}")
        return result, (other, spec)


def open_session(client: Client, specs: Tuple[SessionSpec, SessionSpec]) -> Tuple[Session, Tuple[SessionSpec, SessionSpec]]:
    """Opens the session by the first of the descriptions that the servers accept. Returns it, and both, first its own."""
    return _of_either(client.open_session, specs)


def close_session(session: Session) -> None:
    """Closes it, or warns if the servers do not answer: the job has ended, and must not fail."""
    try:
        session.close()
    except (DeadlineExceededError, UnavailableError) as error:
        warnings.warn(f"session {session.name} stays on the servers: `precondorctl session close {session.name}` ends it: {error.message}")


def restore_factors(state: Mapping[str, Any], group: Group, client: Client,
                    specs: Tuple[SessionSpec, SessionSpec]) -> Tuple[SessionSpec, SessionSpec]:
    """Rank 0 replaces the session by one with its state's factors, by the first of the descriptions that the servers accept. Returns
    both, and first that of the session. Call it on every rank.

    Raises:
        FailedPreconditionError: the state is of first order, or of neither description. InvalidArgumentError: factors of another number of layers.
    """
    name, layers = specs[0].name, specs[0].layers

    def restore() -> bool:
        if group.rank > 0:
            return False
        if state["mode"] == "FIRST_ORDER":
            raise lacks_factors(f"session {name}: the checkpoint is of first order, and a restored session chooses its mode anew")
        factors = [tensor.cpu().numpy().tobytes() for tensor in state["factors"]]
        if len(factors) != len(layers):
            raise InvalidArgumentError(f"state: expected the factors of {len(layers)} layers, got {len(factors)}", "INVALID_ARGUMENT")
        client.close_session(name)
        return _of_either(lambda spec: client.restore_session(spec, state["step"], factors), specs)[1] != specs

    return specs[::-1] if group.gather(group.check(restore))[0] else specs


def lacks_factors(why: str) -> FailedPreconditionError:
    """The error of a job that cannot resume exactly."""
    return FailedPreconditionError(why, "FAILED_PRECONDITION", "UNSPECIFIED",
                                   "Load a state_dict(factors=True), give snapshot_paths, or continue with the servers' factors, or "
                                   "fresh ones: exact=False")


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def restore_snapshot(state: Mapping[str, Any], paths: Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]],
                     address: str, security: Optional[Security], precondorctl: str, world_size: int) -> None:
    """Makes the servers restore the state's snapshot from copies of its files, for a job of `world_size` ranks. Servers
    with an access file require the role of an operator. A precondorctl of "" is the package's, or that of the PATH.

    Raises:
        InvalidArgumentError: The state has no snapshot, or precondorctl cannot be run.
        FailedPreconditionError: precondorctl failed; the message has its error output.
    """
    if not state["snapshot_id"]:
        raise InvalidArgumentError(f"state: no snapshot goes with step {state['step']}", "INVALID_ARGUMENT", "UNSPECIFIED",
                                   "Save checkpoints when checkpoint_due")
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not precondorctl:
        try:
            precondorctl = server.path_of("precondorctl")
        except UnavailableError:
            precondorctl = "precondorctl"
    files = [f"--{field.replace('_', '-')}={path}" for field, path in dataclasses.asdict(security or Security()).items() if path]
    command = [str(precondorctl), f"--server={address}", *files, "snapshot", "restore", state["session"], "--replace",
               f"--snapshot={state['snapshot_id']}", f"--world-size={world_size}", *(f"--snapshot-path={path}" for path in paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InvalidArgumentError(f"precondorctl: {error}", "INVALID_ARGUMENT", "UNSPECIFIED",
                                   "Give its path in precondorctl=") from None
    if done.returncode != 0:
        raise FailedPreconditionError(f"{' '.join(command)}: {done.stderr.strip()}", "FAILED_PRECONDITION")
