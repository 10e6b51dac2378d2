# SPDX-License-Identifier: Apache-2.0
"""Starts the server of a job with the address "local", in its first rank."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Tuple

from .. import server
from .._errors import InvalidArgumentError
from ._group import Group

_sessions = itertools.count()


def start(group: Group) -> Tuple[str, str]:
    """Returns the server's address, and the name of a new session. Raises InvalidArgumentError if the ranks are on
    several hosts."""
    hosts = set(group.gather(socket.gethostname()))
    if len(hosts) > 1:
        raise InvalidArgumentError(f'address: expected ranks on one host with "local", got {len(hosts)} hosts', "INVALID_ARGUMENT",
                                   advice="Start precondor-server on one of them, and give its host:port")
    name = f"local-{os.getpid()}-{next(_sessions)}"
    return group.gather(group.check(lambda: (server.shared().address, name) if group.rank == 0 else None))[0]
