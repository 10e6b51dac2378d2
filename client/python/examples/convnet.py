#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small residual convolutional network on 8 x 8 handwritten digits. The lines with `pre` are Precondor's."""

import torch
from torch import nn
from torch.nn import functional
from precondor.torch import Preconditioner

from digits_data import CLASSES, Digits

SIDE = 8
CHANNELS = (16, 32, 64)
STEPS = 100
RATE = 0.016  # after a warm-up; it falls to 0 along a line


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


def main():
    torch.manual_seed(1)
    digits = Digits()
    model = resnet()
    pre = Preconditioner(model, "local")
    optimizer = pre.make_optimizer(lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (STEPS // 10), 1 - step / STEPS))
    for step in range(STEPS):
        pixels, labels = digits.batch(step, 128, seed=1)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pixels.view(-1, 1, SIDE, SIDE)), labels)
        loss.backward()
        pre.step(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    pixels, labels = digits.held_out
    with torch.no_grad():
        right = model.eval()(pixels.view(-1, 1, SIDE, SIDE)).argmax(1) == labels
    print(f"{right.sum().item()} of {len(labels)} held-out digits are right")


if __name__ == "__main__":
    main()
