#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs of client_test.py that need a process of their own; each ends with the line "passed".

client_programs.py NAME ADDRESS SESSION ...
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types

import numpy as np

DEADLINE_S = 30
GRADIENT = np.ones((2, 3), np.float32)


def step_with(worker, step):
    answer = worker.precondition(step, 0, GRADIENT, 1).result()
    np.testing.assert_array_equal(answer.gradient, GRADIENT)
    worker.report_step(step, 1.0, 1, 0.1)


def refused(call, *arguments):
    import precondor
    try:
        call(*arguments)
    except precondor.ForkError as error:
        assert f"forked from process {os.getppid()}" in str(error) and "spawn" in error.advice, error
        return
    raise AssertionError(f"{call} did not raise ForkError")


def in_child(address, client, worker, future):
    import precondor
    refused(worker.flush)
    refused(worker.precondition, 1, 0, GRADIENT, 1)
    refused(worker.report_step, 0, 1.0, 1, 0.1)
    refused(client.close_session, "x")
    refused(future.result)
    refused(precondor.Client, address)
    worker.close()
    client.close()


def fork(address, name):
    """A forked child is refused and ends by itself, and the parent goes on."""
    import precondor
    client = precondor.Client(address)
    worker = client.join(name)
    future = worker.precondition(0, 0, GRADIENT, 1)
    future.wait()
    child = os.fork()
    if child == 0:  # ends as a program does
        in_child(address, client, worker, future)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # As a DataLoader's worker.
    process = multiprocessing.get_context("fork").Process(target=in_child, args=(address, client, worker, future))
    process.start()
    process.join()
    assert process.exitcode == 0
    worker.report_step(0, 1.0, 1, 0.1)
    step_with(worker, 1)


def interrupt_when_in(function):
    """Sends SIGINT to this process once the main thread is in the package's function of that name."""
    main = threading.main_thread().ident

    def loop():
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            frame = sys._current_frames()[main]  # pylint: disable=protected-access
            if frame.f_code.co_name == function and "precondor" in frame.f_code.co_filename:
                os.kill(os.getpid(), signal.SIGINT)
                return
            os.sched_yield()

    threading.Thread(target=loop, daemon=True).start()


def interrupted(function, call):
    interrupt_when_in(function)
    try:
        call()
    except KeyboardInterrupt:
        return
    raise AssertionError(f"{function} was not interrupted")


def interrupt_connect(address, name):
    """Ctrl-C while a client waits for a server's first answer."""
    import precondor
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    interrupted("__init__", lambda: precondor.Client(f"127.0.0.1:{silent.getsockname()[1]}", precondor.ClientOptions(connect_timeout=600)))


def interrupt_join(address, name):
    """Ctrl-C while a rank waits for another; then a new client takes the rank's place."""
    import precondor
    interrupted("join", lambda: precondor.Client(address, precondor.ClientOptions(join_timeout=600)).join(name, 0))
    both(address, name)
    both(address, name)


def both(address, name):
    """Both ranks of a session."""
    import precondor
    workers = {}
    other = threading.Thread(target=lambda: workers.update({1: precondor.Client(address).join(name, 1)}))
    other.start()
    workers[0] = precondor.Client(address).join(name, 0)
    other.join()
    return workers


def interrupt_result(address, name):
    """Ctrl-C while an answer waits for another rank's gradient; then it is waited for again."""
    workers = both(address, name)
    future = workers[0].precondition(0, 0, GRADIENT, 1)
    interrupted("results", future.result)
    workers[1].precondition(0, 0, GRADIENT, 1)
    np.testing.assert_array_equal(future.result().gradient, GRADIENT)


def interrupt_report(server_program, folder):
    """Ctrl-C at the end of a lease that a dead coordinator does not prolong."""
    import precondor
    from interop_test import Server
    server = Server(server_program, folder, "--lease-steps=1")
    try:
        spec = precondor.SessionSpec("lease", [precondor.Layer("fc", 2, 3)], "identity")
        worker = precondor.Client(server.address).open_session(spec).join()
        end = worker.report_step(0, 1.0, 1, 0.1).lease_through_step
    finally:
        server.process.kill()
        server.process.wait()
    for step in range(1, end):
        worker.report_step(step, 1.0, 1, 0.1)
    interrupted("report_step", lambda: worker.report_step(end, 1.0, 1, 0.1))
    try:
        worker.flush()
    except precondor.CancelledError as error:
        assert "Join again" in error.advice, error
    else:
        raise AssertionError("the worker goes on")


def leave_open(address, name):
    """Ends with a worker, a client and an answer for which no thread waits."""
    import precondor
    client = precondor.Client(address)
    worker = client.join(name)
    globals()["kept"] = (client, worker, worker.precondition(0, 0, GRADIENT, 1))


def beside(address, name, first, stubs):
    """google.protobuf and grpcio, with the very messages that the extension has inside."""
    def theirs():
        import grpc
        from google.protobuf import struct_pb2
        # Generated code calls its package as we call ours.
        package = sys.modules.pop("precondor", None)
        sys.modules["precondor"] = types.ModuleType("precondor")
        sys.modules["precondor"].__path__ = [f"{stubs}/precondor"]
        from precondor.v1 import admin_pb2, admin_pb2_grpc
        del sys.modules["precondor"]
        if package is not None:
            sys.modules["precondor"] = package
        struct = struct_pb2.Struct()
        struct.update({"a": [1, 2], "b": "c"})
        assert struct_pb2.Struct.FromString(struct.SerializeToString()) == struct
        with grpc.insecure_channel(address) as channel:
            info = admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=DEADLINE_S)
        assert info.version, info

    def ours():
        import precondor
        worker = precondor.Client(address).join(name)
        step_with(worker, 0)
        worker.close()

    order = [theirs, ours, theirs] if first == "theirs" else [ours, theirs]
    for one in order:
        one()


if __name__ == "__main__":
    PROGRAMS = (fork, interrupt_connect, interrupt_join, interrupt_result, interrupt_report, leave_open, beside)
    {one.__name__: one for one in PROGRAMS}[sys.argv[1]](*sys.argv[2:])
    print("passed")
