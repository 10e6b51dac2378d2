# SPDX-License-Identifier: Apache-2.0
"""LocalServer, servers that belong to this process. `python -m precondor.server` runs precondor-server with the
arguments that follow."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Callable, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple, Union

from ._cuda_libraries import with_search_path
from ._errors import InvalidArgumentError, UnavailableError, check_mapping, check_number, invalid

_MOST_SOCKET_PATH = 100  # bytes; Linux accepts 107
_POLL_S = 0.01
_REASON_S = 5.0
_REASON_LINES = 5
_BAD_OPTION = 2  # exit status of precondor-server
_OWN_OPTIONS = ("listen", "port-file", "exit-with-pid", "role", "shards")
_OF_COORDINATOR = ("metrics-listen", "metrics-port-file")  # processes cannot share it
_LOCK = "lock"  # file in the folder, of the coordinator; those of shards begin with it
_MOST_RESTARTS = 3  # of a process within _RESTARTS_S
_RESTARTS_S = 3600.0
_QUICK_END_S = 5.0
_VARIABLES = "PRECONDOR_"  # options of precondor-server in the environment begin with it


_log = logging.getLogger("precondor")

# Open servers. They end with the interpreter, after modules imported later, which may use them.
_open: "weakref.WeakSet[LocalServer]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


class _ServerGroup:
    """The coordinator's process, and those of shards. One that ends is started again, and the job goes on: the coordinator reads its
    journal, and gives a shard its sessions anew. Thread-safe."""

    def __init__(self) -> None:
        self.all: List["subprocess.Popen[bytes]"] = []
        self._lock = threading.RLock()  # the garbage collector may call end() in any thread
        self._closing = False
        self._ends: Dict[int, List[float]] = {}  # times of the last hour, by place
        self._status: Optional[int] = None  # of the process whose end was that of the server
        self._ended = threading.Event()

    def running(self) -> bool:
        """Returns whether the processes run, or are started again when they end."""
        with self._lock:
            return not self._closing and not self._ended.is_set()

    def keep(self, place: int, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        """Starts the process again whenever it ends. If it has ended too often, ends all of the server, so that nothing waits for it.
        Returns when the server ends."""
        name = "a shard" if place else "the coordinator"
        began = -math.inf
        while True:
            status = self.all[place].wait()
            if not self._may_restart(place):
                return self._give_up(status)
            if time.monotonic() - began < _QUICK_END_S:  # what ends it again, such as a fault of its GPU, may pass
                self._ended.wait(_QUICK_END_S)
            began = time.monotonic()
            try:
                _log.warning("%s of the local server has ended %s, and is started again", name, _how(status))
                started = start()
            except Exception as error:  # whatever it is, the job must not wait
                _log.error("%s of the local server cannot be started again: %s", name, error)
                return self._give_up(status)
            with self._lock:
                self.all[place] = started
                if not self.running():
                    started.kill()

    def _may_restart(self, place: int) -> bool:
        now = time.monotonic()
        with self._lock:
            self._ends[place] = [one for one in self._ends.get(place, []) if now - one < _RESTARTS_S] + [now]
            return self.running() and len(self._ends[place]) <= _MOST_RESTARTS

    def _give_up(self, status: int) -> None:
        with self._lock:
            self._status = status if self._status is None else self._status
            self._ended.set()
            for process in () if self._closing else self.all:
                process.kill()

    def status(self) -> Optional[int]:
        """Returns the exit status of the process whose end was that of the server; None: not known in this process. Call it after
        that end."""
        self._ended.wait(timeout=1.0)
        return self._status

    def end(self) -> None:
        """Ends the processes; running calls get 1 s."""
        with self._lock:
            self._closing = True
            processes = list(self.all)
        for process in processes:
            process.terminate()
        until = time.monotonic() + 1.0
        for process in processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class LocalServer:
    """A coordinator and a shard, or a shard for each of several GPUs, on unix sockets, for this process and others of the user on
    this host. A process that ends is started again, up to three times an hour; a shard without --data-dir has fresh factors then.

    It ends with close(), when the program drops the object, and with the process in every case, also after kill -9. Pass
    its address to Client or Preconditioner, and keep the object. Its options are `arguments` alone: PRECONDOR_* variables
    of the environment are those of other servers. In a forked child the copy does nothing. Thread-safe, except for close().
    """

    limits = ""  # its memory limits, for messages

    def __init__(self, arguments: Sequence[str] = (), *, gpus: Optional[Mapping[str, Union[int, str]]] = None,
                 timeout: float = 30.0) -> None:
        """Starts the server and waits until it accepts calls.

        Args:
            arguments: Further options of precondor-server, such as "--memory-limit=32GiB"; `python -m precondor.server
                --help` lists them. Those of address and role are the LocalServer's own. They go to every process, but
                --metrics-listen to the coordinator.
            gpus: Starts a shard on each of these GPUs: the GPU's name, as CUDA_VISIBLE_DEVICES takes it ("GPU-8f2e..."), and
                --memory-limit. Gradients of the user's workers stay on their GPU (--device-plane-bytes).
            timeout: Seconds to wait.

        Raises:
            UnavailableError: This installation has no server, or the server does not start.
            InvalidArgumentError: The server does not know an option or its value, or the option is the LocalServer's own.
        """
        arguments = _checked(arguments)
        check_number("timeout", timeout, 0.0)
        gpus = check_mapping("gpus", gpus)
        path_of("precondor-server")
        _remove_left()
        self._pid = os.getpid()
        self._folder, lock = _new_folder()
        self._processes = _ServerGroup()
        self._end = weakref.finalize(self, _end, self._processes, self._folder, self._pid)
        self._end.atexit = False  # _close_all ends it, when others no longer use it
        _open.add(self)
        try:
            journal = [] if any(_name_of(one) == "data-dir" for one in arguments) else [f"--data-dir={self._folder / 'journal'}"]
            starts = [_ServerCommand(self._folder, name, [*own, *(one for one in arguments if place == 0 or not _is_of_coordinator(one))],
                                     variables) for place, (name, own, variables) in enumerate(_parts(self._folder, gpus, journal))]
            for place, start in enumerate(starts):
                self._processes.all.append(start(lock if place == 0 else None))
            self._await(starts, arguments, time.monotonic() + timeout, timeout)
            for place, start in enumerate(starts):
                threading.Thread(target=self._processes.keep, args=(place, start), name=f"precondor-{place}", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _await(self, starts: Sequence["_ServerCommand"], arguments: Sequence[str], end: float, timeout: float) -> None:
        for process, start in zip(self._processes.all, starts):
            while not start.ready.exists():
                status = process.poll()
                if status is None and time.monotonic() < end:
                    time.sleep(_POLL_S)
                    continue
                if status == _BAD_OPTION:
                    raise InvalidArgumentError(
                        f"arguments: expected options of precondor-server, got {arguments}: {start.why('--check-config')}", "INVALID_ARGUMENT")
                came = "nothing" if status is None else f"its end {_how(status)}: {start.why()}"
                raise UnavailableError(f"precondor-server: expected it to take calls within {timeout:g} s, got {came}",
                                       "UNAVAILABLE")

    @property
    def address(self) -> str:
        """Address for Client and Preconditioner."""
        return f"unix:{self._folder / 'socket'}"

    @property
    def pid(self) -> int:
        """Process id of the coordinator."""
        return self._processes.all[0].pid

    @property
    def pids(self) -> Tuple[int, ...]:
        """Process ids of the coordinator and of each shard."""
        return tuple(process.pid for process in self._processes.all)

    def running(self) -> bool:
        """Returns whether the server has not ended, and belongs to this process."""
        return self._pid == os.getpid() and self._processes.running() and not has_ended(self.address)

    def close(self) -> None:
        """Ends the server; running calls get 1 s. Later calls do nothing."""
        if self._end.detach() is not None:  # called at the interpreter's end, it does nothing
            _end(self._processes, self._folder, self._pid)

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_shared: Dict[Hashable, Callable[[], Optional[LocalServer]]] = {}


def shared(kind: Hashable = None, start: Callable[[], LocalServer] = LocalServer) -> LocalServer:
    """Returns the server of this kind that users of this process share. It ends when all of them have dropped it. Starts one if
    there is none, or if it has ended."""
    one = _shared.get(kind, lambda: None)()
    if one is None or not one.running():
        one = start()
        _shared[kind] = weakref.ref(one)
    return one


def has_ended(address: str) -> bool:
    """Returns whether `address` is that of a LocalServer, of this or another process of the user, that has ended. No other server
    takes its place."""
    if not is_local(address):
        return False
    folder = _folder_of(address)
    # A coordinator that is started again leaves its lock for a moment, and shards have theirs.
    return not _is_locked(folder / _LOCK) and not any(_is_locked(lock) for lock in folder.glob(f"{_LOCK}-*"))


def watch_of(address: str) -> Optional[Callable[[], None]]:
    """Returns a function that raises UnavailableError once the LocalServer at `address` has ended, for which it is then useless
    to wait. None: another address."""
    def watch() -> None:
        if not has_ended(address):
            return
        own = next((one for one in _open if one.address == address and one._pid == os.getpid()), None)
        status = None if own is None else own._processes.status()
        raise UnavailableError(f"the local server at {address} has ended{'' if status is None else ' ' + _how(status)}, and its "
                               "sessions with it", "UNAVAILABLE")

    return watch if is_local(address) else None


def _folder_of(address: str) -> pathlib.Path:
    return pathlib.Path(address[len("unix:"):]).parent


def is_local(address: str) -> bool:
    return address.startswith("unix:") and _folder_of(address).name.startswith(_prefix())


def _checked(arguments: Sequence[str]) -> List[str]:
    """Returns the options. Raises InvalidArgumentError for a text, which is no sequence of options, and for options that a
    LocalServer sets itself."""
    texts = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in arguments] if isinstance(arguments, (list, tuple)) else None
    if texts is None or not all(isinstance(one, str) for one in texts):
        raise invalid("arguments", "a sequence of str, one for each option", arguments,
                      f"Write [{arguments!r}]" if isinstance(arguments, str) else "")
    for one in texts:
        name = _name_of(one)
        if name in _OWN_OPTIONS:
            raise invalid("arguments", f"no option --{name}, which LocalServer sets itself", one,
                          "Start precondor-server yourself for another address or role")
    return texts


def _environment() -> Dict[str, str]:
    return with_search_path({name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)})


def _how(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def _base() -> str:
    """Returns a folder whose path leaves room for a socket's path, and has no comma, which separates addresses."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) < _MOST_SOCKET_PATH - 50 and "," not in base else "/tmp"


