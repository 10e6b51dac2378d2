# SPDX-License-Identifier: Apache-2.0
"""Runs a file of tests as a program: its arguments, its server, and how it ends. And what several files compare with."""

import argparse
import contextlib
import os
import sys
import tempfile
import unittest

import numpy as np

from interop_test import ROOT, Server

sys.path.append(str(ROOT / "tests/e2e/chaos"))  # for `cluster`, which starts servers and waits for conditions


def expect_close(got, wanted, tolerance=0.0):
    """Expects the wanted arrays, each within the tolerance; 0: to the bit."""
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def parse(*names):
    """The values of the options that the test needs, such as --server. The rest of the command line is unittest's."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(name, required=True)
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return options


def run():
    """Runs the tests, and ends the program."""
    sys.exit(not unittest.main(argv=[sys.argv[0], "-v", *sys.argv[1:]], exit=False).result.wasSuccessful())


def run_with_server(program, begin, around=lambda folder: contextlib.nullcontext()):
    """Like run, with a server, which `begin` gets. `around(folder)` is a context that the tests run in."""
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(program, folder)
        try:
            begin(server)
            with around(folder):
                result = unittest.main(argv=[sys.argv[0], "-v", *sys.argv[1:]], exit=False).result
        finally:
            status = server.stop()
    if status != 0:
        sys.exit(f"the server ended with {status}")
    sys.exit(not result.wasSuccessful())
