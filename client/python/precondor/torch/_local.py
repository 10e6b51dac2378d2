# SPDX-License-Identifier: Apache-2.0
"""The server of a job with the address "local", which its first rank starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from typing import Optional

from .. import server
from .._client import Session
from .._errors import InvalidArgumentError, PrecondorError
from ._group import Group

_sessions = itertools.count()
_of_job: Optional[server.LocalServer] = None  # of several ranks: it ends with this process


def session_name(group: Group) -> str:
    """Returns the name of a new session. Collective."""
    return group.gather(f"local-{os.getpid()}-{next(_sessions)}")[0]


def start(group: Group, held: contextlib.ExitStack) -> str:
    """Returns the server's address. Collective. The server of a single rank ends when no user's `held` has it any more. Raises
    InvalidArgumentError if the ranks are on several hosts."""
    global _of_job
    hosts = set(group.gather(socket.gethostname()))
    if len(hosts) > 1:
        raise InvalidArgumentError(f'address: expected ranks on one host with "local", got {len(hosts)} hosts', "INVALID_ARGUMENT",
                                   advice="Start precondor-server on one of them, and give its host:port")
    own = group.check(lambda: server.shared() if group.rank == 0 else None)
    if group.size > 1:
        _of_job = own
    held.enter_context(contextlib.nullcontext(own))
    return group.gather("" if own is None else own.address)[0]


def end_session(session: Session, address: str) -> None:
    """Ends the session, unless it has ended with its server."""
    with contextlib.suppress(PrecondorError):
        if not server.has_ended(address):
            session.close()
