#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small residual convolutional network on 8 x 8 handwritten digits, preconditioned by Precondor.

examples:
  convnet.py                                  starts a server of its own
  convnet.py --precondition none --json losses.json
  convnet.py --method kron --optimizer sgd --learning-rate 0.01
  python3 -m torch.distributed.run --nproc_per_node 2 convnet.py
"""

import argparse
import pathlib

from torch import nn
from torch.nn import functional

import program
import training
from digits_data import CLASSES, FILE, Digits

RATES = {"server": 0.004, "none": 0.004}
SIDE = 8
CHANNELS = (16, 32, 64)


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a path that changes channels and side only where they do."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.path = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False),
                                                             nn.BatchNorm2d(after))

    def forward(self, x):
        inner = self.second(functional.relu(self.norm1(self.first(x))))
        return functional.relu(self.norm2(inner) + self.path(x))


def resnet():
    """78 thousand parameters; [n, 1, 8, 8] to logits [n, 10]."""
    blocks = [Residual(before, after, stride)
              for before, after, stride in zip((CHANNELS[0], *CHANNELS), CHANNELS, (1, 2, 2))]
    return nn.Sequential(nn.Conv2d(1, CHANNELS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(CHANNELS[0]), nn.ReLU(), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], CLASSES))


def make_task(arguments):
    data = Digits(pathlib.Path(arguments.data))

    def images(batch):
        return batch[0].view(-1, 1, SIDE, SIDE)

    def loss(model, batch):
        return functional.cross_entropy(model(images(batch)), batch[1])

    def held_out(model):
        logits = model(images(data.held_out))
        labels = data.held_out[1]
        return {"loss": functional.cross_entropy(logits, labels).item(),
                "accuracy": (logits.argmax(1) == labels).float().mean().item()}

    return training.Task("convnet", resnet, lambda step: data.batch(step, arguments.batch, arguments.seed), loss, held_out,
                         RATES, {"representation": "LOW_RANK", "rank": 16})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", default=FILE, help="64 pixels and a label a line (this checkout's digits)")
    training.add_arguments(parser, steps=200, batch=128)
    training.run_task(parser, parser.parse_args(), make_task)


if __name__ == "__main__":
    program.run(main)
