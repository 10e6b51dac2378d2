#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server lives in a cgroup of the memory that docs/operate/operations.md gives for it, and a job trains on, while clients attack it.

Usage: memory_test.py --binaries DIR [-k PATTERN]

Each test is one attack, on a server with all roles or on a coordinator. Needs root and a memory cgroup; else it says so and skips.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import os
import pathlib
import re
import shutil
import socket
import struct
import sys
import tempfile
import types
import unittest
import zlib

import grpc

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "chaos"))
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))
# pylint: disable=wrong-import-position
import churn
import cluster
import interop_test as interop

MIB = 1 << 20
LIMIT, TRANSPORT, CREDIT, MESSAGE = 96 * MIB, 128 * MIB, 4 * MIB, 128 * MIB
RANKS = 8
PROCESS, REQUESTS, SHARED = 64 * MIB, 64 * MIB, 16 * MIB
V1, V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")


class Cgroup:
    """A memory cgroup of this process, for the programs that `prefix` starts."""

    def __init__(self, most_bytes):
        root, limit = (V1, "memory.limit_in_bytes") if (V1 / "memory.limit_in_bytes").exists() else (V2, "memory.max")
        self.folder = root / f"precondor-memory-{os.getpid()}"
        self.folder.mkdir()
        try:
            (self.folder / limit).write_text(str(most_bytes))
        except OSError:
            self.folder.rmdir()
            raise
        self.prefix = ["sh", "-c", f'echo $$ >{self.folder}/cgroup.procs && exec "$@"', "sh"]

    def close(self):
        self.folder.rmdir()


