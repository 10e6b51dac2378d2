#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The package precondor against a server of its own: training, errors, threads, forks and signals.

Programs that a test wants a process for are in client_programs.py.
"""

import concurrent.futures
import ctypes
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import numpy as np

import precondor
from precondor.server import path_of
from interop_test import ROOT, Server, TIMEOUT_S, write_stubs
from client_training import EXCHANGES, reference, train
import test_program

HERE = pathlib.Path(__file__).resolve().parent


def spec(name, **changes):
    return precondor.SessionSpec(**{"name": name, "layers": [precondor.Layer("fc", 2, 3)], **changes})


def run_program(name, *arguments, python=sys.executable):
    """One of client_programs.py, in a process that has to end by itself."""
    return subprocess.run([python, "-B", HERE / "client_programs.py", name, *map(str, arguments)], capture_output=True,
                          text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)


class ClientTest(unittest.TestCase):
    server_program = None
    server = None
    stubs = None

    def setUp(self):
        self.client = self.enterContext(precondor.Client(self.server.address))
        self.name = self.id().rsplit(".", 1)[-1][:100]

    def open(self, **changes):
        session = self.client.open_session(spec(self.name, **changes))
        self.addCleanup(session.close)
        return session

    def worker(self, **changes):
        return self.enterContext(self.open(**changes).join())

    # --- training -----------------------------------------------------------------------------------------------------

    def expect_reference(self, losses, weights, world_size):
        wanted_losses, wanted_weights = reference(world_size)
        # Numbers near 1, and J's condition is at most 1 + d: some ten of f32's 6e-8 a step, for 30 steps.
        tolerance = 2e-5
        np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=tolerance)
        test_program.expect_close(weights, wanted_weights, tolerance)
        self.assertLess(wanted_losses[-1], 0.5 * wanted_losses[0], "the problem is solvable, so a wrong answer shows")

    def test_trajectory_is_that_of_the_formula(self):
        losses, weights = train(self.server.address, self.name, 0, 1, "DIRECT", None)
        self.addCleanup(self.client.close_session, self.name)
        self.expect_reference(losses, weights, 1)

    def test_two_processes_get_the_trajectory_of_the_formula_in_both_exchanges(self):
        context = multiprocessing.get_context("spawn")
        for exchange in EXCHANGES:
            with self.subTest(exchange=exchange), context.Pool(2) as pool:
                name = f"{self.name[:60]}-{exchange}"
                # The place of an allreduce in a job: the two ranks' ends of a pipe.
                ends = context.Pipe()
                runs = [pool.apply_async(train, (self.server.address, name, rank, 2, exchange, ends[rank]))
                        for rank in range(2)]
                for losses, weights in [run.get(TIMEOUT_S) for run in runs]:
                    self.expect_reference(losses, weights, 2)
                self.assertTrue(self.client.close_session(name))

    def test_workers_with_factors_leave_the_process_blas_alone_and_round_as_the_server_does(self):
        blas = ctypes.CDLL("libopenblas.so.0")  # that of Debian's NumPy
        self.addCleanup(blas.openblas_set_num_threads, blas.openblas_get_num_threads())
        random = np.random.default_rng(3)
        d_out, d_in = 160, 384  # beyond what OpenBLAS leaves to one thread
        steps = [[random.standard_normal(shape, np.float32) for shape in ((8, d_in), (8, d_out), (d_out, d_in))] for _ in range(4)]

        def answers(exchange, representation):
            session = self.client.open_session(precondor.SessionSpec(
                f"blas-{representation}-{exchange}", [precondor.Layer("fc", d_out, d_in)],
                precondor.Method("mkor", {"representation": representation}), exchange=exchange))
            with session.join() as worker:
                for step, (x, dy, gradient) in enumerate(steps):
                    worker.send_statistics(step, 0, worker.compute_statistics(step, 0, "input", x),
                                           worker.compute_statistics(step, 0, "output", dy), len(x))
                    yield worker.precondition(step, 0, gradient, len(x)).result()
                    worker.report_step(step, 0.0, len(x), 0.1)
            session.close()

        for representation in ("DENSE", "LOW_RANK"):
            wanted = list(answers("DELEGATE", representation))
            for exchange in ("REPLAY", "PULL_FACTORS"):
                blas.openblas_set_num_threads(3)
                for step, (got, served) in enumerate(zip(answers(exchange, representation), wanted)):
                    with self.subTest(representation=representation, exchange=exchange, step=step):
                        self.assertEqual(blas.openblas_get_num_threads(), 3)
                        self.assertEqual(got.decision, "PRECONDITIONED")
                        np.testing.assert_array_equal(got.gradient, served.gradient)

    def test_results_may_go_to_the_gradient_and_to_rows_with_gaps(self):
        worker = self.worker(method="identity")
        gradient = np.arange(6, dtype=np.float32).reshape(2, 3)
        answer = worker.precondition(0, 0, gradient, 1, out=gradient).result()
        self.assertIs(answer.gradient, gradient)
        wide = np.zeros((2, 5), np.float32)
        worker.report_step(0, 1.0, 1, 0.1)
        answer = worker.precondition(1, 0, np.asfortranarray(gradient.astype(np.float64)), 1, out=wide[:, 1:4]).result()
        self.assertEqual(answer.decision, "IDENTITY")
        np.testing.assert_array_equal(wide, np.pad(np.arange(6).reshape(2, 3), ((0, 0), (1, 1))))

    def test_says_skip_for_everybody_who_cannot_use_the_step(self):
        worker = self.worker(method="identity")
        self.assertEqual(worker.precondition(0, 0, np.full((2, 3), np.nan), 1).result().decision, "SKIP")
        worker.report_step(0, 1.0, 1, 0.1, finite=False)
        answer = worker.abstain_gradient(1, 0).result()
        self.assertEqual((answer.decision, answer.gradient), ("SKIP", None))

    def test_tells_when_the_factors_are_of_a_later_step(self):
        session = self.open(method="identity")
        for first_step, steps, wanted in ((0, 6, None), (5, 3, None), (2, 1, 2), (2, 3, 2), (5, 1, 2)):
            worker = self.enterContext(session.join(first_step=first_step))
            self.assertEqual(worker.rollback_step, wanted, first_step)
            for step in range(first_step, first_step + steps):
                worker.precondition(step, 0, np.ones((2, 3), np.float32), 1).result()
                worker.report_step(step, 1.0, 1, 0.1)
            worker.close()

    def test_describes_itself(self):
        method = precondor.Method("mkor", {"rank": 8, "gamma": 0.9, "representation": "LOW_RANK"})
        wanted = spec(self.name, method=method, sketches=3, seed=9, inv_freq=4, warmup_steps=1, fallback=precondor.Fallback("AT_STEP", at_step=7))
        session = self.client.open_session(wanted)
        self.addCleanup(session.close)
        self.assertTrue(session.created)
        found = self.client.open_session(wanted)
        self.assertEqual((session.unused, found.created, found.unused), (True, False, True))
        worker = self.enterContext(session.join())
        self.assertFalse(self.client.open_session(wanted).unused)
        self.assertEqual(worker.spec.method.options["rank"], 8)
        self.assertEqual((worker.spec.seed, worker.spec.inv_freq, worker.spec.fallback), (9, 4, wanted.fallback))
        self.assertEqual(worker.spec.layers, (precondor.Layer("fc", 2, 3),))
        self.assertEqual([worker.needs_statistics(step, 0) for step in range(6)], [True, False, False, False, True, False])
        self.assertEqual((worker.rank, worker.mode(0), worker.sends_gradient(0)), (0, "SECOND_ORDER", True))
        before = worker.status().traffic["gradient_bytes"]
        for step in range(7):
            if worker.needs_statistics(step, 0):
                worker.abstain_statistics(step, 0)
            self.assertTrue(worker.precondition(step, 0, np.ones((2, 3)), 1).wait())
            directive = worker.report_step(step, 1.0, 1, 0.1)
        self.assertGreaterEqual(worker.status().traffic["gradient_bytes"] - before, 7 * 6 * 4)
        self.assertEqual(directive.next_mode, "FIRST_ORDER")
        worker.flush()
        self.assertEqual(worker.status().lost_updates, {})
        worker.close(leave=True)
        self.expect(precondor.FailedPreconditionError, "has been closed", worker.flush)

    def test_certificates_are_not_made_of_names_that_are_wrong(self):
        with tempfile.TemporaryDirectory() as folder:
            for wrong in (["ca"], ["good", "a/b"], ["a b"], ["a,,b"], ["--days=0", "a"]):
                options = [one for one in wrong if one.startswith("--")]
                made = subprocess.run([ROOT / "deploy" / "certificates.sh", *options, folder, *wrong[len(options):]],
                                      capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
                self.assertEqual(made.returncode, 2, wrong)
                self.assertIn("expected", made.stderr)
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])

    def test_trains_over_tls_by_the_recipe_of_the_documents(self):
        with tempfile.TemporaryDirectory() as folder:
            files = pathlib.Path(folder)
            subprocess.run([ROOT / "deploy" / "certificates.sh", files, "server,localhost,127.0.0.1", "job-a", "job-b"],
                           check=True, timeout=TIMEOUT_S)
            (files / "access").write_text("worker@job name job-a\nworker@job token a-token-of-this-test\n", encoding="utf-8")
            (files / "token").write_text("a-token-of-this-test\n", encoding="utf-8")
            server = Server(self.server_program, folder, f"--tls-cert={files}/server.pem", f"--tls-key={files}/server.key",
                            f"--tls-client-ca={files}/ca.pem", f"--access-file={files}/access")
            self.addCleanup(server.stop)

            def options(name, **more):
                return precondor.ClientOptions(security=precondor.Security(
                    tls_ca=f"{files}/ca.pem", tls_cert=f"{files}/{name}.pem", tls_key=f"{files}/{name}.key", **more))
            with precondor.Client(server.address, options("job-a")) as client:
                with client.open_session(spec(self.name, method="identity")).join() as worker:
                    answer = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1).result()
                    np.testing.assert_array_equal(answer.gradient, np.ones((2, 3)))
            with precondor.Client(server.address, options("job-b", token_file=f"{files}/token")) as client:
                self.assertTrue(client.close_session(self.name))
            self.expect(precondor.UnauthenticatedError, "role .*, got .* a certificate of job-b, which is not listed.*access file",
                        lambda: precondor.Client(server.address, options("job-b")))
            self.expect(precondor.UnavailableError, "the server may expect TLS",
                        lambda: precondor.Client(server.address, precondor.ClientOptions(connect_timeout=0.3)))
            self.expect(precondor.NotFoundError, "cannot read .*/job-c.pem: No such file",
                        lambda: precondor.Client(server.address, options("job-c")))

    def listed(self):
        """The sessions as a stock client has the server list them, by name."""
        import grpc
        from precondor.v1 import admin_pb2, admin_pb2_grpc
        with grpc.insecure_channel(self.server.address) as channel:
            reply = admin_pb2_grpc.AdminServiceStub(channel).ListSessions(admin_pb2.ListSessionsRequest(),
                                                                          timeout=TIMEOUT_S)
        return {session.spec.name: session.spec for session in reply.sessions}

    def sent(self, name):
        """(method, options) as the server has them: the fields that are present."""
        config = self.listed()[name].method
        method = config.WhichOneof("method")
        return method, {field.name: value for field, value in getattr(config, method).ListFields()}

    def test_options_of_every_type_reach_the_server(self):
        for name, method, options in (("plain", "mkor", {"rank": 8, "gamma": 0.5, "representation": "DENSE"}),
                                      ("numpys", "mkor", {"rank": np.int64(8), "gamma": np.float32(0.5), "representation": np.str_("DENSE")}),
                                      ("flag", "kfac", {"prediv": True}), ("numpys-flag", "kfac", {"prediv": np.True_}), ("none", "kron", {})):
            with self.subTest(name=name):
                session = self.client.open_session(spec(name, method=precondor.Method(method, options)))
                self.addCleanup(session.close)
                self.assertEqual(self.sent(name), (method, options))
                self.assertEqual(self.enterContext(session.join()).spec.method, precondor.Method(method, options))

    # --- statistics -----------------------------------------------------------------------------------------------------

    def test_statistics_are_those_of_the_rows(self):
        rows = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)

        def statistics(rows, row_scale=1.0, **changes):
            session = self.open(**changes)
            with session.join() as worker:
                got = worker.compute_statistics(0, 0, "input", rows, row_scale)
            session.close()
            return got

        mean = statistics(rows, statistics="MEAN")
        np.testing.assert_allclose(mean, rows.mean(axis=0, dtype=np.float64, keepdims=True), atol=1e-6)
        packed = statistics(rows, 2, method="kfac", statistics="COVARIANCE")
        moment = 4 * rows.astype(np.float64).T @ rows / 50
        np.testing.assert_allclose(packed[0], moment[np.tril_indices(3)], rtol=1e-5, atol=1e-6)
        # One row leaves nothing but its sign.
        signed = statistics(rows[:1], 3, sketches=16)
        self.assertEqual(signed.shape, (16, 3))
        np.testing.assert_allclose(np.abs(signed), np.tile(3 * np.abs(rows[0]), (16, 1)), rtol=1e-6)
        worker = self.worker(sketches=3)
        signs = np.hstack([worker.sketch(2, 0, "input").signs(*part) for part in ((0, 31), (31, 19))])
        np.testing.assert_allclose(signs @ rows / np.sqrt(50), worker.compute_statistics(2, 0, "input", rows), atol=1e-6)
        self.expect(precondor.InvalidArgumentError, "at least one row", worker.sketch(2, 0, "input").signs, 0, 0)
        for first, last in ((0, 31), (31, 50)):
            sums = worker.sketch(2, 0, "input").sums(first, rows[first:last], ones=True)
            wanted = signs[:, first:last] @ np.hstack([rows[first:last], np.ones((last - first, 1))])
            np.testing.assert_allclose(sums, wanted, atol=1e-5)
        self.assertEqual(worker.sketch(2, 0, "input").sums(0, rows).shape, (3, 3))
        self.expect(precondor.InvalidArgumentError, "at least one row", worker.sketch(2, 0, "input").sums, 0, rows[:0])
        self.assertAlmostEqual(precondor.kl_clip_scale(np.array([3.0, 1.0]), 0.1, 0.01), 0.5)

    # --- errors ---------------------------------------------------------------------------------------------------------

    def expect(self, kind, pattern, call, *arguments, reason=None, **options):
        with self.assertRaises(kind) as caught:
            call(*arguments, **options)
        self.assertRegex(str(caught.exception), pattern)
        if reason is not None:
            self.assertEqual(caught.exception.reason, reason)
        return caught.exception

    def test_nobody_at_the_address(self):
        error = self.expect(precondor.UnavailableError, r"server 127\.0\.0\.1:1: no answer within .*Check the address",
                            precondor.Client, "127.0.0.1:1", precondor.ClientOptions(connect_timeout=0.2))
        self.assertEqual(error.code, "UNAVAILABLE")
        self.assertIsInstance(error, ConnectionError)

    def test_no_proxy_of_the_environment_is_dialled(self):
        """Neither by a client nor by a coordinator that dials a shard."""
        nowhere = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:1")
        with mock.patch.dict(os.environ, nowhere), tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            shard = Server(self.server_program, one, "--role=shard")
            self.addCleanup(shard.stop)
            coordinator = Server(self.server_program, other, "--role=coordinator", f"--shards={shard.address}")
            self.addCleanup(coordinator.stop)
            with precondor.Client(coordinator.address) as client, client.open_session(spec(self.name, method="identity")).join() as worker:
                np.testing.assert_array_equal(worker.precondition(0, 0, np.ones((2, 3)), 1).result().gradient, np.ones((2, 3)))

    def test_a_server_of_another_kind_or_version(self):
        import concurrent.futures
        import grpc
        other = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        self.addCleanup(other.stop, None)
        self.expect(precondor.UnimplementedError, "no Precondor server, or one of another version", precondor.Client,
                    f"127.0.0.1:{port}")

    def test_session_name_taken_or_model_changed(self):
        self.open()
        error = self.expect(precondor.FailedPreconditionError, "name is taken .* model",
                            self.client.open_session, spec(self.name, layers=[precondor.Layer("fc", 2, 4)]),
                            reason="SPEC_MISMATCH")
        self.assertRegex(error.message, f"{self.name}.*d_in|{self.name}.*layer")

    def test_descriptions_that_are_wrong(self):
        bad = precondor.InvalidArgumentError

        def mkor(options):
            return {"method": precondor.Method("mkor", options)}

        for pattern, changes in [("exchange: expected one of DIRECT, DELEGATE.*'ring'", {"exchange": "ring"}),
                                 (r"layers\[0\]\.d_in: expected an int.*'x'", {"layers": [precondor.Layer("fc", 2, "x")]}),
                                 ("world_size: expected an int that fits", {"world_size": 1 << 40}),
                                 ("fallback: expected a precondor.Fallback, got {'beta': 1}", {"fallback": {"beta": 1}}),
                                 ("world_size.*got 0", {"world_size": 0}),
                                 ('method.mkor: expected one of clip, .* storage, zeta, got "ranks"', mkor({"ranks": 3})),
                                 ("method.mkor.rank: expected a whole number of 32 bits, got 2.5", mkor({"rank": 2.5})),
                                 ("method.mkor.rank: expected a whole number .*, got true", mkor({"rank": True})),
                                 ("method.mkor.products: expected a string, got true", mkor({"products": True})),
                                 ("option products: expected F32, BF16, TF32, got \"16\"", mkor({"products": 16})),
                                 ("option products: expected F32, BF16, TF32, got \"f32\"", mkor({"products": "f32"})),
                                 ("method.options.rank: expected a bool, a number or a str, got None", mkor({"rank": None})),
                                 (r"method.options.rank: expected a bool, a number or a str, got \[8\]", mkor({"rank": [8]})),
                                 ("method.options.rank: expected a bool, a number or a str", mkor({"rank": 10 ** 400})),
                                 ("method.options: expected names of type str, got 3", mkor({3: 3}))]:
            with self.subTest(pattern=pattern):
                self.expect(bad, pattern, self.client.open_session, spec(self.name, **changes))
        self.expect(precondor.NotFoundError, "Open the session first", self.client.join, "nowhere", reason="UNKNOWN_SESSION")

    def test_arguments_of_other_types_are_named(self):
        client, options, security, address = precondor.Client, precondor.ClientOptions, precondor.Security, self.server.address
        worker = self.worker(method="identity")
        ones = np.ones((2, 3), np.float32)

        def opened(**changes):
            return lambda: self.client.open_session(spec(self.name, **changes))

        for call, pattern in (
                (lambda: client(None), "address: expected a str, got None"), (lambda: client(7070), "address: .*7070"),
                (lambda: options(connect_timeout="3"), "client.connect_timeout: expected a number of at least 0, got '3'"),
                (lambda: options(connect_timeout=float("nan")), "client.connect_timeout: .*nan"),
                (lambda: options(result_timeout=-1), "client.result_timeout: .*-1"), (lambda: options(traceparent=1), "client.traceparent: .* 1"),
                (lambda: options(security="ca.pem"), "client.security: expected a precondor.Security, got 'ca.pem'"),
                (lambda: options(replace="no"), "client.replace: expected a bool, got 'no'"),
                (lambda: client(address, {"rpc_timeout": 3}), "options: expected a precondor.ClientOptions, got "),
                (lambda: client(address, options(replace=True)), "options: expected replace and local_memory with their defaults"),
                (lambda: client(address, options(local_memory="1GiB")), "options: expected replace and local_memory"),
                (lambda: precondor.Statistics("SIGNED", 16), "statistics.mean_positions: expected a bool, got 16"),
                (lambda: precondor.Statistics(inv_freq=0), r"statistics.inv_freq: expected a whole number of 1 \.\.\. 2147483647, got 0"),
                (lambda: precondor.Statistics(sketches="4"), "statistics.sketches: .*'4'"),
                (lambda: precondor.Statistics(warmup_steps=-1), "statistics.warmup_steps: .*-1"),
                (lambda: precondor.Statistics(kind=None), "statistics.kind: .*None"), (lambda: precondor.Statistics(dtype=16), "statistics.dtype: .*16"),
                (lambda: precondor.Fallback(policy=3), "fallback.policy: expected a str, got 3"),
                (lambda: precondor.Fallback("AT_STEP", at_step=-1), "fallback.at_step: .*-1"),
                (lambda: precondor.Fallback(beta="x"), "fallback.beta: expected a number, got 'x'"),
                (lambda: precondor.Fallback(min_steps=1.5), "fallback.min_steps: .*1.5"),
                (lambda: precondor.Selection(skip_types=["Linear"]), "selection.skip_types: expected classes of modules, got 'Linear'"),
                (lambda: precondor.Selection(skip_types=3), "selection.skip_types: .* 3"), (lambda: precondor.Selection(min_dim="x"), "selection.min_dim: .*'x'"),
                (lambda: precondor.Selection(fold_bias="no"), "selection.fold_bias: expected a bool, got 'no'"),
                (lambda: precondor.Selection(experts="foo"), "selection.experts: expected one of kron, soap, muon, .* got foo"),
                (lambda: precondor.Selection(embeddings=3), "selection.embeddings: .* got 3"),
                (lambda: precondor.Selection(blocks=3), "selection.blocks: expected a dict, got 3"),
                (lambda: precondor.Selection(blocks={"(": 3}), r"selection.blocks: expected a regular expression, got '\('"),
                (lambda: precondor.Selection(blocks={"qkv": []}), r"selection.blocks: 'qkv': expected a whole number of 1 \.\.\. 2147483647, got \[\]"),
                (lambda: precondor.Selection(blocks={"qkv": [4, 0]}), "selection.blocks: 'qkv': .* got 0"),
                (lambda: precondor.Selection(blocks={"qkv": "heads"}), "selection.blocks: 'qkv': .* got 'heads'"),
                (lambda: security(tls_ca=3), "Security: tls_ca: expected a path"), (lambda: self.client.open_session("x"), "spec: .*'x'"),
                (lambda: self.client.join(self.name, rank=-1), r"rank: expected a whole number of 0 \.\.\. 4294967295, got -1"),
                (lambda: worker.precondition(-1, 0, ones, 1), "step: .*-1"), (lambda: worker.precondition(0, "0", ones, 1), "layer: .*'0'"),
                (lambda: worker.send_statistics(0, 0, ones, ones, samples=-1), "samples: .*got -1$"),
                (lambda: worker.precondition(0, 0, ones, samples=ones), r"samples: .*got ndarray of float32, of shape \[2, 3\]$"),
                (lambda: worker.sketch(0, "0", "input"), "layer: .*'0'"), (lambda: worker.sketch(0, 0, "input").signs(-1, 3), "first_row: .*-1"),
                (lambda: worker.report_step(0, None, 1, 0.1), "loss: expected a number, got None"),
                (opened(method=None), "method: expected a name or a precondor.Method, got None"), (opened(method={"name": "mkor"}), "method: "),
                (opened(method=precondor.Method("mkor", None)), "method.options: expected a dict, got None"),
                (opened(layers=[("fc", 2, 3)]), r"layers\[0\]: expected a precondor.Layer, got \('fc', 2, 3\)"), (opened(layers=3), "layers: .*3"),
                (opened(layer_methods=["mkor"]), r"layer_methods\[0\]: expected a precondor.LayerMethod"), (opened(fallback="LOSS_RATE"), "fallback: ")):
            with self.subTest(pattern=pattern):
                self.expect(precondor.InvalidArgumentError, f"^{pattern}", call)
        with self.assertRaisesRegex(TypeError, "samples"):
            worker.precondition(0, 0, ones)
        self.enterContext(client(address, options(security=None)))
        self.expect(precondor.NotFoundError, "cannot read .*nothing", client, "127.0.0.1:1",
                    options(connect_timeout=1, security=security(tls_ca=pathlib.Path("/nothing"))))

    def test_a_rank_that_another_process_takes(self):
        session = self.open(method="identity")
        first, _ = self.enterContext(session.join()), self.enterContext(session.join())
        self.expect(precondor.FailedPreconditionError, "A newer process has this rank", first.report_step, 0, 1.0, 1, 0.1,
                    reason="STALE_INCARNATION")

    def test_arrays_that_are_wrong(self):
        worker = self.worker()
        bad = precondor.InvalidArgumentError
        good = np.ones((2, 3), np.float32)
        self.expect(bad, "gradient: expected a NumPy array", worker.precondition, 0, 0, [[1.0]], 1)
        self.expect(bad, "gradient: .*two dimensions, got float64 of shape \\(3,\\)", worker.precondition, 0, 0, np.ones(3), 1)
        self.expect(bad, "gradient: .*complex", worker.precondition, 0, 0, good * 1j, 1)
        self.expect(bad, "out: expected a float32", worker.precondition, 0, 0, good, 1, out=np.ones((2, 3)))
        self.expect(bad, "out: .*without gaps", worker.precondition, 0, 0, good, 1, out=np.ones((3, 2), np.float32).T)
        frozen = good.copy()
        frozen.flags.writeable = False
        self.expect(bad, "out: expected a writable", worker.precondition, 0, 0, good, 1, out=frozen)
        future = worker.precondition(0, 0, good.T, 1)
        self.expect(bad, r"gradient: expected.*\[2, 3\].*\[3, 2\]", future.result)
        self.expect(bad, "side: expected input or output", worker.compute_statistics, 0, 0, "left", good)
        self.expect(bad, r"rows: expected \[n, 3\].*got \[2, 2\]", worker.compute_statistics, 0, 0, "input", good[:, :2],
                    reason="SHAPE_MISMATCH")
        self.expect(bad, "a: expected", worker.send_statistics, 0, 0, good, good, 1)
        for call in (worker.needs_statistics, lambda step, layer: worker.sends_gradient(layer)):
            self.expect(precondor.NotFoundError, r"layer in \[0, 1\), got 7", call, 0, 7, reason="UNKNOWN_LAYER")

    def test_waits_end_at_their_deadlines(self):
        impatient = self.enterContext(precondor.Client(self.server.address, precondor.ClientOptions(join_timeout=0.2, result_timeout=0.3)))
        session = self.open(world_size=2, method="identity")
        self.expect(precondor.DeadlineExceededError, "not every other rank within", impatient.join, self.name, 0)
        both = []
        other = threading.Thread(target=lambda: both.append(session.join(1)))
        other.start()
        worker = self.enterContext(precondor.Client(self.server.address, precondor.ClientOptions(result_timeout=0.3)).join(self.name, 0))
        other.join(TIMEOUT_S)
        self.enterContext(both[0])
        future = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1)
        self.assertFalse(future.wait(0))
        self.expect(TimeoutError, f"session {self.name} step 0 layer 0", future.result)

    def test_a_time_out_names_the_ranks_that_are_missing(self):
        session = self.open(world_size=3, method="muon", layers=[precondor.Layer("fc", 2, 3), precondor.Layer("head", 2, 3)])
        self.expect(precondor.DeadlineExceededError, r"rank 1 has joined, but .*; not joined: ranks 0, 2",
                    self.enterContext(precondor.Client(self.server.address, precondor.ClientOptions(join_timeout=0.05))).join, self.name, 1)
        client = self.enterContext(precondor.Client(self.server.address, precondor.ClientOptions(result_timeout=2)))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            workers = list(pool.map(lambda rank: client.join(self.name, rank), range(3)))
        gradient = np.ones((2, 3), np.float32)
        futures = [workers[0].precondition(0, 1, gradient, 1), workers[2].precondition(0, 0, gradient, 1)]
        for future, layer, missing in zip(futures, ("head", "fc"), ("ranks 1, 2", "ranks 0, 1")):
            errors = {str(self.expect(precondor.DeadlineExceededError, f"step 0 .* not answered within 2s; layer {layer} waits for {missing}$",
                                      future.result)) for _ in range(2)}
            self.assertEqual(len(errors), 1)
        for worker in workers:
            worker.close()
        session.close()

    def test_first_order_of_whole_updates_is_refused(self):
        """By the server: fallback= and precondorctl reach it."""
        refused = r"layer \"fc\" has the method muon, whose answers are whole updates; .*plain gradient descent"
        for method, methods in (("muon", []), ("mkor", [precondor.LayerMethod("muon", [0])])):
            options = {"method": method, "layer_methods": methods}
            self.expect(precondor.InvalidArgumentError, f"fallback: expected policy NEVER, got AT_STEP: {refused}", self.client.open_session,
                        spec(self.name, fallback=precondor.Fallback("AT_STEP", at_step=7), **options))
            session = self.client.open_session(spec(self.name, **options))
            for mode, status, said in (("second-order", 0, "^$"), ("first-order", 1, f"got FIRST_ORDER: {refused}"), ("auto", 0, "^$")):
                done = subprocess.run([path_of("precondorctl"), f"--server={self.server.address}", "mode", self.name, mode],
                                      capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertRegex(done.stderr, said)
            session.close()

    def test_what_is_closed_says_so(self):
        session = self.open(method="identity", world_size=1)
        worker = session.join()
        future = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1)
        future.wait()
        worker.close()
        worker.close()
        self.assertEqual(future.result().decision, "IDENTITY")
        self.expect(precondor.FailedPreconditionError, "the worker has been closed", worker.flush)
        other = precondor.Client(self.server.address)
        other.close()
        self.expect(precondor.FailedPreconditionError, "the client has been closed", other.open_session, spec("x"))

    # --- threads, processes, signals ------------------------------------------------------------------------------------

    def test_other_threads_run_while_a_call_waits(self):
        session = self.open(world_size=2, method="identity")
        answers = {}

        def rank_0():
            with session.join(0) as worker:  # waits for rank 1, which this thread's waiting must not keep from coming
                answers[0] = worker.precondition(0, 0, np.zeros((2, 3), np.float32), 1).result()
                worker.report_step(0, 1.0, 1, 0.1)

        thread = threading.Thread(target=rank_0, daemon=True)
        thread.start()
        with session.join(1) as worker:
            answers[1] = worker.precondition(0, 0, np.full((2, 3), 2, np.float32), 1).result()
            worker.report_step(0, 1.0, 1, 0.1)
            thread.join(TIMEOUT_S)
        self.assertFalse(thread.is_alive())
        for answer in answers.values():
            np.testing.assert_array_equal(answer.gradient, np.ones((2, 3)))

    def test_closing_ends_a_call_of_another_thread(self):
        session = self.open(world_size=2, method="identity")
        client = precondor.Client(self.server.address)
        errors = []

        def join():
            try:
                client.join(session.name, 0)
            except precondor.CancelledError as error:
                errors.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        client.close()
        thread.join(TIMEOUT_S)
        self.assertFalse(thread.is_alive())

    def expect_program(self, name, *arguments):
        done = run_program(name, *arguments)
        self.assertEqual((done.returncode, done.stdout.split()[-1:]), (0, ["passed"]), done.stdout + done.stderr)

    def test_a_forked_child_is_told(self):
        self.open(method="identity")
        self.expect_program("fork", self.server.address, self.name)

    def test_control_c_ends_a_wait(self):
        for call in ("connect", "join", "result"):
            with self.subTest(call=call):
                name = f"{self.name}-{call}"
                self.client.open_session(spec(name, world_size=2, method="identity"))
                self.addCleanup(self.client.close_session, name)
                self.expect_program(f"interrupt_{call}", self.server.address, name)
        with tempfile.TemporaryDirectory() as folder:
            self.expect_program("interrupt_report", self.server_program, folder)

    def test_a_process_ends_with_everything_open(self):
        self.open(method="identity")
        self.expect_program("leave_open", self.server.address, self.name)

    def test_other_users_of_protobuf_and_grpc_work_before_and_after(self):
        for first in ("theirs", "ours"):
            with self.subTest(first=first):
                name = f"{self.name[:80]}-{first}"
                self.client.open_session(spec(name, method="identity"))
                self.addCleanup(self.client.close_session, name)
                self.expect_program("beside", self.server.address, name, first, self.stubs)

    def test_one_symbol_leaves_the_extension(self):
        from precondor import _core
        done = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
        self.assertEqual([line.split()[-1] for line in done.stdout.splitlines()], ["PyInit__core"])
        self.assertNotIn("torch", subprocess.run(["ldd", _core.__file__], capture_output=True, text=True, check=True).stdout)

    def test_a_client_connects_to_a_server_that_starts_after_it(self):
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/socket"
            with subprocess.Popen([self.server_program, f"--listen={address}", "--log-level=error"]) as server:
                try:
                    # As long as one attempt to connect may take.
                    precondor.Client(address, precondor.ClientOptions(connect_timeout=3.0)).close()
                finally:
                    server.kill()

    # --- documentation --------------------------------------------------------------------------------------------------

    def test_the_manuals_example_runs(self):
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/use/python.md").read_text(), re.MULTILINE | re.DOTALL)
        self.assertEqual(len(blocks), 1)
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "example.py"
            program.write_text(blocks[0])
            done = subprocess.run([sys.executable, "-B", program, self.server.address], capture_output=True, text=True,
                                  timeout=TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(line) for line in done.stdout.split()]
        self.assertLess(losses[-1], 0.1 * losses[0])

    def test_everything_public_is_documented(self):
        for name in precondor.__all__:
            one = getattr(precondor, name)
            self.assertTrue(one.__doc__, name)
            for method, value in vars(one).items() if isinstance(one, type) else ():
                if not method.startswith("_") and callable(value):
                    self.assertTrue(value.__doc__, f"{name}.{method}")
        self.assertTrue((pathlib.Path(precondor.__file__).parent / "py.typed").exists())


if __name__ == "__main__":
    options = test_program.parse("--server", "--protoc", "--grpc-plugin")
    ClientTest.server_program = options.server

    def begin(server):
        ClientTest.server = server

    with tempfile.TemporaryDirectory() as ClientTest.stubs:
        write_stubs(options.protoc, options.grpc_plugin, ClientTest.stubs)
        precondor.__path__.append(f"{ClientTest.stubs}/precondor")  # generated code imports its modules from precondor.v1
        test_program.run_with_server(options.server, begin)
