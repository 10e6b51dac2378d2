# SPDX-License-Identifier: Apache-2.0
"""A rank of torch_ranks_test.py: a process in a gloo group that does what it is told, one function after the other."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import multiprocessing
import os
import signal
import types
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import precondor.torch
from interop_test import TIMEOUT_S
from precondor.torch import _exchange, _group
import torch_training


def train(rank, ddp=False, default_dtype=torch.float32, **arguments):
    """torch_training.train, as what pickles; and the session's exchange. default_dtype: of torch, while it trains."""
    def wrap(model):
        torch.set_default_dtype(default_dtype)  # the model has been made
        return nn.parallel.DistributedDataParallel(model) if ddp else model

    try:
        losses, weights, results, scale = torch_training.train(rank=rank, world_size=dist.get_world_size(), wrap=wrap,
                                                               **arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    exchange = arguments.get("exchange") or ("DELEGATE" if ddp else "DIRECT")
    return losses, [weight.numpy() for weight in weights], [dataclasses.asdict(result) for result in results], exchange, scale


def resume(rank, folder, stops, end=True, **arguments):
    """torch_training.train_with_checkpoints in parts that end before the steps of `stops`; the last ends the session."""
    for stop in stops:
        weights, _ = torch_training.train_with_checkpoints(rank=rank, world_size=dist.get_world_size(), folder=folder,
                                                           steps=stop, end=end and stop == stops[-1], **arguments)
    return weights


def distributed_checkpoint(rank, address, session, folder):
    """Returns a state with factors as torch.distributed.checkpoint saves and loads it, and the step that it resumes at."""
    import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel  # a second
    case = torch_training.CASES["mlp"]
    model = case.model()
    states = []
    for step in range(2):
        with precondor.torch.Preconditioner(model, address, session=session, method="mkor") as pre:
            if step == 1:
                loaded = {"pre": pre.state_dict(factors=True)}
                dcp.load(loaded, checkpoint_id=folder)
                pre.load_state_dict(loaded["pre"])
                states.append(loaded["pre"])
            x, y = (part[rank::2].float() for part in case.batch_of(step))
            torch_training.loss_of(model(x), y).backward()
            pre.step()
            if step == 0:
                states.append(pre.state_dict(factors=True))
                dcp.save({"pre": states[0]}, checkpoint_id=folder)
        model.zero_grad()
    factors = [[part.numpy().copy() for part in state.get("factors", ())] for state in states]
    return factors, pre.step_number


def unequal(rank, address, session, exchange):
    """Rank 0 has six of eight samples."""
    case = torch_training.CASES["mlp"]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), case.rate)
    mine = slice(0, 6) if rank == 0 else slice(6, 8)
    with precondor.torch.Preconditioner(model, address, session=session, exchange=exchange, method="identity") as pre:
        for step in range(3):
            x, y = (part[mine].float() for part in case.batch_of(step))
            optimizer.zero_grad()
            torch_training.loss_of(model(x), y).backward()
            pre.step(samples=len(x))
            optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def lookups(rank, address, session, how, exchange, method):
    """The result of an embedding's gradient, by step. Both look up every row first, then each rank others."""
    torch.manual_seed(1)
    model = called = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    if how == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp":
        from torch.distributed.fsdp import fully_shard  # pylint: disable=import-outside-toplevel
        fully_shard(model)
    answers = []
    with precondor.torch.Preconditioner(called, address, session=session, exchange=exchange, method="identity",
                                        selection=precondor.Selection(embeddings=method)) as pre:
        for rows in (range(7), range(7), ((0, 2), (2, 5))[rank], ((), (6,))[rank]):
            called.zero_grad()
            called(torch.tensor([*rows, 1])).square().sum().backward()
            pre.step(1.0)
            gradient = model[0].weight.grad
            answers.append((gradient.full_tensor() if how == "fsdp" else gradient).numpy().copy())
    return answers


def unused(rank, address, session, exchange, method="mkor"):
    """Rank 1 does not use layer "1" in its two steps."""
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = torch.optim.Adam(model.parameters())
    with precondor.torch.Preconditioner(model, address, session=session, exchange=exchange, method=method, optimizer=optimizer) as pre:
        decisions = []
        for _ in range(2):
            optimizer.zero_grad()
            output = model[0](torch.ones(2, 3) + rank)
            if rank == 0:
                output = model[1](output)
            output.square().mean().backward()
            own = torch.zeros(3, 3) if model[1].weight.grad is None else model[1].weight.grad.clone()
            decisions.append(pre.step().decisions["1"])
            optimizer.step()
    return {"decisions": decisions, "weights": [p.tolist() for p in model.parameters()], "own": own.tolist(),
            "answer": model[1].weight.grad.tolist()}