class Attacks:
    """A job beside each attack, and the attacks that every server can have."""

    binaries = None
    budget = None  # bytes of the attacked server, by the rule of docs/operate/operations.md
    awaits_ends = True  # of messages that never end

    def setUp(self):
        most = int(1.15 * self.budget)  # the kernel counts page tables and pages of files too
        try:
            self.cgroup = Cgroup(most)
        except OSError as error:
            self.skipTest(f"no memory cgroup of our own: {error}")
        self.addCleanup(self.cgroup.close)
        folder = tempfile.TemporaryDirectory(prefix="precondor-memory-")
        self.addCleanup(folder.cleanup)
        self.start(folder.name)
        self.assertAlmostEqual(self.server.metric("precondor_container_memory_bytes"), most, delta=4096)
        self.job = cluster.Training(self.binaries, types.SimpleNamespace(coordinator=self.server), folder.name, ["--steps=1000000"],
                                    prefix=("nice",))  # it would take what processors there are
        self.addCleanup(self.job.close)
        self.await_steps()

    def start(self, folder):
        """Starts `server`, which is to be attacked."""
        raise NotImplementedError

    def add_server(self, folder, name, arguments, prefix=()):
        server = cluster.Server(self.binaries, folder, name, [*arguments, "--threads=2", f"--transport-memory={TRANSPORT}",
                                                              f"--max-message-bytes={MESSAGE}"], prefix=prefix)
        self.addCleanup(server.close)
        server.start()
        return server

    def await_steps(self):
        """The job goes on, and the server lives and has never had more than its budget."""
        before = self.server.metric("precondor_last_step_number") or 0

        def goes_on():
            self.assertTrue(self.job.running(), self.job.errors.read_text())
            return (self.server.metric("precondor_last_step_number") or 0) > before + 10
        cluster.wait_for("the job to go on", goes_on)
        self.assertIsNone(self.server.process.poll(), self.server.log_tail())
        status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        self.assertLess(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]), self.budget)

    def channel(self):
        """A channel with a connection of its own, for messages of any size."""
        channel = grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1),
                                                              ("grpc.max_send_message_length", -1)])
        self.addCleanup(channel.close)
        return channel

    def test_large_messages_of_strangers(self):
        """No session, no secret: whole messages of no sense, on many connections at once."""
        message = bytes(MESSAGE - 1024)

        def flood(_):
            call = self.channel().stream_stream("/precondor.v1.PreconditionService/Exchange")(iter([message]), timeout=60)
            with self.assertRaises(grpc.RpcError) as refused:
                list(call)
            return refused.exception.code()

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            codes = set(pool.map(flood, range(24)))
        self.assertLessEqual(codes, {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
                                     grpc.StatusCode.UNIMPLEMENTED})  # a coordinator has no such call
        self.await_steps()

    def test_descriptions_without_measure(self):
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        sessions = interop.pb.session_pb2_grpc.SessionServiceStub(self.channel())
        layer = c.Layer(name="x" * 200, d_out=8, d_in=8)
        for spec in (c.SessionSpec(name="ranks", world_size=65536, layers=[c.Layer(name=f"layer{i}", d_out=64, d_in=64) for i in range(64)]),
                     c.SessionSpec(name="layers", world_size=2, layers=[layer] * 140_000),
                     c.SessionSpec(name="wide", world_size=2, layers=[c.Layer(name="w", d_out=1 << 16, d_in=1 << 16)])):
            calls = [sessions.OpenSession.future(s.OpenSessionRequest(spec=spec), timeout=60) for _ in range(4)]
            for call in calls:
                self.assertIn(call.code(), (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), spec.name)
            self.await_steps()

    def test_sessions_without_end(self):
        """Long layer tables, and small sessions: each is counted, until there is no room."""
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        sessions = interop.pb.session_pb2_grpc.SessionServiceStub(self.channel())
        for kind, layers in (("long", 5000), ("small", 1)):
            table = [c.Layer(name=f"{i:05}" + "x" * 500, d_out=1, d_in=1) for i in range(layers)]
            for number in range(4000):
                spec = c.SessionSpec(name=f"{kind}{number}", world_size=1, layers=table)
                try:
                    sessions.OpenSession(s.OpenSessionRequest(spec=spec), timeout=60)
                except grpc.RpcError as refused:
                    self.assertEqual(refused.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, refused.details())
                    break
            else:
                self.fail(f"4000 {kind} sessions have found room")
            self.await_steps()

    def test_requests_that_grow_when_they_are_decoded(self):
        """Two bytes a layer, and three a field that the server does not know."""
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        layers = s.OpenSessionRequest(spec=c.SessionSpec(name="empty", layers=[c.Layer()] * 2_000_000)).SerializeToString()
        for method, request in (("OpenSession", layers), ("JoinSession", b"\xf8\x07\x01" * 10_000_000),
                                ("JoinSession", b"\x08\x01" * 30_000_000), ("JoinSession", b"\x0a\x80\x80\x80\x32" + bytes(100 << 20))):
            calls = [self.channel().unary_unary(f"/precondor.v1.SessionService/{method}").future(request, timeout=60) for _ in range(6)]
            self.assertLessEqual({call.code() for call in calls}, {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
            self.await_steps()


    # The attacks below come from addresses of their own: a peer that goes too far is refused for a time.

    def test_compressed_messages(self):
        """1 MB that would be 1 GB, also to a method that everyone may call."""
        zeros, packer = bytes(1 << 20), zlib.compressobj(9, wbits=31)
        packed = b"".join(packer.compress(zeros) for _ in range(1 << 10)) + packer.flush()
        message = b"\x01" + struct.pack(">I", len(packed)) + packed
        for path in (b"/grpc.health.v1.Health/Check", b"/precondor.v1.SessionService/OpenSession"):
            peer = churn.Http2Peer(self.server.port, "127.0.0.9")
            peer.call(1, path, (b"grpc-encoding", b"gzip"))
            try:
                peer.send(1, message)
                while 1 not in peer.answered:
                    peer.receive()
            finally:
                peer.socket.close()
            self.await_steps()

    def flood(self, number, frames, acknowledges):
        """Sends `frames` of a stream's number on 50,000 streams, until the server ends the connection."""
        peer = churn.Http2Peer(self.server.port, f"127.0.1.{number + 1}", acknowledges)
        try:
            for begin in range(1, 100_000, 2_000):
                peer.socket.sendall(b"".join(frames(stream) for stream in range(begin, begin + 2_000, 2)))
        except ConnectionError:
            pass
        peer.await_end()

    def test_streams_that_are_reset(self):
        reset = struct.pack(">I", 8)
        frames = lambda stream: (churn.http2_frame(churn.HEADERS, churn.END_HEADERS, stream, churn.EXCHANGE_HEADERS)
                                 + churn.http2_frame(churn.RST_STREAM, 0, stream, reset))
        for number in range(6):
            self.flood(number, frames, number % 2 == 0)
        self.await_steps()

    def test_streams_that_are_idle(self):
        frames = lambda stream: churn.http2_frame(churn.HEADERS, churn.END_HEADERS, stream, churn.EXCHANGE_HEADERS)
        for number in range(6):
            self.flood(number, frames, number % 2 == 0)
        self.await_steps()

    def test_messages_that_never_end(self):
        """Each is whole but for its last byte. A server ends the connections in time: half a minute, and a second for each MiB."""
        def begin(number):
            peer = churn.Http2Peer(self.server.port, f"127.0.1.{number + 1}")
            self.addCleanup(peer.socket.close)
            peer.call(1, b"/precondor.v1.SessionService/OpenSession")
            with contextlib.suppress(ConnectionError):  # ended before all of it was sent
                peer.send(1, b"\x00" + struct.pack(">I", 16 * MIB) + bytes(16 * MIB - 1))
            return peer

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            peers = list(pool.map(begin, range(12)))
            self.await_steps()
            if self.awaits_ends:
                list(pool.map(churn.Http2Peer.await_end, peers))
                self.await_steps()


class ServerTest(Attacks, unittest.TestCase):
    budget = LIMIT + TRANSPORT + SHARED + REQUESTS + 2 * CREDIT * RANKS + PROCESS

    def start(self, folder):
        arguments = ["--role=all", f"--memory-limit={LIMIT}", f"--credit-bytes={CREDIT}", f"--shared-memory-bytes={SHARED}",
                     "--snapshot-interval-steps=50"]
        self.server = self.add_server(folder, "server", [*arguments, f"--data-dir={folder}/server/data"], self.cgroup.prefix)
        self.assertEqual([self.server.metric(f'precondor_memory_budget_bytes{{part="{part}"}}')
                          for part in ("sessions", "messages", "shared_memory", "requests", "contributions", "process")],
                         [LIMIT, TRANSPORT, SHARED, REQUESTS, 0, PROCESS])
        self.assertNotIn("less memory than the server may need", self.server.log_tail())
        greedy = self.add_server(folder, "greedy", [*arguments, "--memory-limit=1GiB"], self.cgroup.prefix)
        self.assertIn("the container has less memory than the server may need", greedy.log_tail())
        greedy.close()

    def open(self, name, **more):
        """A session of RANKS ranks with two layers whose gradients are 2 MB; what each rank joined with."""
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        spec = c.SessionSpec(name=name, world_size=RANKS, exchange=c.EXCHANGE_MODE_DIRECT, statistics=c.STATISTICS_KIND_SIGNED,
                             sketches=1, gradient_dtype=c.DATA_TYPE_F32, method=c.MethodConfig(mkor=c.MkorConfig(rank=8)),
                             layers=[c.Layer(name=f"layer{i}", d_out=700, d_in=700) for i in range(2)], **more)
        sessions = interop.pb.session_pb2_grpc.SessionServiceStub(self.channel())
        sessions.OpenSession(s.OpenSessionRequest(spec=spec), timeout=60)
        return [sessions.JoinSession(s.JoinSessionRequest(name=name, rank=rank, incarnation=1), timeout=60)
                for rank in range(RANKS)]

    def test_contributions_that_never_end(self):
        """Every rank begins its gradients on many streams and ends none."""
        p, c = interop.pb.precondition_pb2, interop.pb.common_pb2
        joined = self.open("begun")
        streams = []
        for rank in range(RANKS):
            channel = self.channel()
            for _ in range(16):
                outgoing = interop.queue.Queue()
                streams.append((outgoing, channel.stream_stream(
                    "/precondor.v1.PreconditionService/Exchange", p.ExchangeRequest.SerializeToString,
                    p.ExchangeResponse.FromString)(iter(outgoing.get, None))))
                for layer in range(2):
                    header = p.FrameHeader(session_id=joined[rank].session_id, epoch=joined[RANKS - 1].epoch, layer=layer, rank=rank,
                                           incarnation=1, kind=p.FRAME_KIND_GRADIENT, mode=c.MODE_SECOND_ORDER, samples=1,
                                           secret=joined[rank].secret, payload_bytes=4 * 700 * 700)
                    header.tensors.add(data_type=c.DATA_TYPE_F32, dims=[700, 700], scale=1)
                    outgoing.put(p.ExchangeRequest(header=header, payload=bytes(header.payload_bytes - 4)))
        refused = 0
        for _, call in streams:
            self.assertEqual(next(call).header.kind, p.FRAME_KIND_CREDIT)
        self.await_steps()
        for outgoing, call in streams:
            outgoing.put(None)  # what has come so far is answered: the second refusal of most streams
            for frame in call:
                self.assertEqual(frame.header.kind, p.FRAME_KIND_ERROR, frame)
                refused += 1
        self.assertGreater(refused, len(streams))
        self.await_steps()

    def test_answers_that_are_not_read(self):
        """Bundles of empty frames, whose refusals are not read."""
        p = interop.pb.precondition_pb2
        header = p.FrameHeader(kind=p.FRAME_KIND_GRADIENT)
        bundle = p.ExchangeRequest(bundle=[p.ExchangeRequest(header=header)] * 8000).SerializeToString()
        calls = []
        for _ in range(8):
            calls.append(self.channel().stream_stream("/precondor.v1.PreconditionService/Exchange")(iter([bundle] * 200)))
        for _ in range(5):  # the flood has begun: each is some tens of steps
            self.await_steps()
        self.await_steps()
        for call in calls:
            call.cancel()
        self.await_steps()

    def test_layers_that_are_restored_in_part(self):
        """Sessions that are restored, as many as find room, each with a layer of which the last byte never comes."""
        c, snapshots = interop.pb.common_pb2, importlib.import_module("precondor.v1.snapshot_pb2")
        service = importlib.import_module("precondor.v1.snapshot_pb2_grpc").SnapshotServiceStub(self.channel())
        codes, begun_layers = [], 0
        for number in range(20):
            spec = c.SessionSpec(name=f"restored{number}", world_size=1, method=c.MethodConfig(muon=c.MuonConfig()),
                                 exchange=c.EXCHANGE_MODE_DIRECT, layers=[c.Layer(name="w", d_out=700, d_in=700)])
            try:
                session = service.RestoreSession(snapshots.RestoreSessionRequest(spec=spec, step=1), timeout=60)
                begun = snapshots.RestoreLayerRequest(session_id=session.session_id, step=1, secret=session.secret, fetched=True,
                                                      total_bytes=4 * 700 * 700, data=bytes(4 * 700 * 700 - 1))
                service.RestoreLayer(begun, timeout=60)
                begun_layers += 1
                begun.total_bytes = 1 << 40
                service.RestoreLayer(begun, timeout=60)
            except grpc.RpcError as refused:
                codes.append(refused.code())
        self.assertEqual(codes, [grpc.StatusCode.RESOURCE_EXHAUSTED] * 20)
        self.assertEqual(begun_layers, 4)
        self.await_steps()

    def test_pages_that_are_not_read(self):
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        sessions = interop.pb.session_pb2_grpc.SessionServiceStub(self.channel())
        for number in range(100):  # with series of their own
            spec = c.SessionSpec(name=f"pages{number}", world_size=1, exchange=c.EXCHANGE_MODE_DIRECT,
                                 method=c.MethodConfig(muon=c.MuonConfig()), layers=[c.Layer(name="layer", d_out=2, d_in=2)])
            sessions.OpenSession(s.OpenSessionRequest(spec=spec), timeout=60)
        readers = [socket.socket() for _ in range(64)]
        for number, reader in enumerate(readers):
            self.addCleanup(reader.close)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.bind((f"127.0.1.{1 + number // 8}", 0))
            reader.connect(("127.0.0.1", self.server.metrics_port))
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answers = [reader.recv(12, socket.MSG_WAITALL) for reader in readers]
        self.assertEqual(set(answers), {b"HTTP/1.1 200", b"HTTP/1.1 503"})
        self.await_steps()

    def test_recovery_of_what_was_reserved_to_the_brim(self):
        for number in range(100):
            try:
                self.open(f"brim{number}")
            except grpc.RpcError as refused:
                self.assertEqual(refused.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                break
        else:
            self.fail("100 sessions have found room")
        self.assertGreater(number, 0)
        self.server.restart()
        self.await_steps()


class CoordinatorTest(Attacks, unittest.TestCase):
    budget = LIMIT + TRANSPORT + REQUESTS + PROCESS
    awaits_ends = False  # they are the connections of every server, ServerTest's and connection_watch_test's

    def start(self, folder):
        shard = self.add_server(folder, "shard", ["--role=shard", f"--memory-limit={LIMIT}"])
        self.server = self.add_server(folder, "coordinator", ["--role=coordinator", f"--shards={shard.address}", f"--memory-limit={LIMIT}",
                                                              f"--data-dir={folder}/coordinator/data"], self.cgroup.prefix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", required=True, type=pathlib.Path)
    parser.add_argument("--protoc", default=shutil.which("protoc"))
    parser.add_argument("--grpc-plugin", default=shutil.which("grpc_python_plugin"))
    parser.add_argument("-k", dest="pattern")
    options = parser.parse_args()
    Attacks.binaries = options.binaries.resolve()
    with tempfile.TemporaryDirectory() as folder:
        interop.generate_stubs(options.protoc, options.grpc_plugin, folder)
        unittest.main(argv=[sys.argv[0], "-v"] + (["-k", options.pattern] if options.pattern else []))


if __name__ == "__main__":
    main()
