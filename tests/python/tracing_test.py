#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spans of a coordinator and two shards under two ranks, as a collector gets them over OTLP/HTTP: callers' contexts,
what is not sampled, failures. tests/deploy/tracing_test.py has the spans of steps, in a real collector."""

import concurrent.futures
import http.server
import json
import pathlib
import tempfile
import threading
import unittest

import numpy as np
import precondor
import test_program
from cluster import Server, wait_for

STEPS = 4
RANKS = 2
LAYERS = [precondor.Layer("a", 8, 16), precondor.Layer("b", 16, 8)]
# The buffers of an application, which it keeps.
APPLICATION = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
CALL = "precondor.v1."


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans at /v1/traces as OTLP/HTTP says, on loopback."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.spans = []  # with "role" of the server that they are from
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):  # pylint: disable=invalid-name
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            good = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json"
            self.send_response(200 if good else 400)
            self.end_headers()
            with self.server.changed:
                for part in request["resourceSpans"]:
                    role = attributes_of(part["resource"])["precondor.role"]
                    for scope in part["scopeSpans"]:
                        self.server.spans += [{**span, "role": role} for span in scope["spans"]]
                self.server.changed.notify_all()

        def log_message(self, format, *arguments):  # pylint: disable=redefined-builtin
            pass

    def stop(self):
        self.shutdown()
        self.thread.join()
        self.server_close()


def attributes_of(thing):
    """Name -> value."""
    values = {}
    for attribute in thing["attributes"]:
        (kind, value), = attribute["value"].items()
        values[attribute["key"]] = int(value) if kind == "intValue" else value
    return values


def run_rank(address, name, rank):
    traceparent = f"00-{APPLICATION[0]}-{APPLICATION[1]}-01" if rank == 0 else ""
    with precondor.Client(address, precondor.ClientOptions(traceparent=traceparent)) as client, client.join(name, rank) as worker:
        for step in range(STEPS):
            for layer, shape in enumerate(LAYERS):
                if worker.needs_statistics(step, layer):
                    worker.send_statistics(step, layer, np.ones((1, shape.d_in), np.float32),
                                           np.ones((1, shape.d_out), np.float32), 1)
            futures = [worker.precondition(step, layer, np.ones((shape.d_out, shape.d_in), np.float32), 1)
                       for layer, shape in enumerate(LAYERS)]
            for future in futures:
                future.result()
            worker.report_step(step, 1.0, 1, 0.1)
        worker.flush()


class TracingTest(unittest.TestCase):
    binaries = None

    def setUp(self):
        self.collector = Collector()
        self.addCleanup(self.collector.stop)
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def start(self, name, ratio, *flags, endpoint=None):
        server = Server(self.binaries, self.folder, name, [
            f"--trace-endpoint={endpoint or f'http://127.0.0.1:{self.collector.server_port}'}", f"--trace-ratio={ratio}",
            "--log-format=json", "--threads=2", *flags])
        self.addCleanup(server.close)
        server.start()
        return server

    def train(self, ratio):
        shards = [self.start(f"shard{i}", ratio, "--role=shard") for i in range(2)]
        coordinator = self.start("coordinator", ratio, "--role=coordinator", "--shards=" + ",".join(shard.address for shard in shards))
        with precondor.Client(coordinator.address) as client:
            session = client.open_session(precondor.SessionSpec("run", LAYERS, "mkor", world_size=RANKS, inv_freq=1,
                                                                statistics="PER_WORKER_MEAN"))
            with concurrent.futures.ThreadPoolExecutor(RANKS) as ranks:
                for rank in [ranks.submit(run_rank, coordinator.address, "run", rank) for rank in range(RANKS)]:
                    rank.result()
            session.close()
        lines = [json.loads(line) for line in (coordinator.folder / "log").read_text(encoding="utf-8").splitlines()]
        # A server sends what waits before it ends.
        for server in (coordinator, *shards):
            server.terminate()
        return self.collector.spans, lines

    def named(self, spans, name):
        return [span for span in spans if span["name"] == name]

    def test_every_call_is_where_it_belongs(self):
        spans, lines = self.train(1)
        self.assertEqual([span for span in spans if "status" in span], [])
        self.assertEqual(len(self.named(spans, "step")), STEPS)
        by_id = {span["spanId"]: span for span in spans}
        # The application's context: calls and streams of rank 0, and of no other rank.
        for name, count in (("SessionService/JoinSession", None), ("PreconditionService/Exchange", 2)):
            own = [span for span in self.named(spans, CALL + name) if span["traceId"] == APPLICATION[0]]
            self.assertTrue(own if count is None else len(own) == count, name)
            self.assertEqual({span["parentSpanId"] for span in own}, {APPLICATION[1]})
        # A call of the coordinator to its shards belongs to the call that it is made for.
        opened, = self.named(spans, CALL + "SessionService/OpenSession")
        self.assertEqual(attributes_of(opened)["precondor.session"], "run")
        installs = self.named(spans, CALL + "ShardService/InstallSession")
        for span in installs:
            parent = by_id[span["parentSpanId"]]
            self.assertEqual((span["role"], span["traceId"], parent["role"]), ("shard", parent["traceId"], "coordinator"))
        self.assertEqual([span["parentSpanId"] for span in installs].count(opened["spanId"]), 2)
        # So does a line of the log.
        line, = [line for line in lines if line["message"] == "session opened"]
        self.assertEqual((line["session"], line["trace_id"], line["span_id"]),
                         ("run", opened["traceId"], opened["spanId"]))

    def test_steps_that_are_not_chosen_have_no_spans(self):
        spans, _ = self.train(0)
        self.assertTrue(self.named(spans, CALL + "SessionService/JoinSession"))
        for name in ("step", "exchange of a step", CALL + "SessionService/ReportStep"):
            self.assertEqual(self.named(spans, name), [], name)
        # Calls that only read have spans if the application keeps them.
        self.assertEqual([span["traceId"] for span in self.named(spans, CALL + "AdminService/GetServerInfo")],
                         [APPLICATION[0]])

    def test_a_failed_call_says_why(self):
        server = self.start("server", 0)
        with precondor.Client(server.address) as client, self.assertRaises(precondor.NotFoundError):
            client.join("nowhere")
        server.terminate()
        joined, = self.named(self.collector.spans, CALL + "SessionService/JoinSession")
        self.assertEqual(joined["status"]["code"], 2)
        self.assertIn("nowhere", joined["status"]["message"])

    def test_without_a_collector_calls_go_on_and_spans_are_counted(self):
        with Collector() as gone:
            gone.stop()
            endpoint = f"http://127.0.0.1:{gone.server_port}"
        server = self.start("server", 1, endpoint=endpoint)
        with precondor.Client(server.address) as client:
            client.open_session(precondor.SessionSpec("run", LAYERS, "identity")).close()
        wait_for("two dropped spans", lambda: server.metric("precondor_dropped_trace_spans_total") >= 2)
        self.assertGreaterEqual(server.metric("precondor_trace_spans_total"),
                                server.metric("precondor_dropped_trace_spans_total"))


if __name__ == "__main__":
    TracingTest.binaries = pathlib.Path(test_program.parse("--server").server).resolve().parents[1]
    test_program.run()
