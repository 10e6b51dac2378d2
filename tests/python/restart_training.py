# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with the default method of precondor.torch: a rank of a restart test."""

import hashlib
import pathlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import precondor.torch


class Net(nn.Module):
    """muon for the middle layers, soap for the head, and the optimizer alone for the table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        x = self.table(x)
        for layer in self.middle:
            x = x + torch.tanh(layer(self.norm(x)))
        return self.head(x)


def hash_of(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(rank, address, session, exchange, steps=None, over=None):
    """Trains `steps` steps, or until the file `over` exists. Returns the hash of the weights after each step, StepResult.updates_lost
    by step, pre.metrics() and the texts of warnings."""
    model = called = Net()
    if exchange == "DELEGATE":
        called = nn.parallel.DistributedDataParallel(model)
    elif exchange == "SHARDED":
        fully_shard(model)
    hashes, lost = [], {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        with precondor.torch.Preconditioner(called, address, session=session, exchange=exchange) as pre:
            optimizer = pre.make_optimizer(0.02)
            ends = torch.zeros(1)
            while not ends:
                x = torch.randint(0, 12, (2, 6), generator=torch.Generator().manual_seed(len(hashes)))[rank]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(called(x), (x + 1) % 12)
                loss.backward()
                result = pre.step(loss)
                optimizer.step()
                hashes.append(hash_of(model))
                if result.updates_lost:
                    lost[result.step] = result.updates_lost
                ends[0] = float(len(hashes) == steps or (over is not None and pathlib.Path(over).exists()))
                dist.broadcast(ends, 0)
            metrics = pre.metrics()
    return hashes, lost, metrics, [str(one.message) for one in caught if "has lost" in str(one.message)]
