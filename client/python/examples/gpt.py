#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT, a million parameters, on the characters of the King James text. The lines with `pre` are Precondor's.

  gpt.py                      the text of Debian's package bible-kjv (apt-get install bible-kjv)
  gpt.py --text notes.txt
"""

import argparse
import pathlib

import torch
from torch import nn
from torch.nn import functional
from precondor.torch import Preconditioner

from bible_text import Characters, king_james

CONTEXT, DIM, LAYERS, HEADS = 64, 128, 5, 4
BATCH = 16
RATE = 0.016  # after a warm-up; it falls to 0 along a line


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="instead of the King James text; UTF-8")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    data = Characters(arguments.text.read_text(encoding="utf-8") if arguments.text else king_james(), CONTEXT)
    held_out = data.held_out_batch(64)
    torch.manual_seed(1)
    model = Gpt(len(data.vocabulary), CONTEXT, DIM, LAYERS, HEADS)
    pre = Preconditioner(model, "local")
    optimizer = pre.make_optimizer(lr=RATE)
    warm_up = max(1, arguments.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - step / arguments.steps))
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = loss_of(model, data.batch(step, BATCH, seed=1))
        loss.backward()
        pre.step(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0:
            with torch.no_grad():
                print(f"step {step + 1}: loss {loss.item():.4f}, held-out loss {loss_of(model, held_out).item():.4f}")


if __name__ == "__main__":
    main()