def orphan(rank, address, session, server):
    """The server is killed in the second step of a net whose only layer is rank 0's to send."""
    model = nn.Linear(3, 3)
    with precondor.torch.Preconditioner(model, address, session=session, exchange="DELEGATE", method="mkor", client=precondor.ClientOptions(result_timeout=1.0)) as pre:
        for step in range(2):
            model(torch.ones(2, 3)).square().mean().backward()
            dist.barrier()
            if rank == 0 and step == 1:
                os.kill(server, signal.SIGKILL)
            pre.step(learning_rate=0.1)


def uneven(rank, address, session):
    """Rank 1 has a batch less. The job averages the norm's gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    pre = precondor.torch.Preconditioner(model, address, session=session, client=precondor.ClientOptions(result_timeout=1.0))
    optimizer = pre.make_optimizer(0.01)
    try:
        for _ in range(3 - rank):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            pre.step()
            optimizer.step()
    finally:
        pre.close()


def absent(rank, address, session, method, overlap=False, scale=None, ends=False):
    """Rank 1 has a batch less. Its error's text, and which classes it has. ends: rank 1 ends the session where it stops."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = called = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    options = {}
    if overlap:
        called = nn.parallel.DistributedDataParallel(model, process_group=group)
        options = {"exchange": "DIRECT", "overlap": True}
    pre = precondor.torch.Preconditioner(called, address, session=session, process_group=group, method=method,
                                         statistics=precondor.Statistics(inv_freq=1), **options)
    optimizer = pre.make_optimizer(0.01) if method is None else torch.optim.SGD(model.parameters(), 0.01)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    try:
        for _ in range(3 - (rank == 1)):
            optimizer.zero_grad()
            loss = called(torch.ones(2, 4)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            pre.step(scaler=scaler)
            optimizer.step()
            if scaler is not None:
                scaler.update()
        pre.close(end_session=ends)
        answer = None
    except Exception as error:  # the test's to judge  # pylint: disable=broad-except
        answer = str(error), [one.__name__ for one in type(error).__mro__]
    finally:
        pre.close()
    dist.barrier()  # of the default group: rank 1 is there and does not come
    return answer


def without_room(rank, address, session, freed):
    """Returns the table of layers, warnings and last weights of the default. freed: rank 0 alone finds no room, and then there is some."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 4))
    open_session = precondor.Client.open_session

    def refuse_once(client, spec):
        if not spec.method.options:
            return open_session(client, spec)
        raise precondor.ResourceExhaustedError("no room", "RESOURCE_EXHAUSTED", "CAPACITY")

    with warnings.catch_warnings(record=True) as caught, \
            mock.patch.object(precondor.Client, "open_session", refuse_once if freed and rank == 0 else open_session):
        warnings.simplefilter("always")
        pre = precondor.torch.Preconditioner(model, address, session=session)
    with pre:
        optimizer = pre.make_optimizer(0.01)
        for step in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))).square().mean()
            loss.backward()
            pre.step(loss)
            optimizer.step()
        return str(pre), [str(one.message) for one in caught], [parameter.detach().numpy() for parameter in model.parameters()]


def differ(rank, address, session):
    """Never gets so far as to train."""
    precondor.torch.Preconditioner(nn.Linear(3, 3 + rank), address, session=session)


def agree(rank, address, session, checksums, steps, failed=None):
    """Compares what would be each rank's factors at every second step; rank `failed` has failed."""
    del address, session
    layers = [precondor.Layer(str(place), 2, 2) for place in range(len(checksums[rank]))]
    worker = types.SimpleNamespace(factors_checksum=checksums[rank].__getitem__, spec=types.SimpleNamespace(inv_freq=2))
    agreement = _exchange.Agreement(worker, _group.Group(None, torch.device("cpu")), layers)
    for step in range(steps):
        agreement.check(step, rank == failed)


def steps(rank, address, session, exchange, count):
    """How many steps it made."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with precondor.torch.Preconditioner(model, address, session=session, exchange=exchange, method="mkor",
                                        statistics=precondor.Statistics(inv_freq=1)) as pre:
        for step in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()
            loss.backward()
            pre.step(loss)
            optimizer.step()
    return count


def buckets(rank, address, session, gradient_as_bucket_view):
    """Gradients of a layer and of a bias that is none: of the rank alone, of DDP with overlap, answered, of DDP afterwards."""
    torch.manual_seed(1)
    plain = nn.Linear(4, 3)
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=gradient_as_bucket_view)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    plain(x).square().mean().backward()
    options = {"exchange": "DIRECT", "method": "identity", "selection": precondor.Selection(fold_bias=False), "overlap": True}
    found = {"alone": (plain.weight.grad.numpy(), plain.bias.grad.numpy())}

    def backward():
        model.zero_grad()
        model(x).square().mean().backward()
        return model.module.weight.grad.numpy().copy(), model.module.bias.grad.numpy().copy()

    def refusal(model):
        try:
            precondor.torch.Preconditioner(model, address, session=f"{session}-refused",
                                           client=precondor.ClientOptions(replace=True), **options).close()
        except precondor.InvalidArgumentError as error:
            return str(error)

    for _ in range(2):
        with precondor.torch.Preconditioner(model, address, session=session, **options) as pre:
            for _ in range(3):  # DDP makes other buckets after the first pass
                found["layer"], found["bias"] = backward()
                pre.step()
                found["answer"] = model.module.weight.grad.numpy().copy()
            found["second"] = refusal(model)
        found["after"], _ = backward()
    other = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    other.register_comm_hook(None, default_hooks.allreduce_hook)
    found["other"] = refusal(other)
    return found


def complex_parameter(rank, address, session, seeds):
    """Its gradient before and after a step, and the warnings of the step."""
    torch.manual_seed(seeds[rank])
    model = nn.Linear(4, 3)
    model.factor = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    with precondor.torch.Preconditioner(model, address, session=session, method="mkor") as pre, \
            warnings.catch_warnings(record=True, action="always") as caught:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).to(torch.cfloat)
        (model(x.real) * (model.factor + 1j) * x[:, :3]).abs().square().mean().backward()
        before = model.factor.grad.numpy().copy()
        pre.step(1.0)
        return before, model.factor.grad.numpy().copy(), [str(one.message) for one in caught]


FUNCTIONS = {function.__name__: function
             for function in (train, resume, unequal, lookups, unused, orphan, uneven, absent, without_room, differ, agree, steps,
                              buckets, distributed_checkpoint, complex_parameter)}


def serve(rank, size, folder, pipe, functions):
    """The process. functions: that it can be told to call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(functions[name](rank, **arguments))
        except Exception as error:  # the test's to judge  # pylint: disable=broad-except
            pipe.send(error)
    dist.destroy_process_group()


def start(size, folder, environments, functions):
    """(processes, pipes to them). environments: what each has beside this process's."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=serve, args=(rank, size, folder, ends[rank][1], functions), daemon=True)
                 for rank in range(size)]
    for process, end, additions in zip(processes, ends, environments):
        before = dict(os.environ)
        os.environ.update(additions)
        process.start()
        os.environ.clear()
        os.environ.update(before)
        end[1].close()
    return processes, [end[0] for end in ends]


_owed = collections.Counter()  # by pipe: answers that had not come in time, and belong to no later question


def ask(ranks, name, deadline_s=TIMEOUT_S, /, **arguments):
    """Returns the function's result on each rank; a raised exception as it was."""
    for rank in ranks:
        while _owed[rank]:
            receive(rank, deadline_s)
            _owed[rank] -= 1
        rank.send((name, arguments))
    return answers_of(ranks, deadline_s)


def receive(rank, deadline_s):
    if not rank.poll(deadline_s):
        raise TimeoutError("a rank does not answer")
    return rank.recv()


def answers_of(ranks, deadline_s):
    _owed.update(ranks)
    answers = []
    for rank in ranks:
        answers.append(receive(rank, deadline_s))
        _owed[rank] -= 1
    return answers


def results(answers):
    """Raises what a rank has raised."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@contextlib.contextmanager
def running(folder, environments, functions=FUNCTIONS):
    """The pipes to ranks of a group, with these additions to their environments."""
    processes, pipes = start(len(environments), folder, environments, functions)
    try:
        yield pipes
    finally:
        for pipe, process in zip(pipes, processes):
            pipe.close()
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
