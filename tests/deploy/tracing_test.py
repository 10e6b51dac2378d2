#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spans of a training job in a real OpenTelemetry collector, rotel of PyPI, which prints each span that it takes.

Usage: tracing_test.py BINARIES

tests/python/tracing_test.py has the contexts of callers, failed calls, and collectors that do not answer.
"""

import collections
import json
import pathlib
import re
import signal
import socket
import sys
import tempfile
import unittest

import deploy_tools

from cluster import Cluster, Training, free_port, wait_for
from monitoring_program import Program

deploy_tools.require("rotel-agent")

BINARIES = None  # the build folder
STEPS = 4
SHARDS = 2
CALL = "precondor.v1."
FIELD = re.compile(r"(?:     -> |    )?(.+?)\s*: ?(.*)")
VALUES = {"Int": int, "Double": float, "Str": str}


def parse(text):
    """The spans of rotel's detailed debug log."""
    spans, resource, part = [], None, "scope"
    for line in text.splitlines():
        if line.startswith("ResourceSpans #"):
            resource, part = {}, "scope"
        elif line.startswith("Span #"):
            spans.append({"resource": resource, "attributes": {}, "events": [], "links": []})
            part = None
        elif line in ("Resource attributes:", "Attributes:", "Events:", "Links:"):
            part = line[:-1].lower()
        elif found := FIELD.fullmatch(line):
            name, value = found.groups()
            if part in ("resource attributes", "attributes"):
                if typed := re.fullmatch(r"(\w+)\((.*)\)", value):
                    held = resource if part == "resource attributes" else spans[-1]["attributes"]
                    held[name] = VALUES[typed[1]](typed[2])
            elif part == "events" and name == "Name":
                spans[-1]["events"].append(value)
            elif part == "links" and name == "ID":
                spans[-1]["links"].append(value)
            elif part is None:
                spans[-1][name] = value
    return spans


class Collector(Program):
    def __init__(self, folder):
        self.port = free_port()
        super().__init__(folder, [
            "rotel-agent", "start", f"--otlp-http-endpoint=127.0.0.1:{self.port}", f"--otlp-grpc-endpoint=127.0.0.1:{free_port()}",
            "--debug-log", "traces", "--debug-log-verbosity", "detailed", "--exporter", "blackhole"])
        wait_for("the collector", self.listens)

    def listens(self):
        if self.process.poll() is not None:
            raise AssertionError(self.log.read_text())
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except OSError:
            return False
        return True


class TracingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="precondor-tracing-")))
        with Collector(folder) as collector:
            flags = [f"--trace-endpoint=http://127.0.0.1:{collector.port}", "--trace-ratio=1", "--log-format=json",
                     "--log-level=debug"]
            with Cluster(BINARIES, folder, shards=SHARDS, coordinator_arguments=flags, shard_arguments=flags, durable=False) as cluster:
                with Training(BINARIES, cluster, folder, [f"--steps={STEPS}"]) as training:
                    training.finish()
                cls.dropped = [server.metric("precondor_dropped_trace_spans_total") for server in cluster.servers()]
                for server in cluster.servers():
                    server.signal(signal.SIGTERM)  # it sends what waits
                for server in cluster.servers():
                    server.process.wait(60)
                cls.lines = [json.loads(line) for line in (cluster.coordinator.folder / "log").read_text().splitlines()]
        cls.log = collector.log.read_text()
        cls.spans = parse(cls.log)
        cls.by_id = {span["ID"]: span for span in cls.spans}

    def roots(self):
        return {span["attributes"]["precondor.step"]: span for span in self.spans if span["Name"] == "step"}

    def test_the_collector_takes_every_span(self):
        self.assertNotIn("ERROR", self.log)
        self.assertEqual(self.dropped, [0] * (SHARDS + 1))
        self.assertEqual(len(self.by_id), len(self.spans))
        for span in self.spans:
            self.assertRegex(span["Trace ID"], "^[0-9a-f]{32}$")
            self.assertRegex(span["ID"], "^[0-9a-f]{16}$")
            self.assertLessEqual(int(span["Start time"]), int(span["End time"]))

    def test_resources_are_the_servers(self):
        servers = {resource["service.instance.id"]: resource for resource in (span["resource"] for span in self.spans)}
        self.assertEqual(sorted(resource["precondor.role"] for resource in servers.values()), ["coordinator"] + ["shard"] * SHARDS)
        for resource in servers.values():
            self.assertEqual(resource["service.name"], "precondor-server")
            self.assertRegex(resource["service.version"], r"^\d+\.\d+\.\d+$")

    def test_every_step_is_a_trace_with_its_exchanges_and_reports(self):
        roots = self.roots()
        self.assertEqual(sorted(roots), list(range(STEPS)))
        self.assertEqual(len({root["Trace ID"] for root in roots.values()}), STEPS)
        children = collections.Counter()
        for span in self.spans:
            name, values = span["Name"], span["attributes"]
            if name not in ("exchange of a step", CALL + "SessionService/ReportStep"):
                continue
            root = roots[values["precondor.step"]]
            self.assertEqual((root["Parent ID"], root["Kind"], root["resource"]["precondor.role"]),
                             ("", "SPAN_KIND_INTERNAL", "coordinator"))
            self.assertEqual((span["Trace ID"], span["Parent ID"], span["Kind"]), (root["Trace ID"], root["ID"], "SPAN_KIND_SERVER"))
            children[name, span["resource"]["precondor.role"], values["precondor.step"], values["precondor.rank"]] += 1
            if name == "exchange of a step":
                link, = span["links"]
                self.assertEqual(self.by_id[link]["Name"], CALL + "PreconditionService/Exchange")
                # Each layer has its statistics and its gradient.
                self.assertEqual(values["precondor.contributions"], 2 * values["precondor.answers"])
                self.assertGreater(values["precondor.precondition_seconds"], 0)
                self.assertGreater(values["precondor.update_seconds"], 0)
                self.assertEqual(span["events"], ["last contribution acknowledged", "first answer", "last answer"])
        ranks = [(step, rank) for step in range(STEPS) for rank in range(Training.WORKERS)]
        self.assertEqual(children, {
            **{("exchange of a step", "shard", *one): SHARDS for one in ranks},
            **{(CALL + "SessionService/ReportStep", "coordinator", *one): 1 for one in ranks}})

    def test_a_log_line_of_a_step_has_the_step_and_its_trace(self):
        lines = [line for line in self.lines if line["message"] == "step reported by all"]
        session, = {line["session"] for line in lines}
        self.assertTrue(session)
        self.assertEqual([(line["step"], line["trace_id"]) for line in lines],
                         [(step, self.roots()[step]["Trace ID"]) for step in range(STEPS)])


if __name__ == "__main__":
    BINARIES = pathlib.Path(sys.argv[1])
    unittest.main(argv=[sys.argv[0], "-v"])
