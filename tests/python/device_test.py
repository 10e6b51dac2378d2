#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gradients in device memory from Python, with a server whose CUDA backend runs on the host: NumPy's memory is the
device's there."""

import subprocess
import tempfile
import unittest

import numpy as np

import precondor
import test_program

SERVER = ""
SHAPE = (3, 4)


class OnDevice:
    """The interface by which torch and CuPy show a matrix."""

    def __init__(self, array, **changes):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": array.strides,
            "version": 2,
            **changes
        }


class DeviceTest(unittest.TestCase):

    def run_with(self, flags, body):
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/s"
            command = [SERVER, f"--listen={address}", "--backend=cuda", "--log-level=warning", *flags]
            with subprocess.Popen(command) as server:
                try:
                    client = precondor.Client(address, precondor.ClientOptions(connect_timeout=60))
                    spec = precondor.SessionSpec("job", [precondor.Layer("only", *SHAPE)],
                                                 method="identity")
                    client.open_session(spec)
                    with client.join("job") as worker:
                        body(worker)
                    client.close()
                finally:
                    server.kill()

    def test_a_gradient_is_answered_where_it_lies(self):

        def body(worker):
            wide = np.arange(18, dtype=np.float32).reshape(3, 6)
            before = wide.copy()
            matrix = OnDevice(wide[:, :4])
            result = worker.precondition(0, 0, matrix, 1).result()
            self.assertEqual(result.decision, "IDENTITY", result.reason)
            self.assertIs(result.gradient, matrix)
            np.testing.assert_array_equal(wide, before)  # no statistics, no change
            worker.flush()
            self.assertEqual(worker.status().device_plane, {"backends": ["cuda"], "in_ring": 1, "over_socket": 0, "reason": ""})
            self.assertEqual(worker.device_plane_status(0), "")
            self.assertNotEqual(worker.device_plane_status(0, device=5), "")
            with self.assertRaises(precondor.NotFoundError):
                worker.device_plane_status(1)

        self.run_with(["--device-plane-bytes=2MiB"], body)

    def test_what_is_no_such_matrix_is_refused(self):

        def body(worker):
            array = np.ones(SHAPE, np.float32)
            for bad in (OnDevice(array.astype(np.float64)), OnDevice(array.reshape(12)),
                        OnDevice(np.asfortranarray(array)), OnDevice(array, data=(array.ctypes.data, True))):
                with self.assertRaisesRegex(precondor.InvalidArgumentError, "__cuda_array_interface__"):
                    worker.precondition(0, 0, bad, 1)
            for options in ({"out": array}, {"parts": []}):
                with self.assertRaisesRegex(precondor.InvalidArgumentError, "gradient: expected one in host memory, with out or parts"):
                    worker.precondition(0, 0, OnDevice(array), 1, **options)
            with self.assertRaises(precondor.UnavailableError):
                worker.precondition(0, 0, OnDevice(array), 1, device=5).result()

        self.run_with([], body)


if __name__ == "__main__":
    SERVER = test_program.parse("--server").server
    test_program.run()
