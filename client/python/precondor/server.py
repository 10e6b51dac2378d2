# SPDX-License-Identifier: Apache-2.0
"""LocalServer, a server that belongs to this process. `python -m precondor.server` runs precondor-server with the
arguments that follow."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from typing import List, Optional, Sequence

from . import _programs
from ._errors import InvalidArgumentError, UnavailableError, check_number, invalid

_MOST_SOCKET_PATH = 100  # bytes; Linux accepts 107
_POLL_S = 0.01
_CONNECT_S = 1.0
_REASON_S = 5.0
_REASON_LINES = 5
_BAD_OPTION = 2  # exit status of precondor-server
_OWN_OPTIONS = ("listen", "port-file", "exit-with-pid", "role")


# Open servers. They end with the interpreter, after modules imported later, which may use them.
_open: "weakref.WeakSet[LocalServer]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


class LocalServer:
    """A server (coordinator and one shard) on a unix socket, for this process and others of the user on this host.

    It ends with close(), and with the process in every case, also after kill -9. Pass its address to Client or
    Preconditioner. In a forked child the copy does nothing. Thread-safe, except for close().
    """

    def __init__(self, arguments: Sequence[str] = (), *, timeout: float = 30.0) -> None:
        """Starts the server and waits until it accepts calls.

        Args:
            arguments: Further options of precondor-server, such as "--memory-limit=32GiB"; `python -m precondor.server
                --help` lists them. Those of address and role are the LocalServer's own.
            timeout: Seconds to wait.

        Raises:
            UnavailableError: This installation has no server, or the server does not start.
            InvalidArgumentError: The server does not know an option or its value, or the option is the LocalServer's own.
        """
        arguments = _checked(arguments)
        check_number("timeout", timeout, 0.0)
        program = _programs.path_of("precondor-server")
        _remove_left()
        self._pid = os.getpid()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(self._pid), dir=_base()))
        ready = self._folder / "address"
        command = [program, f"--listen=unix:{self._folder / 'socket'}", f"--port-file={ready}", f"--exit-with-pid={self._pid}",
                   "--log-level=warning", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True)  # Ctrl-C at the terminal is meant for the training process
        _open.add(self)
        end = time.monotonic() + timeout
        while not ready.exists():
            status = self._process.poll()
            if status is None and time.monotonic() < end:
                time.sleep(_POLL_S)
                continue
            self.close()
            if status == _BAD_OPTION:
                raise InvalidArgumentError(f"arguments: expected options of precondor-server, got {arguments}: {_refusal(command)}",
                                           "INVALID_ARGUMENT")
            came = "nothing" if status is None else f"its end with status {status}, see its log on standard error"
            raise UnavailableError(f"precondor-server: expected it to take calls within {timeout:g} s, got {came}",
                                   "UNAVAILABLE")

    @property
    def address(self) -> str:
        """Address for Client and Preconditioner."""
        return f"unix:{self._folder / 'socket'}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def running(self) -> bool:
        """Returns whether the server runs and belongs to this process."""
        return self._pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """Ends the server; running calls get 1 s. Later calls do nothing."""
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
    """Returns this process's shared server. Starts one if there is none, or if it has ended."""
    global _shared
    if _shared is None or not _shared.running():
        _shared = LocalServer()
    return _shared


def has_ended(address: str) -> bool:
    """Returns whether `address` is that of a LocalServer, of this or another process of the user, that has ended. No other
    server takes its place."""
    path = pathlib.Path(address[len("unix:"):])
    if not address.startswith("unix:") or path.name != "socket" or not path.parent.name.startswith(f"precondor-{os.getuid()}-"):
        return False
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:
            return False
    return False


def _checked(arguments: Sequence[str]) -> List[str]:
    """Returns the options. Raises InvalidArgumentError for a text, which is no sequence of options, and for options that a
    LocalServer sets itself."""
    texts = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in arguments] if isinstance(arguments, (list, tuple)) else None
    if texts is None or not all(isinstance(one, str) for one in texts):
        raise invalid("arguments", "a sequence of str, one for each option", arguments,
                      f"Write [{arguments!r}]" if isinstance(arguments, str) else "")
    for one in texts:
        name = one.lstrip("-").split("=")[0].replace("_", "-")
        if name in _OWN_OPTIONS:
            raise invalid("arguments", f"no option --{name}, which LocalServer sets itself", one,
                          "Start precondor-server yourself for another address or role")
    return texts


def _refusal(command: Sequence[str]) -> str:
    """Returns what the server says of its options, which it wrote to this process's standard error."""
    try:
        checked = subprocess.run([*command, "--check-config"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True, errors="replace", timeout=_REASON_S, check=False)
    except subprocess.TimeoutExpired:
        return "see its standard error"
    return " | ".join(checked.stderr.strip().splitlines()[-_REASON_LINES:])


def _base() -> str:
    """Returns a folder whose path leaves room for a socket's path."""
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
