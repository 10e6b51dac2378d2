# SPDX-License-Identifier: Apache-2.0
"""The UCI handwritten digits (data/ATTRIBUTION.md) as tensors."""

import pathlib

import numpy as np
import torch

FILE = pathlib.Path(__file__).parent / "data" / "digits.csv"
CLASSES = 10
FULL_PIXEL = 16
HELD_OUT_SHARE = 5
SPLIT_SEED = 1998


class Digits:
    """Pixels f32 [n, 64] in 0 ... 1 and labels [n]. A fifth of the digits is held out, equal in every run."""

    def __init__(self):
        table = torch.from_numpy(np.loadtxt(FILE, delimiter=",", dtype=np.int64))
        pixels, labels = table[:, :-1].to(torch.float32) / FULL_PIXEL, table[:, -1]
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held_out, train = order[:len(labels) // HELD_OUT_SHARE], order[len(labels) // HELD_OUT_SHARE:]
        self.train = (pixels[train], labels[train])
        self.held_out = (pixels[held_out], labels[held_out])

    def batch(self, step, size, seed):
        """Rows of a step: consecutive ones of a random order of all, drawn anew for each pass; the same on every rank."""
        per_pass = len(self.train[1]) // size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_pass)
        order = torch.randperm(len(self.train[1]), generator=generator)
        rows = order[step % per_pass * size:(step % per_pass + 1) * size]
        return self.train[0][rows], self.train[1][rows]
