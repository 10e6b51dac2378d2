#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's kill demonstration prints what the README shows, and each recipe of docs/use/pytorch.md trains."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

from examples_test import ROOT, TIMEOUT_S, launcher
import test_program

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The recipes take these from the reader's program.
BEFORE = """
import os
import torch
import precondor
from precondor.torch import Preconditioner

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh())
        self.middle, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.encoder(x))))

def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch), torch.tanh(batch[:, :4]))

def train(pre, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        pre.step(loss)
        optimizer.step()

torch.manual_seed(0)
model = Model()
batches = list(torch.randn(30, 64, 8))
with torch.no_grad():
    first = loss_of(model, batches[0]).item()
"""
MAKE = 'pre = Preconditioner(model, "local")\n'
OPTIMIZER = "optimizer = pre.make_optimizer(lr=0.01)\n"
LEARNS = "the loss falls"
AFTER = f"""
last = loss_of(model, batches[0]).item()
assert last < 0.8 * first, (first, last)
print("{LEARNS}")
"""
server_program = None


def run(program, ranks=1):
    """Runs the text of a program in a folder of its own, and ends all that it has started. Returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "program.py")
        file.write_text(program, encoding="utf-8")
        path = os.pathsep.join([str(pathlib.Path(server_program).resolve().parent), os.environ["PATH"]])
        with subprocess.Popen([sys.executable, "-B", *launcher(ranks), str(file)], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True,
                              env={**os.environ, "PATH": path, "TMPDIR": folder}) as process:
            try:
                out, errors = process.communicate(timeout=2 * TIMEOUT_S)  # a hang alone takes so long
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        return process.returncode, out, errors


def section(page, heading):
    return re.search(rf"^## {heading}\n(.*?)^## ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]


def recipes():
    """Programs with the blocks of the page's recipes, by their headings."""
    for part in re.split(r"^### ", section("docs/use/pytorch.md", "Recipes"), flags=re.MULTILINE)[1:]:
        block, = (text for language, text in FENCE.findall(part) if language == "python")
        program = block.replace('"cuda"', '"cpu"').replace('"gpu0:7070"', '"local"')
        program = ("" if "Preconditioner(" in block else MAKE) + program
        if "optimizer = " not in block:
            made = program.index("\n", program.index("Preconditioner(")) + 1
            program = program[:made] + OPTIMIZER + program[made:]
        if "for batch" not in block and "train(" not in block:
            program += "train(pre, optimizer, batches)\n"
        name = part.split("\n")[0]
        yield name, BEFORE + program + AFTER
        if "checkpoint.pt" in block:
            yield f"{name}, resumed", BEFORE + program + AFTER


class ReadmeTest(unittest.TestCase):
    def test_the_kill_demonstration_prints_what_it_shows(self):
        (_, program), (_, shown) = FENCE.findall(section("README.md", "Kill a server"))
        status, out, errors = run(program)
        self.assertEqual((status, out), (0, shown), errors)

    def test_each_recipe_of_the_manual_trains(self):
        alone = {name: program for name, program in recipes() if "init_process_group" not in program}
        status, out, errors = run(f"for name, program in {alone!r}.items():\n    print(name, flush=True)\n    exec(program, {{}})\n")
        self.assertEqual((status, out.split("\n")[:-1]), (0, [line for name in alone for line in (name, LEARNS)]), errors)

    def test_each_recipe_of_several_ranks_trains(self):
        for name, program in recipes():
            if "init_process_group" in program:
                with self.subTest(recipe=name):
                    status, out, errors = run(program, ranks=2)
                    self.assertEqual((status, out.count(LEARNS)), (0, 2), errors)


if __name__ == "__main__":
    server_program = test_program.parse("--server").server
    test_program.run()
