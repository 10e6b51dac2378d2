#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on 8 x 8 handwritten digits, preconditioned by Precondor.

examples:
  digits.py                                   the autoencoder; starts a server of its own
  digits.py --task classifier --precondition none --json losses.json
  digits.py --server 127.0.0.1:7070 --optimizer sgd
  python3 -m torch.distributed.run --nproc_per_node 2 digits.py
"""

import argparse
import pathlib

from torch import nn
from torch.nn import functional

import program
import training
from digits_data import CLASSES, FILE, PIXELS, Digits

WIDTHS = {"autoencoder": (PIXELS, 48, 24, 8, 24, 48, PIXELS), "classifier": (PIXELS, 64, 64, CLASSES)}
RATES = {"autoencoder": {"server": 0.032, "none": 0.016},
         "classifier": {"server": 0.016, "none": 0.016}}


def mlp(widths):
    """Linear layers with tanh between them."""
    modules = []
    for d_in, d_out in zip(widths, widths[1:]):
        layer = nn.Linear(d_in, d_out)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def make_task(arguments):
    data = Digits(pathlib.Path(arguments.data))
    autoencoder = arguments.task == "autoencoder"

    def loss(model, batch):
        pixels, labels = batch
        return functional.mse_loss(model(pixels), pixels) if autoencoder else functional.cross_entropy(model(pixels), labels)

    def held_out(model):
        numbers = {"loss": loss(model, data.held_out).item()}
        if not autoencoder:
            pixels, labels = data.held_out
            numbers["accuracy"] = (model(pixels).argmax(1) == labels).float().mean().item()
        return numbers

    return training.Task(arguments.task, lambda: mlp(WIDTHS[arguments.task]),
                         lambda step: data.batch(step, arguments.batch, arguments.seed), loss, held_out,
                         RATES[arguments.task], {"representation": "LOW_RANK", "rank": 16})


def add_model_arguments(parser):
    group = parser.add_argument_group("model")
    group.add_argument("--task", choices=WIDTHS, default="autoencoder", help="(%(default)s)")
    group.add_argument("--data", metavar="FILE", default=FILE, help="64 pixels and a label a line (this checkout's digits)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    training.add_arguments(parser, steps=600, batch=128)
    training.run_task(parser, parser.parse_args(), make_task)


if __name__ == "__main__":
    program.run(main)
