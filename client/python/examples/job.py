# SPDX-License-Identifier: Apache-2.0
"""What the examples share about processes: ranks under torchrun, a server of their own, and how they end."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed

ROOT = pathlib.Path(__file__).resolve().parents[3]
START_LIMIT_S = 60
STOP_LIMIT_S = 30


# What the last collective worked on: gloo's threads let go of a tensor after its collective is over, and if theirs is the last
# reference they want the interpreter's lock for it, with which torch 1.13 waits for them when a group ends.
_kept = []


class ExampleError(Exception):
    """Something that the user can mend; shown without a traceback."""


class Job:
    """This process's place among those that torchrun has started; a single one without torchrun."""

    def __init__(self):
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world_size > 1:
            torch.distributed.init_process_group("gloo")

    @property
    def first(self):
        return self.rank == 0

    def wrap(self, model):
        """The model, whose gradients are averaged over ranks where there are several."""
        return torch.nn.parallel.DistributedDataParallel(model) if self.world_size > 1 else model

    def share(self, value):
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def mean(self, values):
        """The means over ranks of a list of numbers."""
        totals = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            torch.distributed.all_reduce(totals)
            _kept.append(totals)
        return (totals / self.world_size).tolist()

    def part_of(self, batch):
        """This rank's rows of each tensor of a batch; as many as any other rank's."""
        part = len(batch[0]) // self.world_size
        return tuple(tensor[self.rank * part:(self.rank + 1) * part] for tensor in batch)

    def close(self):
        if self.world_size > 1:
            torch.distributed.barrier()  # gives gloo's threads the time to let go of what came before
            torch.distributed.destroy_process_group()


def find_server_binary():
    """precondor-server of the PATH or of this checkout's build; None if there is none."""
    built = ROOT / "build" / "dev" / "server" / "precondor-server"
    return shutil.which("precondor-server") or (str(built) if built.is_file() else None)


class OwnServer:
    """A server on 127.0.0.1, on a port that it finds free, for as long as the `with` lasts."""

    def __init__(self, binary):
        self._binary = binary
        self._folder = None
        self._process = None
        self.address = ""

    def __enter__(self):
        if self._binary is None:
            raise ExampleError("no precondor-server found; build one (cmake --build --preset dev --target precondor-server), "
                               "give one with --server-binary, or the address of one that runs with --server")
        # pylint: disable=consider-using-with
        self._folder = tempfile.TemporaryDirectory(prefix="precondor-")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        port_file = pathlib.Path(self._folder.name) / "port"
        try:
            # Not in our terminal's group: at Ctrl-C this process ends it, after its own calls to it have ended.
            self._process = subprocess.Popen([self._binary, "--listen=127.0.0.1:0", f"--port-file={port_file}",
                                              "--log-level=warning"], stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise ExampleError(f"cannot start {self._binary}: {error.strerror}") from error
        deadline = time.monotonic() + START_LIMIT_S
        while not (port_file.exists() and port_file.read_text(encoding="ascii").strip()):
            if self._process.poll() is not None:
                raise ExampleError(f"{self._binary} ended with status {self._process.returncode} before it listened")
            if time.monotonic() > deadline:
                raise ExampleError(f"{self._binary} did not listen within {START_LIMIT_S} s")
            time.sleep(0.02)
        self.address = f"127.0.0.1:{port_file.read_text(encoding='ascii').strip()}"

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


def end(*unused):
    sys.exit(128 + signal.SIGTERM)


def run(main):
    """Runs main() and exits: 0 when done, 1 with one line when something failed, 2 for wrong arguments, 130 at Ctrl-C."""
    import precondor
    # torchrun ends the other ranks so when one has failed; a server that this process has started must not stay.
    signal.signal(signal.SIGTERM, end)
    name = pathlib.Path(sys.argv[0]).name
    try:
        main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ExampleError, precondor.PrecondorError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
