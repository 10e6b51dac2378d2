# SPDX-License-Identifier: Apache-2.0
"""The frame of tests of precondor.torch in one process: a server, and preconditioners that end after a test."""

import unittest
import warnings

import torch

import precondor.torch
import test_program

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
            with warnings.catch_warnings(record=True, action="always") as caught:
                call(*arguments)
            texts = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
            self.assertEqual(len(texts), 1 if wanted else 0, texts)
            self.assertRegex("".join(texts), wanted or "^$")

    def expect(self, kind, pattern, call, *arguments, **options):
        with self.assertRaises(kind) as caught:
            call(*arguments, **options)
        self.assertRegex(str(caught.exception), pattern)
        return caught.exception


def main():
    """Runs the tests of the program with a server of their own."""
    warnings.simplefilter("error", category=UserWarning)

    def begin(server):
        ServerCase.server = server

    test_program.run_with_server(test_program.parse("--server").server, begin)
