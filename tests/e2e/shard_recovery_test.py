#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills shards with SIGKILL while a job trains through them, and holds the job to the weights of a run without faults.

Usage: shard_recovery_test.py --binaries DIR [--kills N] [--exchange direct|delegate] [--seed N]

A coordinator, two shards with data directories and four worker processes. At random moments a shard, or both, are killed
and started again on the same port and directory. The final weights have to be bitwise those of the first, quiet run.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

DEADLINE_S = 120


class Server:
    """One precondor-server, which can be started again where it was."""

    def __init__(self, binaries, folder, name, *flags):
        self.program = binaries / "server/precondor-server"
        self.port_file = folder / f"{name}.port"
        self.log = folder / f"{name}.log"
        self.flags = list(flags)
        self.port = 0
        self.process = None

    def start(self):
        self.port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, f"--listen=127.0.0.1:{self.port}", f"--port-file={self.port_file}", *self.flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + DEADLINE_S
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.flags}: not serving:\n{self.log.read_text()}")
            wait(self.process, 0.005)
        self.port = int(self.port_file.read_text())

    def kill(self):
        self.process.kill()
        self.process.wait()

    def address(self):
        return f"127.0.0.1:{self.port}"


def wait(process, seconds):
    """True when the process ended within that time."""
    try:
        process.wait(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        return False


def start_job(args, folder, coordinator, steps):
    command = [args.binaries / "client/cpp/examples/precondor-digits", "--coordinator", coordinator.address(),
               "--shards", "2", "--tasks", "classifier", "--methods", args.method, "--optimizers", "adamw", "--workers", "4",
               "--seeds", "1", "--learning-rates", "0.008", "--exchange", args.exchange, "--steps", str(steps),
               "--json", folder / "runs.json"]
    with (folder / "job.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def finish_job(job, folder):
    if not wait(job, DEADLINE_S) or job.returncode != 0:
        job.kill()
        logs = "".join(f"--- {path.name}\n{path.read_text()[-4000:]}\n" for path in sorted(folder.glob("*.log")))
        sys.exit(f"the job ended with {job.returncode}\n{logs}")
    (run,) = json.loads((folder / "runs.json").read_text())["runs"]
    return run["weights_hash"]


def kill_shards(job, shards, count, chance):
    """Returns how many kills there were before the job ended."""
    for done in range(count):
        if wait(job, chance.uniform(0.02, 0.5)):
            return done
        victims = shards if chance.random() < 0.2 else [chance.choice(shards)]
        for shard in victims:
            shard.kill()
        for shard in victims:
            shard.start()
    return count


def run(args, folder):
    chance = random.Random(args.seed)
    print(f"seed {args.seed}")
    # Enough for the kills to find it at work.
    steps = 200 + 60 * args.kills
    shards = [Server(args.binaries, folder, f"shard{i}", "--role=shard", "--threads=1", f"--data-dir={folder}/data{i}")
              for i in range(2)]
    servers = list(shards)
    try:
        for shard in shards:
            shard.start()
        coordinator = Server(args.binaries, folder, "coordinator", "--role=coordinator",
                             "--shards=" + ",".join(shard.address() for shard in shards))
        servers.append(coordinator)
        coordinator.start()
        expected = finish_job(start_job(args, folder, coordinator, steps), folder)
        job = start_job(args, folder, coordinator, steps)
        try:
            killed = kill_shards(job, shards, args.kills, chance)
            got = finish_job(job, folder)
        finally:
            job.kill()
            job.wait()
        print(f"{killed} kills in {steps} steps: weights {got}, without faults {expected}")
        if killed < args.kills:
            sys.exit(f"expected {args.kills} kills before the job's end, got {killed}")
        if got != expected:
            sys.exit("the weights differ")
    finally:
        for server in servers:
            if server.process is not None:
                server.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--exchange", default="direct")
    parser.add_argument("--method", default="signed-lowrank")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    args.binaries = args.binaries.resolve()
    with tempfile.TemporaryDirectory() as folder:
        run(args, pathlib.Path(folder))


if __name__ == "__main__":
    main()
