#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains an autoencoder of handwritten digits: DistributedDataParallel or fully_shard (FSDP2). The lines with `pre` are Precondor's.

  torchrun --nproc_per_node 2 ranks.py
  torchrun --nproc_per_node 2 ranks.py --fully-shard
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from precondor.torch import Preconditioner

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from digits_data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--fully-shard", action="store_true")
sharded = parser.parse_args().fully_shard
dist.init_process_group("gloo")
torch.manual_seed(1)
digits = Digits()
model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 64))
if sharded:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = nn.parallel.DistributedDataParallel(model)
pre = Preconditioner(model, "local")
optimizer = pre.make_optimizer(lr=0.01)
for step in range(101):
    pixels, _ = digits.batch(step, 128, seed=1)
    pixels = pixels[dist.get_rank()::dist.get_world_size()]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(pixels), pixels)
    loss.backward()
    pre.step(loss)
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
pre.close()
dist.barrier()  # the first rank has the server
dist.destroy_process_group()
