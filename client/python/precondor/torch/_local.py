# SPDX-License-Identifier: Apache-2.0
"""The server of a job that has none: the first rank's own."""

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
    """Its address, and a name for a session there."""
    hosts = set(group.gather(socket.gethostname()))
    if len(hosts) > 1:
        raise InvalidArgumentError(f'address: expected ranks on one host with "local", got {len(hosts)} hosts', "INVALID_ARGUMENT",
                                   advice="Start precondor-server on one of them, and give its host:port")
    name = f"local-{os.getpid()}-{next(_sessions)}"
    return group.gather(group.check(lambda: (server.shared().address, name) if group.rank == 0 else None))[0]
