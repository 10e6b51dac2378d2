# SPDX-License-Identifier: Apache-2.0
"""What the examples share about programs, with or without torch: a server of their own, and how they end."""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import precondor

ROOT = pathlib.Path(__file__).resolve().parents[3]
START_LIMIT_S = 60
STOP_LIMIT_S = 30
MAX_SOCKET_PATH_BYTES = 107


class ExampleError(Exception):
    """Something that the user can mend; shown without a traceback."""


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def positive_number(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def add_server_arguments(parser):
    group = parser.add_argument_group("server")
    group.add_argument("--server", metavar="ADDRESS",
                       help="one that runs already, host:port or unix:/path/to/socket; else one is started for this run")
    group.add_argument("--server-binary", metavar="FILE",
                       help="the precondor-server to start (the PATH's, or this checkout's in build/dev)")


def check_server_arguments(parser, arguments):
    if arguments.server and arguments.server_binary:
        parser.error("--server and --server-binary: expected one of them")


def open_json(place):
    """Opens the file in which write_json will write, so that a wrong name ends a run at its beginning."""
    if place and place != "-":
        with open(place, "a", encoding="utf-8"):
            pass


def write_json(place, value):
    """`place`: a file, or - for standard output."""
    text = json.dumps(value, indent=1) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(place).write_text(text, encoding="utf-8")


def find_server_binary():
    """precondor-server of the PATH or of this checkout's build; None if there is none."""
    built = ROOT / "build" / "dev" / "server" / "precondor-server"
    return shutil.which("precondor-server") or (str(built) if built.is_file() else None)


class OwnServer:
    """A server on a socket, or where its path would be too long on a port of 127.0.0.1 that it finds free, for as long as the
    `with` lasts; SIGTERM ends it too."""

    def __init__(self, binary):
        self._binary = binary
        self._folder = None
        self._process = None
        self._handler = signal.SIG_DFL
        self.address = ""

    def __enter__(self):
        if self._binary is None:
            raise ExampleError("no precondor-server found; build one (cmake --build --preset dev --target precondor-server), "
                               "give one with --server-binary, or the address of one that runs with --server")
        # torchrun ends the other ranks by this signal when one has failed.
        self._handler = signal.signal(signal.SIGTERM, lambda *unused: sys.exit(128 + signal.SIGTERM))
        # pylint: disable=consider-using-with
        self._folder = tempfile.TemporaryDirectory(prefix="precondor-")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        port_file, socket = (pathlib.Path(self._folder.name).absolute() / name for name in ("port", "socket"))
        listen = f"unix:{socket}" if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES else "127.0.0.1:0"
        try:
            # Not in our terminal's group: at Ctrl-C this process ends it, after its own calls to it have ended.
            self._process = subprocess.Popen([self._binary, f"--listen={listen}", f"--port-file={port_file}",
                                              "--log-level=warning"], stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise ExampleError(f"cannot start {self._binary}: {error.strerror}") from error
        deadline = time.monotonic() + START_LIMIT_S
        while not (port_file.exists() and port_file.read_text(encoding="utf-8").strip()):
            if self._process.poll() is not None:
                raise ExampleError(f"{self._binary} ended with status {self._process.returncode} before it listened")
            if time.monotonic() > deadline:
                raise ExampleError(f"{self._binary} did not listen within {START_LIMIT_S} s")
            time.sleep(0.02)
        port = port_file.read_text(encoding="utf-8").strip()
        self.address = port if port.startswith("unix:") else f"127.0.0.1:{port}"

    def cpu_seconds(self):
        """Processor time that the server has used."""
        fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __exit__(self, *unused):
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()
        signal.signal(signal.SIGTERM, self._handler)


def run(main):
    """Runs main() and exits: 0 when done, 1 with one line when something failed, 2 for wrong arguments, 130 at Ctrl-C."""
    name = pathlib.Path(sys.argv[0]).name
    try:
        main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ExampleError, precondor.PrecondorError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
