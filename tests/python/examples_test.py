#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The examples of client/python/examples: each trains a little, alone and with two ranks, and fails as it should.

Without Debian's bible-kjv the GPT reads a text of the test's own.
"""

import collections
import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import numpy as np
import torch

import test_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import bible_text
import digits_data
import program as example_program
from program import ExampleError

TIMEOUT_S = 120
PROGRAMS = ("gpt.py", "convnet.py")
SMALL_GPT = ("--dim", "32", "--layers", "1", "--context", "16")


def launcher(ranks):
    """Returns the arguments by which the interpreter starts a program on so many ranks: none for a single one."""
    if ranks == 1:
        return []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_addr", "127.0.0.1", "--master_port", str(port)]


def command(program, *arguments, ranks=1):
    return [sys.executable, "-B", *launcher(ranks), str(EXAMPLES / program), *map(str, arguments)]


def run(program, *arguments, ranks=1):
    return subprocess.run(command(program, *arguments, ranks=ranks), capture_output=True, text=True, timeout=TIMEOUT_S,
                          check=False, stdin=subprocess.DEVNULL)


def run_here(program, *arguments):
    """The same in this process: exit status, output and errors."""
    out, errors = io.StringIO(), io.StringIO()
    main = importlib.import_module(program.removesuffix(".py")).main
    with unittest.mock.patch.object(sys, "argv", [program, *map(str, arguments)]), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(errors):
        try:
            example_program.run(main)
        except SystemExit as end:
            return end.code, out.getvalue(), errors.getvalue()
    return 0, out.getvalue(), errors.getvalue()


class PartsTest(unittest.TestCase):
    def test_digits_are_read_and_refused_by_line(self):
        data = digits_data.Digits()
        self.assertEqual((len(data.train[1]), len(data.held_out[1])), (1438, 359))
        self.assertEqual((data.train[0].min().item(), data.train[0].max().item()), (0, 1))
        first, again = data.batch(3, 128, 1), data.batch(3, 128, 1)
        self.assertTrue(torch.equal(first[0], again[0]))
        a_pass = torch.cat([data.batch(step, 128, 1)[0] for step in range(11)])
        self.assertLessEqual(collections.Counter(map(tuple, a_pass.tolist())), collections.Counter(map(tuple, data.train[0].tolist())))
        good = ",".join(["1"] * 64 + ["7"])
        for bad in ("1,2", good.replace("7", "10"), good.replace("1,", "17,", 1), good.replace("1,", "-1,", 1), ""):
            with self.subTest(bad), self.assertRaisesRegex(ExampleError, "x.csv, line 2: expected 64 pixels"):
                digits_data.parse(f"{good}\n{bad}\n", "x.csv")
        with self.assertRaisesRegex(ExampleError, "got none"):
            digits_data.parse("", "x.csv")

    def test_windows_are_of_the_text(self):
        text = "abcdefghij" * 30
        data = bible_text.Characters(text, context=8)
        x, y = data.batch(0, 5, 1)
        for row, after in zip(x.tolist(), y.tolist()):
            self.assertIn("".join(data.vocabulary[number] for number in [*row, after[-1]]), text)
            self.assertEqual(row[1:], after[:-1])
        self.assertEqual(len(data.held_out_batch(4)[0]), 4)
        with self.assertRaisesRegex(ExampleError, "expected more than"):
            bible_text.Characters(text, context=30)

    @unittest.skipUnless(shutil.which("bible"), "no package bible-kjv; deploy/install.sh --test has it")
    def test_the_king_james_text_is_whole(self):
        text = bible_text.king_james()
        lines = text.splitlines()
        self.assertEqual(len(lines), 31102)  # verses
        self.assertEqual(lines[0], "In the beginning God created the heaven and the earth.")
        self.assertTrue(lines[-1].startswith("The grace of our Lord"))
        verses = bible_text.verses()
        self.assertEqual([verse for _, verse in verses], lines)
        self.assertEqual(len(dict(verses)), 66)  # books


class ProgramsTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def train(self, program, *arguments, ranks=1):
        """The report of a run with a server of its own."""
        file = self.folder / "report.json"
        done = run(program, "--json", file, "--quiet", *arguments, ranks=ranks)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(file.read_text())

    def text(self):
        """Returns the arguments with the GPT's text: nothing where it has the King James text."""
        if shutil.which("bible"):
            return ()
        file = self.folder / "text.txt"
        file.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(2000)))
        return ("--text", file)

    def expect_learned(self, report, world_size):
        self.assertEqual(report["world_size"], world_size)
        self.assertEqual(len(report["losses"]), report["steps"])
        self.assertLess(np.mean(report["losses"][-5:]), 0.8 * report["losses"][0])
        self.assertLess(report["held_out"][-1]["loss"], report["losses"][0])

    def test_help_has_examples(self):
        for program in PROGRAMS:
            status, out, errors = run_here(program, "--help")
            self.assertEqual(status, 0, errors)
            self.assertIn(f"examples:\n  {program}", out)

    def test_wrong_arguments_end_with_2(self):
        for program, arguments, message in (
                ("convnet.py", ("--steps", "0"), "at least 1"),
                ("convnet.py", ("--precondition", "magic"), "invalid choice"),
                ("convnet.py", ("--option", "rank"), "expected NAME=VALUE"),
                ("convnet.py", ("--learning-rate", "-1"), "expected a number above 0, got -1"),
                ("gpt.py", ("--dim", "30"), "expected a multiple of the 4 heads"),
        ):
            with self.subTest(program=program, arguments=arguments):
                status, _, errors = run_here(program, *arguments)
                self.assertEqual(status, 2, errors)
                self.assertIn(message, errors)

    def test_failures_end_with_1_and_one_line(self):
        for program, arguments, message in (
                ("convnet.py", ("--server", "unix:"), "expected unix:PATH"),
                ("convnet.py", ("--data", "/nonexistent.csv"), "cannot read /nonexistent.csv"),
                ("convnet.py", ("--precondition", "none", "--batch", "2000"), "--batch: expected at most the 1438 digits"),
                ("convnet.py", ("--option", "nonsense=1"), "nonsense"),
                # Before anything runs.
                ("convnet.py", ("--json", "/nonexistent/x"), "/nonexistent/x"),
                ("gpt.py", ("--text", "/nonexistent.txt"), "/nonexistent.txt"),
        ):
            with self.subTest(arguments=arguments):
                status, _, errors = run_here(program, *arguments, "--quiet")
                self.assertEqual(status, 1, errors)
                self.assertRegex(errors, f"^{program}: .*{message}.*\n$")

    def test_a_rank_that_fails_ends_the_others(self):
        done = run("convnet.py", "--json", "/nonexistent/x", ranks=2)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent/x", done.stderr)

    def test_each_learns_with_one_rank(self):
        convnet = self.train("convnet.py", "--steps", "12", "--batch", "64")
        self.expect_learned(convnet, 1)
        self.assertEqual(len(convnet["preconditioned_layers"]), 10)
        self.assertGreater(convnet["metrics"]["gradient_bytes"], 0)
        gpt = self.train("gpt.py", *self.text(), *SMALL_GPT, "--steps", "60", "--learning-rate", "0.02")
        self.expect_learned(gpt, 1)
        self.assertEqual(len(gpt["preconditioned_layers"]), 4)

    def test_each_learns_with_two_ranks(self):
        for exchange in ("DELEGATE", "REPLAY"):
            self.expect_learned(self.train("convnet.py", "--steps", "12", "--batch", "64", "--exchange", exchange, ranks=2), 2)
        self.expect_learned(self.train("gpt.py", *self.text(), *SMALL_GPT, "--steps", "60", "--learning-rate", "0.02", ranks=2), 2)

    def test_ctrl_c_ends_with_130_and_the_server_too(self):
        process = subprocess.Popen(command("convnet.py", "--steps", "1000000", "--eval-every", "10"),
                                   stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.addCleanup(process.kill)
        for line in process.stderr:
            if "step " in line:
                break
        own_server, = map(int, pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 130, rest)
        self.assertNotIn("Traceback", rest)
        with self.assertRaises(ProcessLookupError):
            os.kill(own_server, 0)

    def test_the_notebook_draws_both_losses(self):
        cells = (EXAMPLES / "losses_notebook.py").read_text(encoding="utf-8")
        self.assertIn("STEPS = 600\n", cells)
        self.assertGreaterEqual(cells.count("\n# %%"), 8)
        few = self.folder / "few.py"
        few.write_text(cells.replace("STEPS = 600\n", "STEPS = 40\n"), encoding="utf-8")
        path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run([sys.executable, "-B", few], cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                              env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": path})
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("AdamW", "Precondor"):
            first, last = map(float, re.search(rf"^{name}: loss ([\d.]+) at the first step, ([\d.]+) at the last", done.stdout, re.MULTILINE).groups())
            self.assertLess(last, 0.5 * first)
        self.assertEqual((self.folder / "losses.png").read_bytes()[:4], b"\x89PNG")


if __name__ == "__main__":
    test_program.run()
