# SPDX-License-Identifier: Apache-2.0
"""Runs a file of tests as a program: its arguments, its server, and how it skips and ends."""

import argparse
import contextlib
import os
import sys
import tempfile
import unittest

from interop_test import Server

SKIPPED = 77  # what CTest shows as skipped


def skip(reason):
    print(f"{os.path.basename(sys.argv[0])}: skipped: {reason}")
    sys.exit(SKIPPED)


def import_torch():
    """Ends the program as skipped where torch is not installed."""
    try:
        import torch  # pylint: disable=import-outside-toplevel,unused-import
    except ImportError as error:
        skip(f"{error}; deploy/install.sh --test installs torch")


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
