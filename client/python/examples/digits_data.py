# SPDX-License-Identifier: Apache-2.0
"""The UCI handwritten digits (data/ATTRIBUTION.md) as tensors."""

import pathlib

import torch

from program import ExampleError

FILE = pathlib.Path(__file__).parent / "data" / "digits.csv"
PIXELS = 64
CLASSES = 10
FULL_PIXEL = 16
HELD_OUT_SHARE = 5
SPLIT_SEED = 1998


def parse(text, name):
    """Pixels f32 [n, 64] in 0 ... 1 and labels [n]. ExampleError names the line."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split(",")
        values = [int(field) for field in fields if field.isdecimal()]
        if len(fields) != PIXELS + 1 or len(values) != len(fields) or max(values) > FULL_PIXEL or values[-1] >= CLASSES:
            raise ExampleError(f"{name}, line {number}: expected {PIXELS} pixels 0 ... {FULL_PIXEL} and a label "
                               f"0 ... {CLASSES - 1}, comma-separated, got \"{line[:40]}\"")
        rows.append(values)
    if not rows:
        raise ExampleError(f"{name}: expected a digit a line, got none")
    table = torch.tensor(rows)
    return table[:, :PIXELS].to(torch.float32) / FULL_PIXEL, table[:, PIXELS]


class Digits:
    """A fifth of the digits is held out, equal in every run."""

    def __init__(self, file=FILE):
        try:
            text = file.read_text(encoding="ascii")
        except OSError as error:
            raise ExampleError(f"cannot read {file}: {error.strerror}; give the file with --data") from error
        pixels, labels = parse(text, str(file))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held_out, train = order[:len(labels) // HELD_OUT_SHARE], order[len(labels) // HELD_OUT_SHARE:]
        self.train = (pixels[train], labels[train])
        self.held_out = (pixels[held_out], labels[held_out])

    def batch(self, step, size, seed):
        """Rows of a step: consecutive ones of a random order of all, drawn anew for each pass; the same on every rank."""
        if size > len(self.train[1]):
            raise ExampleError(f"--batch: expected at most the {len(self.train[1])} digits there are, got {size}")
        per_pass = len(self.train[1]) // size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_pass)
        order = torch.randperm(len(self.train[1]), generator=generator)
        rows = order[step % per_pass * size:(step % per_pass + 1) * size]
        return self.train[0][rows], self.train[1][rows]