def _prefix() -> str:
    return f"precondor-{os.getuid()}-"


def _parts(folder: pathlib.Path, gpus: Mapping[str, Union[int, str]], journal: Sequence[str]) -> List[Tuple[str, List[str], Dict[str, str]]]:
    """Returns the processes, that of the coordinator first: the name of the socket, options, and variables of the environment."""
    shards = [(f"gpu{place}", ["--backend=cuda", f"--memory-limit={limit}", f"--device-plane-bytes={limit}"], {"CUDA_VISIBLE_DEVICES": gpu})
              for place, (gpu, limit) in enumerate(gpus.items())] or [("shard", [], {})]
    addresses = ",".join(f"unix:{folder / name}" for name, _, _ in shards)
    return [("socket", ["--role=coordinator", f"--shards={addresses}", *journal], {}),
            *((name, ["--role=shard", "--metrics-listen=", *options], variables) for name, options, variables in shards)]


class _ServerCommand:
    """Starts a process of a server, also again."""

    def __init__(self, folder: pathlib.Path, name: str, options: Sequence[str], variables: Mapping[str, str]) -> None:
        self._lock = folder, f"{_LOCK}-{name}"
        self._environment, self._folder = {**_environment(), **variables}, os.getcwd()  # of the first time
        self.ready = folder / f"{name}.address"  # it writes this file when it takes calls
        self.command = [path_of("precondor-server"), f"--listen=unix:{folder / name}", f"--port-file={self.ready}",
                        f"--exit-with-pid={os.getpid()}", "--log-level=warning", *options]

    def __call__(self, lock: Optional[int] = None) -> "subprocess.Popen[bytes]":
        """`lock`: the lock that the process holds; None: its own."""
        lock = _locked(*self._lock) if lock is None else lock
        try:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                pass_fds=(lock,),  # the kernel unlocks the folder when the server has ended
                env=self._environment,
                cwd=self._folder,
                start_new_session=True)  # Ctrl-C at the terminal is meant for the training process
        finally:
            os.close(lock)

    def why(self, *more: str) -> str:
        """Returns why the process ended, which it wrote to this process's standard error, by the last lines of a second one."""
        try:
            again = subprocess.run([*self.command, *more], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env=self._environment, cwd=self._folder, text=True, errors="replace", timeout=_REASON_S, check=False)
        except subprocess.TimeoutExpired:
            return "see its log on standard error"
        return " | ".join(again.stderr.strip().splitlines()[-_REASON_LINES:]) or "see its log on standard error"


