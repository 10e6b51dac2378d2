# SPDX-License-Identifier: Apache-2.0
"""What tests of precondor.torch in one process have in common: a server, and preconditioners that end after a test.

Importing it skips with 77, and says so, where torch is not installed.
"""

import argparse
import os
import sys
import tempfile
import unittest
import warnings

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}; deploy/install.sh --test installs torch")
    sys.exit(77)

import precondor.torch
from interop_test import Server

torch.set_num_threads(1)


class ServerCase(unittest.TestCase):
    server = None

    def setUp(self):
        torch.manual_seed(1)
        self.name = self.id().rsplit(".", 1)[-1][:100]

    def preconditioner(self, model, name="", method="mkor", **options):
        pre = precondor.torch.Preconditioner(model, self.server.address, session=name or self.name, method=method, **options)
        self.addCleanup(pre.close, end_session=True)
        return pre

    def expect_warning(self, pattern, call, *arguments):
        """Expects one UserWarning, with the pattern; for an empty pattern, none. The second call warns of nothing."""
        for wanted in (pattern, ""):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(*arguments)
            texts = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
            self.assertEqual(len(texts), 1 if wanted else 0, texts)
            self.assertRegex("".join(texts), wanted or "^$")

    def expect(self, kind, pattern, call, *arguments, **options):
        with self.assertRaises(kind) as caught:
            call(*arguments, **options)
        self.assertRegex(str(caught.exception), pattern)
        return caught.exception


def main(description):
    """Runs the tests of the program with a server of their own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--server", required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    warnings.simplefilter("error", category=UserWarning)
    with tempfile.TemporaryDirectory() as folder:
        ServerCase.server = Server(arguments.server, folder)
        try:
            result = unittest.main(argv=[sys.argv[0], "-v"], exit=False).result
        finally:
            status = ServerCase.server.stop()
    if status != 0:
        sys.exit(f"the server ended with {status}")
    sys.exit(not result.wasSuccessful())
