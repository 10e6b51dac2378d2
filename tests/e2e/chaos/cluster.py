# SPDX-License-Identifier: Apache-2.0
"""A service of real processes whose parts can be killed, stopped and brought back, and a training job on it.

Everything listens on loopback unless a test says otherwise, on ports that the system chose; a process that comes back
takes the port it had. Only processes that were started here are signalled, by their pid.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import digits  # pylint: disable=wrong-import-position

DEADLINE_S = 60.0  # for any one condition; a run that is this late has failed

# Servers compute as the test's own processes do, whose results theirs are compared with, and know nothing else of its environment.
BLAS_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}


class Failure(Exception):
    """A condition did not come about."""


def wait_for(what, condition, deadline_s=DEADLINE_S):
    """The first true value of `condition()`; it is asked again and again, without a pause that could hide a race."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Failure(f"not within {deadline_s:g} s: {what}")
        select.select([], [], [], 0.002)  # lets others run


class Server:
    """One precondor-server. `name` is its folder, where its ports, its log and its data are."""

    def __init__(self, binaries, folder, name, arguments, host="127.0.0.1", prefix=()):
        self.name = name
        self.host = host
        self.prefix = list(prefix)  # a command that ends by executing what follows
        self.folder = pathlib.Path(folder) / name
        self.folder.mkdir(parents=True)
        self.use(binaries)
        self.arguments = arguments
        self.places = []
        self.port, self.metrics_port = (self.reserve_port(), self.reserve_port()) if host == "127.0.0.1" else (0, 0)
        self.process = None
        self.starts = 0

    def reserve_port(self):
        """A port that no other process gets from the system, also not while this server is away."""
        place = socket.socket()
        self.places.append(place)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the server can listen beside it
        place.bind((self.host, 0))
        return place.getsockname()[1]

    def use(self, binaries):
        """Names the build tree of the process that starts next."""
        self.binaries = pathlib.Path(binaries)
        self.program = self.binaries / "server/precondor-server"

    @property
    def address(self):
        return f"{self.host}:{self.port}"

    def start(self):
        port_file, metrics_file = self.folder / "port", self.folder / "metrics_port"
        for file in (port_file, metrics_file):
            file.unlink(missing_ok=True)
        self.starts += 1
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, self.program, f"--listen={self.address}", "--plaintext=any", f"--port-file={port_file}",
                 f"--metrics-listen=127.0.0.1:{self.metrics_port}", f"--metrics-port-file={metrics_file}",
                 *self.arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=BLAS_ENVIRONMENT)

        def serving():
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}: {self.log_tail()}")
            return port_file.exists()

        wait_for(f"{self.name} to serve", serving)
        self.port = int(port_file.read_text())
        self.metrics_port = int(metrics_file.read_text())

    def await_ready(self):
        """Waits until the process serves; a coordinator on etcd, until it leads."""
        health = [self.program.parents[1] / "client/cpp/tools/precondorctl", f"--server={self.address}", "health"]

        def ready():
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}: {self.log_tail()}")
            return subprocess.run(health, capture_output=True, check=False).returncode == 0

        try:
            wait_for(f"{self.name} to be ready", ready)
        except Failure as failure:
            raise Failure(f"{failure}; {self.log_tail()}") from None

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Ends it as the loss of its machine would: it flushes nothing and tells no other process."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self):
        """Politely; its exit status."""
        self.signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def restart(self):
        self.kill()
        self.start()

    def metric(self, name):
        """The sum of a metric's samples; None when the process does not answer or has none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=1) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(sample) for sample in samples) if samples else None

    def status(self):
        """Returns the content of its page /status."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/status", timeout=10) as answer:
            return json.load(answer)

    def log_tail(self, lines=15):
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-lines:])

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        for place in self.places:
            place.close()


