#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Drives servers with churn for a time, in rounds, and fails when what they hold grows.

Two servers of role all take the rounds in turns, one of them with a data directory. A round does each kind of churn.py
on several threads, waits until descriptors, threads, reserved bytes, sessions and their series have returned to what they
were, and measures memory, disk and the times of two fixed operations. The rounds of the warm-up only set the baseline.
"""

EXAMPLES = """\
examples:
  soak.py --binaries build/dev                                 a minute, as CTest runs it
  soak.py --binaries build/dev --seconds 25200     seven hours
exit status: 0 nothing grew; 1 something grew, failed or ended, and the last lines say what; 2 usage
"""

import argparse
import array
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "chaos"))
import churn  # pylint: disable=wrong-import-position
import cluster  # pylint: disable=wrong-import-position
import slope  # pylint: disable=wrong-import-position
from cluster import Failure, say  # pylint: disable=wrong-import-position

THREADS = 5
PROBES = 40  # of each fixed operation in a round
RETURN_S = 60  # for what clients held to be free again
WARM_UP = 4  # rounds that are not measured
PROGRESS_S = 10  # between lines
# The growth that is allowed per thousand operations, and by how much the level of a server without a leak wanders in a run of any length: of
# anonymous memory as glibc's arenas and gRPC's slices fragment, of what the allocator has given out as threads keep blocks
# that are free. A short run cannot see a leak below that.
BOUND_BYTES = 16 << 10
WANDER_BYTES = {"anonymous_bytes": 24 << 20, "allocated_bytes": 8 << 20}


def bytes_in(folder):
    """The size of all files, of which some are removed meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


