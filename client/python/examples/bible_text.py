# SPDX-License-Identifier: Apache-2.0
"""The King James text that Debian's packages bible-kjv and bible-kjv-text ship (public domain), as characters."""

import re
import shutil
import subprocess

import torch

RANGE = "Gen1:1-Rev22:21"
REFERENCE = re.compile(r"^(\w+?)\d+:\d+ ", re.MULTILINE)  # with the book's name
HELD_OUT_SHARE = 10


def _printed():
    """A verse a line, each after its reference."""
    program = shutil.which("bible")
    if program is None:
        raise SystemExit("no program `bible`, which has the text: install it (apt-get install bible-kjv) or give a text "
                         "of your own with --text")
    # It takes a bible.data of the folder it is in before its own; -f: a verse a line.
    done = subprocess.run([program, "-f", RANGE], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          encoding="ascii", errors="replace", check=False)
    if done.returncode != 0 or not REFERENCE.sub("", done.stdout, count=1).startswith("In the beginning"):
        raise SystemExit(f"{program} {RANGE}: expected Genesis to Revelation, got status {done.returncode} and "
                         f"\"{(done.stderr or done.stdout).strip()[:80]}\"")
    return done.stdout


def king_james():
    """One verse a line, without its reference; 4.0 million characters."""
    return REFERENCE.sub("", _printed())


def verses():
    """(book's name, text) of each, in their order."""
    return [(reference[1], reference.string[reference.end():]) for reference in map(REFERENCE.match, _printed().splitlines())]


class Characters:
    """A text as numbers 0 ... len(vocabulary) - 1. The last tenth is held out."""

    def __init__(self, text, context):
        self.vocabulary = sorted(set(text))
        place = {character: i for i, character in enumerate(self.vocabulary)}
        numbers = torch.tensor([place[character] for character in text], dtype=torch.uint8 if len(place) < 256 else torch.int32)
        boundary = len(text) - len(text) // HELD_OUT_SHARE
        self.train, self.held_out = numbers[:boundary], numbers[boundary:]
        self._context = context
        if len(self.held_out) <= context:
            raise SystemExit(f"text: expected more than {HELD_OUT_SHARE * (context + 1)} characters for a context of "
                             f"{context}, got {len(text)}")

    def windows(self, part, begins):
        """Inputs and targets [n, context]: the characters from each beginning, and those that follow them."""
        rows = torch.stack([part[begin:begin + self._context + 1] for begin in begins]).long()
        return rows[:, :-1], rows[:, 1:]

    def batch(self, step, size, seed):
        """Windows at random places of the training part; the same on every rank."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return self.windows(self.train, torch.randint(len(self.train) - self._context, (size,), generator=generator).tolist())

    def held_out_batch(self, size):
        """Windows at even distances over the held-out part."""
        last = len(self.held_out) - self._context - 1
        return self.windows(self.held_out, [last * i // max(1, size - 1) for i in range(size)])
