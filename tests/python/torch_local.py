# SPDX-License-Identifier: Apache-2.0
"""The training of jobs on devices in each rank. devices: of each rank, which its memory stands for; None: the host."""

import os
import select
import signal
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import precondor.torch
from host_as_device import host_as_device
import torch_rank

STEPS = 5
LOST = 2  # the step in which a shard is lost


def use_of(pre):
    """Returns the ways that the gradients went, and their senders."""
    return {**pre.device_plane(), **pre.metrics(), "delegates": pre._worker.spec.delegates}


def train(rank, devices, **arguments):
    uses = []
    with host_as_device(lambda tensor: devices[rank]):
        weights = torch_rank.train(rank, at_end=lambda pre: uses.append(use_of(pre)), **arguments)[1]
    return weights, uses[0]


def _train(rank, address, session, devices, model, layers, before_step=lambda step: None, **options):
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    with host_as_device(lambda tensor: devices[rank]), precondor.torch.Preconditioner(
            model, address, session=session, method="mkor", statistics=precondor.Statistics(inv_freq=1), exchange="DELEGATE",
            client=precondor.ClientOptions(connect_timeout=120.0), **options) as pre:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
            before_step(step)
            pre.step()
            optimizer.step()
        return use_of(pre)


def train_over_a_loss(rank, pid, command, **arguments):
    """Kills the process `pid` in a step, and runs `command` in its place."""
    started = []

    def before_step(step):
        if step != LOST:
            return
        dist.barrier()
        if rank == 0:
            ended = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([ended], [], [])  # its data directory is free then
            os.close(ended)
            started.append(subprocess.Popen(command[0], env={**os.environ, **command[1]}))

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    try:
        use = _train(rank, model=model, layers=model, before_step=before_step, **arguments)
    finally:
        dist.barrier()
        for process in started:
            process.kill()
            process.wait()
    return [parameter.detach().numpy() for parameter in model.parameters()], use


def train_in_parts(rank, **arguments):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 3))
    fully_shard(model)
    use = _train(rank, model=model, layers=model, **arguments)
    return [parameter.full_tensor().detach().numpy() for parameter in model.parameters()], use


FUNCTIONS = {function.__name__: function for function in (train, train_over_a_loss, train_in_parts)}