def _is_of_coordinator(argument: str) -> bool:
    return _name_of(argument) in _OF_COORDINATOR


def _name_of(argument: str) -> str:
    return argument.lstrip("-").split("=")[0].replace("_", "-")


def _new_folder() -> Tuple[pathlib.Path, int]:
    """Makes a folder. Returns it and a descriptor that holds its lock, by which processes of every PID namespace see that it is in
    use."""
    while True:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(), dir=_base()))
        with contextlib.suppress(FileNotFoundError):  # another process took it for one that was left, before the lock
            lock = _locked(folder, _LOCK)
            if (folder / _LOCK).exists():
                return folder, lock
            os.close(lock)


def _locked(folder: pathlib.Path, name: str) -> int:
    """Returns a descriptor that holds a new lock in the folder."""
    lock = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o600)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # _is_locked of another process holds it for a moment, or a forked child has it
            time.sleep(0.005)
        except OSError:  # a file system without locks: then _is_locked cannot tell
            break
    return lock


def _is_locked(lock: pathlib.Path) -> bool:
    """Returns whether the lock's server runs, or may run."""
    try:
        opened = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(opened)


def _remove_left() -> None:
    """Removes the folders of servers that have ended with a process that was killed."""
    for folder in pathlib.Path(_base()).glob(f"{_prefix()}*"):
        if not folder.is_dir() or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):
            first = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(_is_locked(lock) for lock in folder.glob(f"{_LOCK}-*")):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(first)


def _end(processes: _ServerGroup, folder: pathlib.Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child's copy
        return
    processes.end()
    shutil.rmtree(folder, ignore_errors=True)


def path_of(name: str) -> str:
    """Returns the path of a program of the package.

    Raises:
        UnavailableError: This installation has no programs; one from a wheel has them.
    """
    program = pathlib.Path(__file__).absolute().parent / "bin" / name
    if not program.is_file():
        raise UnavailableError(f"{name}: expected it in {program.parent}, where this installation of precondor has no programs",
                               "UNAVAILABLE", advice="Install the package from a wheel")
    if not os.access(program, os.X_OK):  # some installers keep no file modes
        program.chmod(0o755)
    return str(program)


# The installed commands call these functions.
def _run(name: str) -> None:
    program = path_of(name)
    sys.stdout.flush()
    os.execve(program, [name, *sys.argv[1:]], with_search_path(os.environ))


def _run_server() -> None:
    _run("precondor-server")


def _run_ctl() -> None:
    _run("precondorctl")


def _run_perf() -> None:
    _run("precondor-perf")


if __name__ == "__main__":
    _run_server()
