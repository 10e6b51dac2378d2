#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client made of grpcio and generated stubs, with nothing of Precondor's in it, gets the C++ client's answers.

Starts a server with all roles, generates the stubs from proto/, runs a session of two ranks, and compares every answer
bit by bit with what cpp_client_answer got for the same inputs. Also reads as an example: docs/develop/protocol.md tells
the rules that this follows.
"""

import argparse
import concurrent.futures
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
WORLD_SIZE = 2
STEPS = 2
SAMPLES = (3, 5)
SKETCHES = 2
LAYERS = (("small", 5, 7, False), ("large", 300, 1001, True))
CHUNK_BYTES = 100_003  # odd, so that chunks end inside elements

pb = None  # the generated modules, once they are generated


def write_stubs(protoc, plugin, folder):
    protos = sorted((ROOT / "proto").glob("precondor/v1/*.proto"))
    subprocess.run([protoc, f"-I{ROOT / 'proto'}", f"--python_out={folder}", f"--grpc_out={folder}",
                    f"--plugin=protoc-gen-grpc={plugin}", *map(str, protos)], check=True)


def generate_stubs(protoc, plugin, folder):
    write_stubs(protoc, plugin, folder)
    sys.path.insert(0, folder)

    class Modules:
        from precondor.v1 import admin_pb2, admin_pb2_grpc, common_pb2, precondition_pb2, precondition_pb2_grpc
        from precondor.v1 import session_pb2, session_pb2_grpc

    global pb
    pb = Modules


def pattern(count, salt):
    """The same numbers as Pattern in cpp_client_answer.cc: multiples of 2^-10 in [-1, 1)."""
    values = (np.arange(count, dtype=np.uint64) * 7919 + salt * 104729) % 2048
    return (values.astype(np.float32) / np.float32(1024)) - np.float32(1)


def salt(step, layer, rank, tensor):
    return ((step * 10 + layer) * 10 + rank) * 10 + tensor


def spec(name):
    c = pb.common_pb2
    return c.SessionSpec(
        name=name, seed=7, world_size=WORLD_SIZE, exchange=c.EXCHANGE_MODE_DIRECT, statistics=c.STATISTICS_KIND_SIGNED,
        sketches=SKETCHES, statistics_dtype=c.DATA_TYPE_F16, gradient_dtype=c.DATA_TYPE_F32,
        method=c.MethodConfig(mkor=c.MkorConfig(rank=8)),
        layers=[c.Layer(name=n, d_out=o, d_in=i, has_bias=b) for n, o, i, b in LAYERS])


def detail_of(error):
    """The ErrorDetail of a failed call."""
    metadata = dict(error.trailing_metadata())
    return pb.common_pb2.ErrorDetail.FromString(metadata["grpc-status-details-bin"])


class Server:
    """precondor-server --role=all on a port of its own choice."""

    def __init__(self, program, folder, *flags):
        port_file = pathlib.Path(folder) / "port"
        self.process = subprocess.Popen([program, "--role=all", "--listen=127.0.0.1:0", f"--port-file={port_file}", *flags])
        deadline = time.monotonic() + TIMEOUT_S
        while not (port_file.exists() and port_file.read_text().strip()):
            if self.process.poll() is not None:
                raise RuntimeError(f"{program} ended with {self.process.returncode} before it listened")
            if time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"{program} wrote no port to {port_file}")
            time.sleep(0.02)
        self.address = f"127.0.0.1:{port_file.read_text().strip()}"

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Rank:
    """One worker: its key and its contributions."""

    def __init__(self, address, rank, joined):
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(address, options)
        self.stub = pb.precondition_pb2_grpc.PreconditionServiceStub(self.channel)
        self.rank = rank
        self.joined = joined

    def header(self, kind, step, layer, tensors):
        p, c = pb.precondition_pb2, pb.common_pb2
        header = p.FrameHeader(session_id=self.joined.session_id, epoch=self.joined.epoch, step=step, layer=layer,
                               rank=self.rank, incarnation=self.rank + 1, kind=kind, mode=c.MODE_SECOND_ORDER,
                               samples=SAMPLES[self.rank], secret=self.joined.secret)
        for tensor, data_type in tensors:
            header.tensors.add(data_type=data_type, dims=tensor.shape)
        payload = b"".join(tensor.tobytes() for tensor, _ in tensors)
        header.payload_bytes = len(payload)
        return header, payload

    def statistics(self, step, layer):
        _, d_out, d_in, _ = LAYERS[layer]
        f16 = pb.common_pb2.DATA_TYPE_F16
        a = pattern(SKETCHES * d_in, salt(step, layer, self.rank, 0)).reshape(SKETCHES, d_in)
        g = pattern(SKETCHES * d_out, salt(step, layer, self.rank, 1)).reshape(SKETCHES, d_out)
        return self.header(pb.precondition_pb2.FRAME_KIND_STATISTICS, step, layer,
                           [(a.astype("<f2"), f16), (g.astype("<f2"), f16)])

    def gradient(self, step, layer):
        _, d_out, d_in, _ = LAYERS[layer]
        d = pattern(d_out * d_in, salt(step, layer, self.rank, 2)).reshape(d_out, d_in)
        return self.header(pb.precondition_pb2.FRAME_KIND_GRADIENT, step, layer,
                           [(d.astype("<f4"), pb.common_pb2.DATA_TYPE_F32)])


class Stream:
    """One Exchange call. Frames are sent as given; read() gives the server's in turn."""

    def __init__(self, rank, serialize=None):
        self.outgoing = queue.Queue()
        if serialize is None:
            exchange = rank.stub.Exchange
        else:
            exchange = rank.channel.stream_stream("/precondor.v1.PreconditionService/Exchange", serialize,
                                                  pb.precondition_pb2.ExchangeResponse.FromString)
        self.call = exchange(iter(self.outgoing.get, None), timeout=TIMEOUT_S)
        credit = self.read()
        assert credit.header.kind == pb.precondition_pb2.FRAME_KIND_CREDIT and credit.credit_bytes > 0, credit

    def read(self):
        return next(self.call)

    def send(self, header, payload, chunk_bytes=CHUNK_BYTES):
        for offset in range(0, max(len(payload), 1), chunk_bytes):
            chunk = pb.precondition_pb2.FrameHeader()
            chunk.CopyFrom(header)
            chunk.chunk_offset = offset
            self.outgoing.put(pb.precondition_pb2.ExchangeRequest(
                header=chunk, payload=payload[offset:offset + chunk_bytes]))

    def answer(self, wanted):
        """Reads until the RESULT of `wanted` is whole; (decision, version, bytes) and the acknowledgements on the way."""
        p = pb.precondition_pb2
        acks, parts = [], b""
        while True:
            frame = self.read()
            key = (frame.header.session_id, frame.header.epoch, frame.header.step, frame.header.layer, frame.header.rank)
            assert key == (wanted.session_id, wanted.epoch, wanted.step, wanted.layer, wanted.rank), frame.header
            if frame.header.kind == p.FRAME_KIND_ACK:
                acks.append((frame.contribution, frame.duplicate))
                continue
            assert frame.header.kind == p.FRAME_KIND_RESULT, frame
            assert frame.header.chunk_offset == len(parts), "chunks come in order"
            parts += frame.payload
            if len(parts) == frame.header.payload_bytes:
                return (frame.outcome.decision, frame.outcome.factor_version, parts), acks

    def close(self):
        """Half-closes; the server has nothing more to say and ends the call."""
        self.outgoing.put(None)
        rest = list(self.call)
        assert not rest, rest
        assert self.call.code() == grpc.StatusCode.OK, self.call.details()


