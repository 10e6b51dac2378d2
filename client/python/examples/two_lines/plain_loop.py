#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains an autoencoder of handwritten digits: a plain loop. The lines with `pre` are Precondor's.

  plain_loop.py
  plain_loop.py --compile inductor        needs a C++ compiler; aot_eager needs none
"""

import argparse
import pathlib
import sys

import torch
from torch import nn
from precondor.torch import Preconditioner

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from digits_data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--compile", metavar="BACKEND")
backend = parser.parse_args().compile
torch.manual_seed(1)
digits = Digits()
model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 64))
if backend:
    model = torch.compile(model, backend=backend, fullgraph=True)
pre = Preconditioner(model, "local")
optimizer = pre.make_optimizer(lr=0.01)
for step in range(101):
    pixels, _ = digits.batch(step, 128, seed=1)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(pixels), pixels)
    loss.backward()
    pre.step(loss)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
