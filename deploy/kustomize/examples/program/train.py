# SPDX-License-Identifier: Apache-2.0
"""train.py SERVER SESSION: each rank of a torch.distributed job trains a small network, preconditioned by Precondor."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from precondor import ClientOptions
from precondor.torch import Preconditioner


def main():
    server, session = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # equal weights
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1 + rank))  # data of its own
    y = torch.sin(x[:, :4])
    # replace: a job that is started again begins anew. With checkpoints leave it out (docs/use/pytorch.md).
    with Preconditioner(model, server, session=session, optimizer=optimizer, client=ClientOptions(replace=True)) as pre:
        for step in range(100):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            pre.step(loss)
            optimizer.step()
            if step % 20 == 0 or step == 99:
                print(f"rank {rank} step {step} loss {loss.item():.4f} {pre.mode}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