def payload_first(request):
    """Returns bytes that no generated code writes and every reader has to take: the payload before the header, and a field of a
    later release (number 1000, varint) at the end."""
    kind = type(request)
    return (kind(payload=request.payload).SerializeToString() + kind(header=request.header).SerializeToString()
            + b"\xc0\x3e\x01")


class InteropTest(unittest.TestCase):
    server = None
    arguments = None

    def setUp(self):
        self.control = grpc.insecure_channel(self.server.address)
        self.sessions = pb.session_pb2_grpc.SessionServiceStub(self.control)

    def tearDown(self):
        self.control.close()

    def open(self, name):
        return self.sessions.OpenSession(pb.session_pb2.OpenSessionRequest(spec=spec(name)), timeout=TIMEOUT_S)

    def join(self, name):
        """All ranks of the session, joined and active."""
        joined = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(joined) < WORLD_SIZE or not all(j.active for j in joined.values()):
            self.assertLess(time.monotonic(), deadline, "never active")
            for rank in range(WORLD_SIZE):
                joined[rank] = self.sessions.JoinSession(
                    pb.session_pb2.JoinSessionRequest(name=name, rank=rank, incarnation=rank + 1), timeout=TIMEOUT_S)
        assignments = joined[0].shard_map.assignments
        self.assertEqual([list(a.layers) for a in assignments], [list(range(len(LAYERS)))])
        return [Rank(assignments[0].address, rank, joined[rank]) for rank in range(WORLD_SIZE)]

    def report(self, ranks, step):
        for rank in ranks:
            reply = self.sessions.ReportStep(pb.session_pb2.ReportStepRequest(
                session_id=rank.joined.session_id, epoch=rank.joined.epoch, rank=rank.rank, incarnation=rank.rank + 1,
                step=step, loss=1.0, samples=SAMPLES[rank.rank], finite=True, secret=rank.joined.secret), timeout=TIMEOUT_S)
            self.assertGreater(reply.directive.lease_through_step, step)
            self.assertEqual(reply.directive.epoch, rank.joined.epoch)

    def close(self, name):
        self.assertTrue(self.sessions.CloseSession(pb.session_pb2.CloseSessionRequest(name=name)).existed)

    def cpp_answers(self):
        """[step][layer] -> (decision, version, bytes), by the C++ client."""
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "answers"
            done = subprocess.run([self.arguments.cpp_client, self.server.address, "interop-cpp", str(output)],
                                  capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            data = output.read_bytes()
        answers, begin = [[] for _ in range(STEPS)], 0
        for line in done.stdout.splitlines():
            step, layer, decision, version = line.split()
            size = 4 * LAYERS[int(layer)][1] * LAYERS[int(layer)][2]
            decision = pb.common_pb2.Decision.Value(f"DECISION_{decision}")
            answers[int(step)].append((decision, int(version), data[begin:begin + size]))
            begin += size
        self.assertEqual(begin, len(data))
        return answers

    def stream_answers(self, ranks, step, serialize):
        """[rank][layer] -> answer, over one stream a rank at the same time."""

        def one(rank):
            stream = Stream(rank, serialize)
            answers = []
            for layer in range(len(LAYERS)):
                stream.send(*rank.statistics(step, layer))
                header, payload = rank.gradient(step, layer)
                stream.send(header, payload)
                answer, acks = stream.answer(header)
                p = pb.precondition_pb2
                self.assertEqual(acks, [(p.FRAME_KIND_STATISTICS, False), (p.FRAME_KIND_GRADIENT, False)])
                answers.append(answer)
            stream.close()
            return answers

        with concurrent.futures.ThreadPoolExecutor(WORLD_SIZE) as pool:
            return list(pool.map(one, ranks))

    def test_answers_equal_the_cpp_clients(self):
        expected = self.cpp_answers()
        self.assertTrue(self.open("interop-python").created)
        ranks = self.join("interop-python")
        for step, serialize in enumerate((None, payload_first)):
            answers = self.stream_answers(ranks, step, serialize)
            for layer in range(len(LAYERS)):
                with self.subTest(step=step, layer=layer):
                    self.assertEqual(answers[0][layer], answers[1][layer], "all ranks get the same bytes")
                    decision, version, data = answers[0][layer]
                    self.assertEqual(decision, pb.common_pb2.DECISION_PRECONDITIONED)
                    self.assertEqual((decision, version), expected[step][layer][:2])
                    self.assertEqual(data, expected[step][layer][2], "bit by bit")
                    self.check_plausible(data, ranks, step, layer)
            self.report(ranks, step)
        self.close("interop-python")

    def check_plausible(self, data, ranks, step, layer):
        """The answer is finite, has the averaged gradient's norm (NORM_RESCALE) and is not that gradient."""
        answer = np.frombuffer(data, "<f4").astype(np.float64)
        gradients = [np.frombuffer(rank.gradient(step, layer)[1], "<f4").astype(np.float64) for rank in ranks]
        mean = sum(s * g for s, g in zip(SAMPLES, gradients)) / sum(SAMPLES)
        self.assertTrue(np.isfinite(answer).all())
        np.testing.assert_allclose(np.linalg.norm(answer), np.linalg.norm(mean), rtol=1e-4)
        self.assertGreater(np.linalg.norm(answer - mean), 1e-3 * np.linalg.norm(mean))

    def test_errors_carry_their_detail(self):
        c = pb.common_pb2
        self.open("interop-errors")
        other = spec("interop-errors")
        other.inv_freq = 3
        with self.assertRaises(grpc.RpcError) as raised:
            self.sessions.OpenSession(pb.session_pb2.OpenSessionRequest(spec=other), timeout=TIMEOUT_S)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        detail = detail_of(raised.exception)
        self.assertEqual(detail.reason, c.ERROR_REASON_SPEC_MISMATCH)
        self.assertIn("inv_freq", detail.message)
        self.assertEqual(detail.message, raised.exception.details())
        ranks = self.join("interop-errors")
        ranks[0].joined.session_id += 1
        with self.assertRaises(grpc.RpcError) as raised:
            self.report(ranks, 0)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.NOT_FOUND)
        self.assertEqual(detail_of(raised.exception).reason, c.ERROR_REASON_UNKNOWN_SESSION)
        self.close("interop-errors")

    def test_health_and_reflection_answer(self):
        # Their protos are not on every machine: the few bytes of the messages are written out.
        check = self.control.unary_unary("/grpc.health.v1.Health/Check")
        self.assertEqual(check(b"", timeout=TIMEOUT_S), b"\x08\x01", "status: SERVING")
        reflect = self.control.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        answer = next(reflect(iter([b"\x3a\x00"]), timeout=TIMEOUT_S))  # list_services: ""
        for service in ("SessionService", "PreconditionService", "AdminService"):
            self.assertIn(b"precondor.v1." + service.encode(), answer)
        self.assertNotIn(b"precondor.v1.ShardService", answer, "role all has its shard in the process")

    def test_defaults_come_back_filled_in(self):
        c = pb.common_pb2
        reply = self.sessions.OpenSession(pb.session_pb2.OpenSessionRequest(spec=c.SessionSpec(
            name="interop-defaults", world_size=3, layers=[c.Layer(name="w", d_out=2, d_in=3)])), timeout=TIMEOUT_S)
        got = reply.spec
        self.assertEqual((got.exchange, got.statistics, got.sketches), (c.EXCHANGE_MODE_DIRECT, c.STATISTICS_KIND_SIGNED, 6))
        self.assertEqual((got.inv_freq, got.warmup_steps), (10, 10))
        self.assertEqual((got.statistics_dtype, got.gradient_dtype), (c.DATA_TYPE_F16, c.DATA_TYPE_F32))
        self.assertEqual(got.method.WhichOneof("method"), "mkor")
        self.close("interop-defaults")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("--server", "--cpp-client", "--protoc", "--grpc-plugin"):
        parser.add_argument(name, required=True)
    InteropTest.arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate_stubs(InteropTest.arguments.protoc, InteropTest.arguments.grpc_plugin, folder)
        InteropTest.server = Server(InteropTest.arguments.server, folder)
        try:
            result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
        finally:
            status = InteropTest.server.stop()
    if status != 0:
        print(f"the server ended with {status} on SIGTERM")
    sys.exit(0 if result.wasSuccessful() and status == 0 else 1)


if __name__ == "__main__":
    main()
