# SPDX-License-Identifier: Apache-2.0
"""A server without a second terminal: LocalServer is one of this process's own. `python -m precondor.server` runs
precondor-server with the arguments that follow."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import weakref
from typing import Optional, Sequence

from . import _programs
from ._errors import UnavailableError

_MOST_SOCKET_PATH = 100  # Linux takes 107 bytes
_POLL_S = 0.01


# Ended with the interpreter, after whatever was imported later and uses them.
_open: "weakref.WeakSet[LocalServer]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


class LocalServer:
    """A server (coordinator and one shard) for this process and others of the same user on this host, on a unix socket.

    It ends with close(), and with the process, however that ends: nothing is left running, after kill -9 neither. Its
    address goes to Client and Preconditioner. After a fork the child's copy does nothing. Thread-safe but for close().
    """

    def __init__(self, arguments: Sequence[str] = (), *, timeout: float = 30.0) -> None:
        """Starts it and waits until it takes calls.

        Args:
            arguments: more of precondor-server's options, such as "--memory-limit=32GiB"; `python -m precondor.server
                --help` tells them all.
            timeout: seconds to wait.

        Raises:
            UnavailableError: this installation has no server, or it does not start.
        """
        program = _programs.path_of("precondor-server")
        _remove_left()
        self._pid = os.getpid()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(self._pid), dir=_base()))
        ready = self._folder / "address"
        self._process = subprocess.Popen(
            [program, f"--listen=unix:{self._folder / 'socket'}", f"--port-file={ready}", f"--exit-with-pid={self._pid}",
             "--log-level=warning", *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True)  # an interrupt at the terminal is for the training
        _open.add(self)
        end = time.monotonic() + timeout
        while not ready.exists():
            status = self._process.poll()
            if status is None and time.monotonic() < end:
                time.sleep(_POLL_S)
                continue
            self.close()
            came = "nothing" if status is None else f"its end with status {status}, see its log"
            raise UnavailableError(f"precondor-server: expected it to take calls within {timeout:g} s, got {came}",
                                   "UNAVAILABLE")

    @property
    def address(self) -> str:
        """What Client and Preconditioner take."""
        return f"unix:{self._folder / 'socket'}"

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def running(self) -> bool:
        """Whether it takes calls still, of this process."""
        return self._pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """Ends it: what is under way gets a second. The first call counts."""
        if self._pid != os.getpid():
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_shared: Optional[LocalServer] = None


def shared() -> LocalServer:
    """The process's own, which the first call starts, and any call where it has ended."""
    global _shared
    if _shared is None or not _shared.running():
        _shared = LocalServer()
    return _shared


def _base() -> str:
    """A folder whose path leaves room for ours."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) < _MOST_SOCKET_PATH - 50 else "/tmp"


def _prefix(pid: int) -> str:
    return f"precondor-{os.getuid()}-{pid}-"


def _remove_left() -> None:
    """Removes the folders of processes that were killed."""
    for folder in pathlib.Path(_base()).glob(f"precondor-{os.getuid()}-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _programs.server()
