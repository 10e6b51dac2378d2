#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT, a million parameters, on the characters of the King James text, preconditioned by Precondor.

The text is that of Debian's package bible-kjv (apt-get install bible-kjv), or any other with --text.

examples:
  gpt.py                                      300 steps; starts a server of its own
  gpt.py --precondition none --steps 1000 --json losses.json
  gpt.py --text notes.txt
  python3 -m torch.distributed.run --nproc_per_node 2 gpt.py
"""

import argparse
import pathlib

import torch
from torch import nn
from torch.nn import functional

import program
import training
from bible_text import Characters, king_james

RATES = {"server": 0.004, "none": 0.001}
HELD_OUT_WINDOWS = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a normalisation and beside a residual path."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.attention_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_in, self.feed_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, mask):
        rows, length, dim = x.shape
        parts = self.query_key_value(self.norm1(x)).view(rows, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (dim // self.heads)**0.5
        mixed = (scores + mask).softmax(-1) @ value
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, length, dim))
        return x + self.feed_out(functional.gelu(self.feed_in(self.norm2(x))))


def set_first_weights(model, layers):
    """Of a model of so many blocks: normal, and smaller where residual paths add up."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02 / (2 * layers)**0.5 if name.endswith("_out.weight") else 0.02)


class Gpt(nn.Module):
    """Logits [rows, length, vocabulary] of the character that follows each of [rows, length]."""

    def __init__(self, vocabulary, context, dim, layers, heads):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1), persistent=False)
        set_first_weights(self, layers)

    def forward(self, characters):
        length = characters.shape[1]
        x = self.characters(characters) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(self.norm(x))


def loss_of(model, batch):
    characters, next_ones = batch
    return functional.cross_entropy(model(characters).flatten(0, 1), next_ones.flatten())


def make_task(arguments):
    text = pathlib.Path(arguments.text).read_text(encoding="utf-8") if arguments.text else king_james()
    data = Characters(text, arguments.context)
    held_out = data.held_out_batch(HELD_OUT_WINDOWS)

    def make_model():
        return Gpt(len(data.vocabulary), arguments.context, arguments.dim, arguments.layers, arguments.heads)

    # The head is a table over the vocabulary, as the embeddings are: those are left to the optimizer.
    return training.Task("gpt", make_model, lambda step: data.batch(step, arguments.batch, arguments.seed), loss_of,
                         lambda model: {"loss": loss_of(model, held_out).item()},
                         RATES, {"representation": "LOW_RANK", "rank": 16}, skip=("head",))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("model")
    group.add_argument("--text", metavar="FILE", help="instead of the King James text; UTF-8")
    group.add_argument("--context", type=program.positive, default=64, help="characters (%(default)s)")
    group.add_argument("--dim", type=program.positive, default=128, help="(%(default)s)")
    group.add_argument("--layers", type=program.positive, default=5, help="(%(default)s)")
    group.add_argument("--heads", type=program.positive, default=4, help="(%(default)s)")
    training.add_arguments(parser, steps=300, batch=16)
    arguments = parser.parse_args()
    if arguments.dim % arguments.heads:
        parser.error(f"--dim: expected a multiple of the {arguments.heads} heads, got {arguments.dim}")
    training.run_task(parser, arguments, make_task)


if __name__ == "__main__":
    program.run(main)
