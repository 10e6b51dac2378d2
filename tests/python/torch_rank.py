# SPDX-License-Identifier: Apache-2.0
"""A rank of torch_ranks_test.py: a process in a gloo group that does what it is told, one function after the other."""

import dataclasses
import multiprocessing

import torch
import torch.distributed as dist
from torch import nn

import precondor.torch
import torch_training


def train(rank, ddp=False, **arguments):
    """torch_training.train, as what pickles; and the session's exchange."""
    wrap = nn.parallel.DistributedDataParallel if ddp else None
    losses, weights, results = torch_training.train(rank=rank, world_size=dist.get_world_size(), wrap=wrap, **arguments)
    exchange = arguments.get("exchange") or ("DELEGATE" if ddp else "DIRECT")
    return losses, [weight.numpy() for weight in weights], [dataclasses.asdict(result) for result in results], exchange


def resume(rank, folder, stops, end=True, **arguments):
    """torch_training.train_with_checkpoints in parts that end before the steps of `stops`; the last ends the session."""
    for stop in stops:
        weights, _ = torch_training.train_with_checkpoints(rank=rank, world_size=dist.get_world_size(), folder=folder,
                                                           steps=stop, end=end and stop == stops[-1], **arguments)
    return weights


def unused(rank, address, session, exchange):
    """Rank 1 does not use layer "1" in its only step."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = torch.optim.Adam(model.parameters())
    with precondor.torch.Preconditioner(model, address, session=session, exchange=exchange, optimizer=optimizer) as pre:
        output = model[0](torch.ones(2, 3) + rank)
        if rank == 0:
            output = model[1](output)
        output.square().mean().backward()
        decisions = pre.step().decisions
        optimizer.step()
    return {"decision": decisions["1"], "weights": [p.tolist() for p in model.parameters()]}


def differ(rank, address, session):
    """Never gets so far as to train."""
    precondor.torch.Preconditioner(nn.Linear(3, 3 + rank), address, session=session)


def serve(rank, size, folder, pipe):
    """The process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send({"train": train, "resume": resume, "unused": unused, "differ": differ}[name](rank, **arguments))
        except Exception as error:  # the test's to judge  # pylint: disable=broad-except
            pipe.send(error)
    dist.destroy_process_group()


def start(size, folder):
    """(processes, pipes to them)."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=serve, args=(rank, size, folder, ends[rank][1]), daemon=True) for rank in range(size)]
    for process, end in zip(processes, ends):
        process.start()
        end[1].close()
    return processes, [end[0] for end in ends]
