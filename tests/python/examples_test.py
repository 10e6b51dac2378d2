#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The examples of client/python/examples train. Without Debian's bible-kjv the GPT reads a text of the test's own."""

import collections
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

import torch

import test_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import bible_text
import digits_data

TIMEOUT_S = 120


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


class PartsTest(unittest.TestCase):
    def test_digits_are_read(self):
        data = digits_data.Digits()
        self.assertEqual((len(data.train[1]), len(data.held_out[1])), (1438, 359))
        self.assertEqual((data.train[0].min().item(), data.train[0].max().item()), (0, 1))
        first, again = data.batch(3, 128, 1), data.batch(3, 128, 1)
        self.assertTrue(torch.equal(first[0], again[0]))
        a_pass = torch.cat([data.batch(step, 128, 1)[0] for step in range(11)])
        self.assertLessEqual(collections.Counter(map(tuple, a_pass.tolist())), collections.Counter(map(tuple, data.train[0].tolist())))

    def test_windows_are_of_the_text(self):
        text = "abcdefghij" * 30
        data = bible_text.Characters(text, context=8)
        x, y = data.batch(0, 5, 1)
        for row, after in zip(x.tolist(), y.tolist()):
            self.assertIn("".join(data.vocabulary[number] for number in [*row, after[-1]]), text)
            self.assertEqual(row[1:], after[:-1])
        self.assertEqual(len(data.held_out_batch(4)[0]), 4)
        with self.assertRaisesRegex(SystemExit, "expected more than"):
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
    def losses(self, program, *arguments):
        """The losses that a run with a server of its own prints."""
        done = run(program, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)], done.stdout

    def test_the_gpt_learns(self):
        arguments = ["--steps", "60"]
        if not shutil.which("bible"):
            file = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "text.txt")
            file.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(2000)))
            arguments += ["--text", file]
        losses, out = self.losses("gpt.py", *arguments)
        self.assertEqual(len(losses), 3)
        self.assertLess(losses[-1], 3.0)  # of a uniform guess: 4.1
        self.assertEqual(out.count("held-out loss"), 3)

    def test_the_convolutional_net_learns(self):
        losses, out = self.losses("convnet.py")
        self.assertLess(losses[-1], 0.2 * losses[0])
        self.assertGreater(int(re.search(r"(\d+) of 359 held-out digits are right", out)[1]), 330)

    def test_the_notebook_draws_both_losses(self):
        cells = (EXAMPLES / "losses_notebook.py").read_text(encoding="utf-8")
        self.assertIn("STEPS = 600\n", cells)
        self.assertGreaterEqual(cells.count("\n# %%"), 8)
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        few = folder / "few.py"
        few.write_text(cells.replace("STEPS = 600\n", "STEPS = 40\n"), encoding="utf-8")
        path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run([sys.executable, "-B", few], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                              env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": path})
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("AdamW", "Precondor"):
            first, last = map(float, re.search(rf"^{name}: loss ([\d.]+) at the first step, ([\d.]+) at the last", done.stdout, re.MULTILINE).groups())
            self.assertLess(last, 0.5 * first)
        self.assertEqual((folder / "losses.png").read_bytes()[:4], b"\x89PNG")


if __name__ == "__main__":
    test_program.run()