class Subject:
    """One server, its clients and what was measured of it."""

    def __init__(self, binaries, folder, name, arguments):
        self.server = cluster.Server(binaries, folder, name, ["--role=all", *arguments])
        self.server.start()
        self.churn = churn.Churn(self.server)
        self.baseline = None
        self.rounds = []

    def figures(self):
        """Returns the resources of the server, as it and the kernel show them."""
        if self.server.process.poll() is not None:
            raise Failure(f"{self.server.name} ended with {self.server.process.returncode}: {self.server.log_tail()}")
        proc = pathlib.Path("/proc") / str(self.server.process.pid)
        descriptors = len(list((proc / "fd").iterdir()))  # before the scrape, which has a connection
        status = dict(re.findall(r"^(\w+):\s+(\d+)", (proc / "status").read_text(), re.MULTILINE))
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        metrics = dict(re.findall(r"^(precondor_\w+) (\S+)$", text, re.MULTILINE))
        return {
            "descriptors": descriptors,
            "threads": int(status["Threads"]),
            "anonymous_bytes": 1024 * int(status["RssAnon"]),
            "allocated_bytes": float(metrics["precondor_allocated_bytes"]),
            "server_resident_bytes": float(metrics["precondor_resident_memory_bytes"]),
            "reserved_bytes": float(metrics["precondor_reserved_bytes"]),
            "shard_sessions": float(metrics["precondor_shard_sessions"]),
            "coordinator_sessions": float(metrics["precondor_coordinator_sessions"]),
            "job_series": text.count('train_job="'),
            "series": sum(not line.startswith("#") for line in text.splitlines()),
            "data_bytes": bytes_in(self.server.folder / "data"),
            "log_bytes": (self.server.folder / "log").stat().st_size,
        }

    def settle(self):
        """The figures once everything that returns has returned."""
        now = {}

        def returned():
            now.update(self.figures())
            return not slope.not_returned(self.baseline, now)

        try:
            cluster.wait_for("everything to return", returned, RETURN_S)
        except Failure as failure:
            raise Failure(f"{self.server.name}: {failure}: {'; '.join(slope.not_returned(self.baseline, now))}") from None
        return now

    def probe(self):
        """Times in milliseconds of a unary call and of a small job's step, with no other load."""
        def times(operation):
            took = array.array("f")  # a long run keeps them all
            for _ in range(PROBES):
                begin = time.monotonic()
                operation()
                took.append(1000 * (time.monotonic() - begin))
            return took

        result = {"call_ms": times(self.churn.server_info),
                  "step_ms": times(lambda: self.churn.steady.step(next(self.churn.steps)))}
        self.churn.count(calls=PROBES)
        return result

    def round(self, pool, warm_up):
        begin = time.monotonic()
        for done in [pool.submit(getattr(self.churn, kind)) for kind in churn.Churn.KINDS]:
            done.result()
        times = self.probe()
        if warm_up:
            # Threads and descriptors that the first use of a part leaves behind are part of the baseline.
            cluster.wait_for("the steady job to be alone", lambda: self.figures()["shard_sessions"] == 1, RETURN_S)
            now = self.figures()
            self.baseline = {name: max(now[name], (self.baseline or now)[name]) for name in slope.RETURNING}
        now = self.settle()
        now.update(times, seconds=time.monotonic() - begin, operations=sum(self.churn.counts.values()))
        if not warm_up:
            self.rounds.append(now)
        return now

    def report(self):
        """Growth of each figure, and the times of the first and the last third."""
        operations = [one["operations"] for one in self.rounds]
        grown = {name: vars(slope.growth(operations, [one[name] for one in self.rounds]))
                 for name in ("anonymous_bytes", "allocated_bytes", "server_resident_bytes", "data_bytes", "log_bytes", "series", "threads")}
        times = {}
        third = len(self.rounds) // 3
        for name in ("call_ms", "step_ms"):
            for part, rounds in (("first", self.rounds[:third]), ("last", self.rounds[-third:])):
                took = sorted(value for one in rounds for value in one[name])
                times[f"{name} {part}"] = {"p50": statistics.median(took), "p99": took[len(took) * 99 // 100]}
        return {"rounds": len(self.rounds), "counts": dict(self.churn.counts), "baseline": self.baseline,
                "growth_per_thousand_operations": grown, "times": times}

    def end(self):
        """Closes the last job and drains the server; what it still had under way."""
        self.churn.steady.close()
        in_flight = self.churn.admin.Drain(churn.interop.pb.admin_pb2.DrainRequest(), timeout=churn.TIMEOUT_S).in_flight
        self.churn.control.close()
        status = self.server.process.wait(RETURN_S)
        if in_flight != 0 or status != 0:
            yield f"{self.server.name}: expected 0 in flight at the drain and exit status 0, got {in_flight} and {status}"

    def findings(self):
        operations = [one["operations"] for one in self.rounds]
        for name, wander in WANDER_BYTES.items():
            found = slope.growth(operations, [one[name] for one in self.rounds])
            most = BOUND_BYTES + wander / ((operations[-1] - operations[0]) / 1000)
            if found.above(most):
                yield (f"{self.server.name}: {name} grow by {found.slope:.0f} per thousand operations "
                       f"(by thirds {found.by_thirds:.0f}), expected at most {most:.0f}")


def run(arguments, folder):
    findings, subjects = [], []
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    try:
        churn.interop.generate_stubs(arguments.protoc, arguments.grpc_plugin, folder)
        for name, flags in (("memory", ()), ("disk", (f"--data-dir={pathlib.Path(folder) / 'disk/data'}",
                                                      f"--snapshot-interval-steps={PROBES // 2}"))):
            subjects.append(Subject(arguments.binaries, folder, name, flags))
        begin = said = time.monotonic()
        number = 0
        while number < WARM_UP + 6 or time.monotonic() - begin < arguments.seconds:
            for subject in subjects:
                now = subject.round(pool, number < WARM_UP)
            number += 1
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                say(f"round {number}, {said - begin:.0f} s: " + "; ".join(
                    f"{one.server.name} {sum(one.churn.counts.values())} operations, "
                    f"{one.figures()['anonymous_bytes'] / 2**20:.1f} MiB" for one in subjects)
                    + f", {now['descriptors']} descriptors, {now['threads']} threads")
        for subject in subjects:
            findings += subject.findings()
            findings += subject.end()
    except (Failure, AssertionError, churn.grpc.RpcError, OSError, KeyboardInterrupt) as failure:
        findings.append(f"{type(failure).__name__}: {failure}")
        for subject in subjects:
            if (status := subject.server.process.poll()) is not None:
                findings.append(f"{subject.server.name} ended with {status}: {subject.server.log_tail()}")
    finally:
        pool.shutdown(cancel_futures=True)
        for subject in subjects:
            subject.server.close()
    print(json.dumps({one.server.name: one.report() for one in subjects if len(one.rounds) >= 6}, indent=1))
    print("\n".join(findings) or "nothing grew")
    return 1 if findings else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, help="build folder with server/precondor-server")
    parser.add_argument("--seconds", type=float, default=60, help="time of the rounds; default 60")
    parser.add_argument("--protoc", default=shutil.which("protoc"))
    parser.add_argument("--grpc-plugin", default=shutil.which("grpc_python_plugin"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(arguments, folder))


if __name__ == "__main__":
    main()