@contextlib.contextmanager
def stopped(pid):
    """The process stands still in this context."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def restart_all(servers):
    """Kills all before the first one comes back."""
    for server in servers:
        server.kill()
    for server in servers:
        server.start()


class Etcd:
    """One etcd with its data in `folder`, from Debian's etcd-server; the test is skipped without it."""

    def __init__(self, folder):
        if shutil.which("etcd") is None:
            raise unittest.SkipTest("no etcd on this machine: deploy/install.sh --test installs it")
        self.folder = pathlib.Path(folder) / "etcd"
        self.folder.mkdir()
        for _ in range(3):
            self._start()
            wait_for("etcd to serve or to end", lambda: self.process.poll() is not None or self._serves())
            if self.process.poll() is None:
                return
        raise Failure(f"etcd ended with {self.process.returncode}: {(self.folder / 'log').read_text()[-2000:]}")

    def _serves(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _start(self):
        """On ports that another process can have taken by the time that etcd wants them: etcd ends then."""
        self.port, peer = free_port(), free_port()
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [shutil.which("etcd"), f"--data-dir={self.folder / 'data'}",
                 f"--listen-client-urls=http://127.0.0.1:{self.port}",
                 f"--advertise-client-urls=http://127.0.0.1:{self.port}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
                 f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                 f"--initial-cluster=default=http://127.0.0.1:{peer}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Switch:
    """Takes connections and leads each to the server that `target()` gives then, as a service of Kubernetes does: those that there
    are stay where they are. Use as a context manager."""

    DIRECTIONS = ("to_server", "to_client")

    def __init__(self, target):
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._cut = ()  # directions

    @contextlib.contextmanager
    def cut(self, directions=DIRECTIONS):
        """Bytes that are sent in these directions arrive when the context ends."""
        self._cut = directions
        try:
            yield
        finally:
            self._cut = ()

    def __enter__(self):
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._lead, "127.0.0.1", 0), self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _lead(self, reader, writer):
        async def pump(direction, source, sink):
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    while direction in self._cut:
                        await asyncio.sleep(0.01)
                    sink.write(data)
                    await sink.drain()
            sink.close()

        try:
            there = await asyncio.open_connection(self._target().host, self._target().port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump("to_server", reader, there[1]), pump("to_client", there[0], writer))

    def __exit__(self, *_):
        if not self._thread.is_alive():
            return

        async def end():
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def free_port():
    """A port of 127.0.0.1 on which no process listened a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """One coordinator and `shards` shards with data folders. Use as a context manager.

    `shard_host(i)` is the address of shard i; `shard_prefix(folder)` and `coordinator_prefix(folder)` are commands that
    execute the server whose data are in `folder`. With `switched` the coordinator reaches shard i through `ways[i]`, a
    Switch; workers reach it directly.
    """

    def __init__(self, binaries, folder, shards=2, shard_arguments=(), coordinator_arguments=(), durable=True,
                 shard_host=lambda i: "127.0.0.1", shard_prefix=lambda folder: (), coordinator_host="127.0.0.1",
                 coordinator_prefix=lambda folder: (), switched=False):
        def data(name):
            return [f"--data-dir={pathlib.Path(folder) / name / 'data'}"] if durable else []

        # So often that every run comes back from a snapshot, and from the log after it.
        snapshots = ["--snapshot-interval-steps=25"] if durable else []
        self.shards = [
            Server(binaries, folder, f"shard{i}", ["--role=shard", *data(f"shard{i}"), *snapshots, *shard_arguments],
                   shard_host(i),
                   shard_prefix(pathlib.Path(folder) / f"shard{i}" / "data"))
            for i in range(shards)
        ]
        self.ways = []
        if switched:
            for shard in self.shards:
                shard.arguments = [*shard.arguments, f"--advertise={shard.address}"]
                self.ways.append(Switch(lambda shard=shard: shard))
        self.lease_steps = 64  # the server's default
        for argument in coordinator_arguments:
            if argument.startswith("--lease-steps="):
                self.lease_steps = int(argument.partition("=")[2])
        self.coordinator = None
        self.make_coordinator = lambda name="coordinator": Server(
            binaries, folder, name,
            ["--role=coordinator", "--shards=" + ",".join(one.address for one in self.ways or self.shards),
             "--reconcile-interval-ms=100", "--shard-timeout-ms=2000",
             *([] if any("--etcd-endpoints" in one for one in coordinator_arguments) else data("coordinator")),
             *coordinator_arguments],
            coordinator_host, coordinator_prefix(pathlib.Path(folder) / "coordinator" / "data"))

    def __enter__(self):
        try:
            for shard in self.shards:
                shard.start()
            for way in self.ways:
                way.__enter__()
            self.coordinator = self.make_coordinator()
            self.coordinator.start()
            if any("--etcd-endpoints" in one for one in self.coordinator.arguments):
                self.coordinator.await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def servers(self):
        return self.shards + ([self.coordinator] if self.coordinator else [])

    def step(self):
        """The last step that all workers have reported, -1 before; None while the coordinator does not answer."""
        reported = self.coordinator.metric("precondor_steps_total")
        last = self.coordinator.metric("precondor_last_step_number")
        if reported is None:
            return None
        return int(last) if reported > 0 and last is not None else -1

    def close(self):
        for server in self.servers():
            server.close()
        for way in self.ways:
            way.__exit__()


class Training:
    """digits_trainer on a cluster: real data, four workers. Its result has the hash of the final weights.

    `arguments` come after the usual ones and prevail over them. `prefix` is a command that ends by executing what follows.
    With `ranks` each worker is a process of its own, digits_rank, which writes checkpoints and can be started again.
    With `record` the workers write down what they are told (../history). `row` is a method with its options, of digits.ROWS.
    With `curve` the run is evaluated on its way, and its result is that of digits.read_run.
    """

    WORKERS = 4
    PROGRAM = "tests/e2e/trainer/digits_trainer"

    def __init__(self, binaries, cluster, folder, arguments=(), prefix=(), ranks=False, record=False,
                 world_size=WORKERS, row="signed-lowrank", curve=False):
        self.folder = pathlib.Path(folder)
        self.world_size = world_size
        threads = "tests/e2e/digits_recorded" if record else self.PROGRAM
        self.program = [*prefix, pathlib.Path(binaries) / ("tests/e2e/digits_rank" if ranks else threads)]
        self.record = record
        self.flags = [f"--coordinator={cluster.coordinator.address}", f"--workers={world_size}", "--task=classifier",
                      *digits.ROWS[row].flags(), "--learning-rate=0.016", *arguments]
        self.errors = self.folder / "training.log"
        self.errors.write_bytes(b"")
        self.processes = []
        for left in [*self.folder.glob("rank*.checkpoint*"), *self.histories()]:
            left.unlink()
        if not ranks:
            self.results = self.folder / "results.csv" if curve else None
            self.processes.append(self._start("all", *self.flags, *([f"--csv={self.results}"] if curve else [])))
            return
        self.session = f"ranks-{id(self)}"
        self.checkpoints = [self.folder / f"rank{rank}.checkpoint" for rank in range(world_size)]
        for rank in range(world_size):
            self.processes.append(self._start_rank(rank))

    def _start(self, name, *arguments):
        with open(self.errors, "ab") as log:
            return subprocess.Popen([*self.program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    env={"PRECONDOR_HISTORY": self.folder / f"{name}.history"} if self.record else {})

    def _start_rank(self, rank):
        return self._start(self.checkpoints[rank].name, str(rank), self.session, self.checkpoints[rank], *self.flags)

    def histories(self):
        """Files of what the workers have been told."""
        return sorted(self.folder.glob("*.history"))

    def workers(self):
        """Pids of the workers, by rank, where each is a process."""
        return [process.pid for process in self.processes]

    def restart(self, rank):
        """Kills a worker; another process goes on from its checkpoint."""
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.processes[rank] = self._start_rank(rank)

    def replace(self, rank):
        """Another process takes the rank from a worker that goes on; that worker."""
        replaced, before = self.processes[rank], self.checkpoints[rank]
        self.checkpoints[rank] = before.with_name(f"{before.name}.{len(self.histories())}")
        shutil.copy(before, self.checkpoints[rank])
        self.processes[rank] = self._start_rank(rank)
        return replaced

    def running(self):
        return any(process.poll() is None for process in self.processes)

    def ends(self, deadline_s=600):
        """Waits for the end; the exit status of each process."""
        return [process.wait(deadline_s) for process in self.processes]

    def finish(self, deadline_s=600):
        """Waits for the end; the run's weights_hash, final_loss and steps, with `curve` all of digits.read_run."""
        for status in self.ends(deadline_s):
            if status != 0:
                raise Failure(f"{self.program[-1].name} ended with {status}: {self.errors.read_text(errors='replace')[-2000:]}")
        if len(self.processes) == 1:
            text = self.errors.read_text()
            if self.results is not None:
                return digits.read_run(self.results, text)
            loss, steps, weights = re.findall(r"held-out loss (\S+) after (\d+) steps, .* weights (\w{16})$", text, re.MULTILINE)[-1]
            return {"weights_hash": weights, "final_loss": float(loss), "steps": int(steps)}
        runs = [json.loads(line) for line in self.errors.read_text().splitlines() if line.startswith("{")]
        if len({run["weights_hash"] for run in runs}) != 1:
            raise Failure(f"the replicas differ: {[run['weights_hash'] for run in runs]}")
        return runs[0]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def say(text):
    """Progress of a long run, a line at a time."""
    print(text, file=sys.stderr, flush=True)
