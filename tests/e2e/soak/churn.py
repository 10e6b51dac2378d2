# SPDX-License-Identifier: Apache-2.0
"""The clients of a service, good and bad: calls, jobs, connections, streams and bytes that break off.

Each method of Churn does one round of one kind, ends all that it began and counts it in `counts`.
"""

import collections
import itertools
import pathlib
import random
import socket
import struct
import sys
import threading
import time

import grpc

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import interop_test as interop  # pylint: disable=wrong-import-position

# Small, so that rounds are short; answers of the second fill HTTP/2's windows when they are not read.
interop.LAYERS = (("small", 5, 7, False), ("wide", 64, 256, True))
TIMEOUT_S = interop.TIMEOUT_S
HALF_OPEN, CONNECTS, STREAMS, CALLS, SHAPES = 6, 24, 4, 80, 5  # of each in a round

WINDOW, FRAME_BYTES = 65535, 16384  # what HTTP/2 begins with
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9  # types of frames (RFC 9113)
ACK, END_HEADERS, INITIAL_WINDOW_SIZE = 1, 4, 4


def http2_frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_field(name, value):
    """A field of HPACK that is not indexed; lengths below 127 are one byte."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(path, *more):
    return b"".join(header_field(name, value) for name, value in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"soak"), (b"te", b"trailers"), (b":path", path),
        (b"content-type", b"application/grpc"), *more))


EXCHANGE_HEADERS = call_headers(b"/precondor.v1.PreconditionService/Exchange")


class Http2Peer:
    """A connection whose frames a test writes itself. It sends data as the server's windows allow; a connection that the server has
    ended raises ConnectionError."""

    def __init__(self, port, source="127.0.0.1", acknowledges=True):
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S, (source, 0))
        self.acknowledges, self.unread = acknowledges, b""
        self.answered = set()  # streams that the server has answered or reset
        self.initial, self.window, self.windows = WINDOW, WINDOW, {}  # of a new stream, the connection, and open streams
        self.socket.sendall(PREFACE + http2_frame(SETTINGS, 0, 0, b""))

    def call(self, stream, path, *more):
        self.windows[stream] = 0
        self.socket.sendall(http2_frame(HEADERS, END_HEADERS, stream, call_headers(path, *more)))

    def send(self, stream, data):
        """Sends data, unless the stream is answered meanwhile."""
        while data and stream not in self.answered:
            size = min(len(data), FRAME_BYTES, self.window, self.initial + self.windows[stream])
            if size <= 0:
                self.receive()
                continue
            self.socket.sendall(http2_frame(DATA, 0, stream, data[:size]))
            self.window -= size
            self.windows[stream] -= size
            data = data[size:]

    def _read(self, size):
        while len(self.unread) < size:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("ended by the server")
            self.unread += data
        data, self.unread = self.unread[:size], self.unread[size:]
        return data

    def receive(self):
        """Takes the next frame."""
        header = self._read(9)
        kind, flags, stream = struct.unpack(">BBI", header[3:])
        payload = self._read(int.from_bytes(header[:3], "big"))
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == INITIAL_WINDOW_SIZE:
                    self.initial = value
            if self.acknowledges:
                self.socket.sendall(http2_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(http2_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">I", payload)[0]
            if stream:
                self.windows[stream] = self.windows.get(stream, 0) + more
            else:
                self.window += more
        elif kind in (HEADERS, RST_STREAM):
            self.answered.add(stream)

    def await_end(self):
        """Reads until the server ends the connection."""
        try:
            while True:
                self.receive()
        except ConnectionError:
            self.socket.close()


def code_of(call):
    """The status of a call that may fail."""
    try:
        call()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def expect(got, *wanted):
    if got not in wanted:
        raise AssertionError(f"expected {' or '.join(map(str, wanted))}, got {got}")


class Job:
    """One session of `world_size` ranks, all joined."""

    def __init__(self, churn, name, world_size=interop.WORLD_SIZE):
        self.churn, self.name = churn, name
        spec = interop.spec(name)
        spec.world_size, spec.inv_freq = world_size, 1
        request = interop.pb.session_pb2.OpenSessionRequest(spec=spec)
        assert churn.sessions.OpenSession(request, timeout=TIMEOUT_S).created, name
        assert not churn.sessions.OpenSession(request, timeout=TIMEOUT_S).created, name
        joined = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(joined) < world_size or not all(one.active for one in joined.values()):
            assert time.monotonic() < deadline, f"session {name} was never active"
            for rank in range(world_size):
                joined[rank] = self.join(rank, rank + 1)
        self.address = joined[0].shard_map.assignments[0].address
        self.ranks = [interop.Rank(self.address, rank, joined[rank]) for rank in range(world_size)]
        churn.count(sessions=1, calls=2 + 2 * world_size)

    def join(self, rank, incarnation):
        return self.churn.sessions.JoinSession(interop.pb.session_pb2.JoinSessionRequest(
            name=self.name, rank=rank, incarnation=incarnation), timeout=TIMEOUT_S)

    def step(self, step):
        """One step of all ranks, each on a stream of its own, and its reports."""
        streams = [interop.Stream(rank) for rank in self.ranks]
        for layer in range(len(interop.LAYERS)):
            for rank, stream in zip(self.ranks, streams):
                stream.send(*rank.statistics(step, layer))
                stream.send(*rank.gradient(step, layer))
            for rank, stream in zip(self.ranks, streams):
                (decision, _, _), _ = stream.answer(rank.gradient(step, layer)[0])
                expect(decision, interop.pb.common_pb2.DECISION_PRECONDITIONED)
        for stream in streams:
            stream.close()
        for rank in self.ranks:
            self.churn.sessions.ReportStep(interop.pb.session_pb2.ReportStepRequest(
                session_id=rank.joined.session_id, epoch=rank.joined.epoch, rank=rank.rank, incarnation=rank.rank + 1,
                step=step, loss=1.0, samples=1, finite=True, secret=rank.joined.secret), timeout=TIMEOUT_S)
        self.churn.count(streams=len(streams), calls=len(self.ranks))

    def close(self, leave=False):
        self.end(leave)
        self.disconnect()

    def end(self, leave=False):
        if leave:
            for rank in self.ranks:
                self.churn.sessions.LeaveSession(interop.pb.session_pb2.LeaveSessionRequest(
                    session_id=rank.joined.session_id, rank=rank.rank, incarnation=rank.rank + 1,
                    secret=rank.joined.secret), timeout=TIMEOUT_S)
        assert self.churn.sessions.CloseSession(interop.pb.session_pb2.CloseSessionRequest(name=self.name),
                                                timeout=TIMEOUT_S).existed, self.name
        self.churn.count(calls=1 + len(self.ranks) * leave)

    def disconnect(self):
        for rank in self.ranks:
            rank.channel.close()


class Churn:
    """Clients of one server. Its methods may be called on several threads at once."""

    def __init__(self, server):
        self.server = server
        self.random = random.Random(1)
        self.mutex = threading.Lock()
        self.counts = collections.Counter(calls=0, sessions=0, connects=0, streams=0)
        self.fresh = itertools.count()
        self.control = grpc.insecure_channel(server.address)
        self.sessions = interop.pb.session_pb2_grpc.SessionServiceStub(self.control)
        self.admin = interop.pb.admin_pb2_grpc.AdminServiceStub(self.control)
        self.steady = Job(self, "soak-steady", world_size=1)
        self.steps = itertools.count()

    KINDS = ("unary_calls", "whole_jobs", "other_shapes", "broken_streams", "slow_readers", "cancelled_calls", "connects",
             "half_open", "header_floods", "metrics_requests")

    def count(self, **more):
        with self.mutex:
            self.counts.update(more)

    def server_info(self, admin=None, **options):
        return (admin or self.admin).GetServerInfo(interop.pb.admin_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S, **options)

    def job(self, reused):
        return Job(self, f"soak-{reused}" if reused else f"soak-fresh-{next(self.fresh)}")

    def unary_calls(self):
        s, a, c = interop.pb.session_pb2, interop.pb.admin_pb2, interop.pb.common_pb2
        huge = c.SessionSpec(name="soak-huge", world_size=2, layers=[
            c.Layer(name=f"layer{i}", d_out=1 << 16, d_in=1 << 16) for i in range(64)])
        unnamed = c.SessionSpec(world_size=2)
        refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        kinds = [
            (self.admin.GetServerInfo, a.GetServerInfoRequest(), (grpc.StatusCode.OK,)),
            (self.admin.ListSessions, a.ListSessionsRequest(), (grpc.StatusCode.OK,)),
            (self.sessions.ReportStep, s.ReportStepRequest(session_id=1, epoch=1), (grpc.StatusCode.NOT_FOUND,)),
            (self.sessions.OpenSession, s.OpenSessionRequest(spec=huge), refused),
            (self.sessions.OpenSession, s.OpenSessionRequest(spec=unnamed), refused),
        ]
        calls = [(method.future(request, timeout=TIMEOUT_S), wanted)
                 for method, request, wanted in kinds * (CALLS // len(kinds))]
        for call, wanted in calls:
            expect(code_of(call.result), *wanted)
        self.count(calls=len(calls))

    def whole_jobs(self):
        for reused in ("whole", ""):
            job = self.job(reused)
            for step in range(2):
                job.step(step)
            if reused:  # another process takes a rank over: an epoch begins, and the rest of the old one ends
                job.join(1, 9)
                job.close()
            else:
                job.close(leave=True)

    def other_shapes(self):
        """Jobs with dense factors of any size, opened and closed."""
        c, s = interop.pb.common_pb2, interop.pb.session_pb2
        for _ in range(SHAPES):
            layers = [c.Layer(name=f"layer{i}", d_out=self.random.randrange(8, 384), d_in=self.random.randrange(8, 384))
                      for i in range(4)]
            method = c.MethodConfig(mkor=c.MkorConfig(rule="BLEND", representation="DENSE"))
            spec = c.SessionSpec(name="soak-shape", world_size=2, method=method, layers=layers)
            assert self.sessions.OpenSession(s.OpenSessionRequest(spec=spec), timeout=TIMEOUT_S).created
            assert self.sessions.CloseSession(s.CloseSessionRequest(name="soak-shape"), timeout=TIMEOUT_S).existed
        self.count(sessions=SHAPES, calls=2 * SHAPES)

    def broken_streams(self):
        """Streams that end in the middle of a contribution, and connections that end in the middle of a frame."""
        job = self.job("streams")
        for _ in range(STREAMS):
            stream = interop.Stream(job.ranks[0])
            header, payload = job.ranks[0].gradient(0, 1)
            header.chunk_offset = 0
            stream.outgoing.put(interop.pb.precondition_pb2.ExchangeRequest(header=header, payload=payload[:1001]))
            stream.send(*job.ranks[0].gradient(0, 0))
            expect(stream.read().header.kind, interop.pb.precondition_pb2.FRAME_KIND_ACK)  # so the chunk is there
            stream.call.cancel()
            stream.outgoing.put(None)
            with self.connect() as connection:
                connection.sendall(PREFACE + http2_frame(SETTINGS, 0, 0, b"") +
                                   http2_frame(HEADERS, END_HEADERS, 1, EXCHANGE_HEADERS) +
                                   http2_frame(DATA, 0, 1, struct.pack(">BI", 0, 5000) + bytes(1000)) +
                                   http2_frame(DATA, 0, 1, bytes(1000))[:100])
                self.await_reaction(connection, b"")
        job.close()
        self.count(streams=2 * STREAMS)

    def slow_readers(self):
        """Streams with 4 MiB of answers that are not read while other calls go on."""
        job = self.job("slow")
        job.step(0)
        header, payload = job.ranks[0].gradient(0, 1)
        streams = [interop.Stream(job.ranks[0]) for _ in range(2)]
        for stream in streams:
            for _ in range(64):
                stream.send(header, payload)
        for _ in range(CALLS):
            self.server_info()
        streams[0].call.cancel()
        streams[0].outgoing.put(None)
        for _ in range(64):
            streams[1].answer(header)
        streams[1].close()
        job.close()
        self.count(streams=2, calls=CALLS)

    def cancelled_calls(self):
        job = self.job("")
        waiting = [interop.Stream(job.ranks[0]) for _ in range(4)]  # for rank 1
        for stream in waiting:
            stream.send(*job.ranks[0].gradient(0, 0))
        at_once = [self.admin.ListSessions.future(interop.pb.admin_pb2.ListSessionsRequest(), timeout=TIMEOUT_S)
                   for _ in range(8)]
        for call in at_once:
            call.cancel()
        p = interop.pb.precondition_pb2
        for stream in waiting:
            expect(stream.read().header.kind, p.FRAME_KIND_ACK)
        for stream in waiting[:2]:
            stream.call.cancel()
            stream.outgoing.put(None)
        job.end()
        for stream in waiting[2:]:
            expect(stream.read().header.kind, p.FRAME_KIND_ERROR)  # the session has ended
            stream.close()
        job.disconnect()
        self.count(streams=len(waiting), calls=len(at_once))

    def connect(self, port=None):
        self.count(connects=1)
        return socket.create_connection(("127.0.0.1", port or self.server.port), timeout=TIMEOUT_S)

    def connects(self):
        for number in range(CONNECTS):
            with self.connect() as connection:
                if number % 3 == 1:
                    connection.sendall(PREFACE[:number])
                if number % 3 == 2:  # closes with a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(CONNECTS // 6):
            with self.channel() as channel:
                self.server_info(interop.pb.admin_pb2_grpc.AdminServiceStub(channel))
            self.count(calls=1)

    def channel(self):
        """A channel with a connection of its own."""
        self.count(connects=1)
        return grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1)])

    def half_open(self):
        """Peers that send nothing, or the beginning alone, while other calls go on."""
        peers = [self.connect() for _ in range(HALF_OPEN)]
        for peer in peers[::2]:
            peer.sendall(PREFACE + http2_frame(SETTINGS, 0, 0, b"") + http2_frame(HEADERS, 0, 1, b"")[:5])
        for _ in range(CALLS):
            self.server_info()
        for peer in peers:
            peer.close()
        self.count(calls=CALLS)

    @staticmethod
    def await_reaction(connection, ping):
        """Until the server has answered a PING, or, where `ping` is empty, has sent anything; or has closed."""
        seen = b""
        try:
            while data := connection.recv(1 << 16):
                seen += data
                if ping in seen:
                    return
        except ConnectionError:
            return

    def header_floods(self):
        many = b"".join(header_field(b"x-%d" % i, b"x" * 100) for i in range(140))  # 15 kB, over the limit
        floods = {
            "streams": [http2_frame(HEADERS, END_HEADERS, 2 * i + 1, EXCHANGE_HEADERS + many) for i in range(20)],
            "continuations": [http2_frame(HEADERS, 0, 1, EXCHANGE_HEADERS)]
                             + [http2_frame(CONTINUATION, 0, 1, many)] * 40,
            "resets": [http2_frame(HEADERS, END_HEADERS, 2 * i + 1, EXCHANGE_HEADERS)
                       + http2_frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8)) for i in range(50)],
            "pings": [http2_frame(PING, 0, 0, b"soakping")] * 200,
            "settings": [http2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535))] * 200,
        }
        for name, frames in floods.items():
            with self.connect() as connection:
                try:
                    connection.sendall(PREFACE + http2_frame(SETTINGS, 0, 0, b"") + b"".join(frames)
                                       + http2_frame(PING, 0, 0, b"soak-end"))
                except ConnectionError:
                    continue  # refused before all of it was sent
                self.await_reaction(connection, b"soak-end")
            if name in ("streams", "resets"):
                self.count(streams=len(frames))
        # gRPC 1.51 ends the connection that brings more than 8 KiB of metadata, and so its other calls.
        with self.channel() as channel:
            admin = interop.pb.admin_pb2_grpc.AdminServiceStub(channel)
            for size, wanted in ((4000, grpc.StatusCode.OK), (64 << 10, grpc.StatusCode.RESOURCE_EXHAUSTED)):
                expect(code_of(lambda size=size: self.server_info(admin, metadata=[("soak", "x" * size)])), wanted)
        self.count(calls=2)

    def metrics_requests(self):
        """Half requests, requests whose answer is not read, and others that are refused, held while a page is read."""
        held = [self.connect(self.server.metrics_port) for _ in range(5)]
        for connection, text in zip(held, (b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n",
                                           b"\x16\x03\x01\x00", b"")):
            connection.sendall(text)
        with self.connect(self.server.metrics_port) as connection:
            connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: soak\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 404"
        for connection in held:
            connection.close()
