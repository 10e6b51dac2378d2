# SPDX-License-Identifier: Apache-2.0
"""The training of torch_fsdp_test.py in each rank: small nets, under DistributedDataParallel, fully_shard or tensor
parallelism."""

import contextlib
import gc
import pathlib
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, PrepareModuleInputOutput, RowwiseParallel,
                                               SequenceParallel, parallelize_module)

import precondor.torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "e2e/chaos"))
from cluster import wait_for  # noqa: E402  pylint: disable=wrong-import-position

STEPS, BATCH = 6, 8


class Block(nn.Module):
    """With sides that few numbers of ranks divide, and that some ranks have none of."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Right(nn.Module):
    """Multiplies by its weight from the right: a rank's rows of it are columns of the layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x @ self.weight + self.bias


precondor.torch.register_layer(Right, transposed=True)


class Experts(nn.Module):
    """A row goes to one of two; no row to the third."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, 6) / 3)

    def forward(self, x):
        return x + torch.tanh(self.weight[(x[:, 0] > 0).long()] @ x[..., None])[..., 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.conv(x).flatten(1)[:, :6]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(how, reshard=True, hsdp=False, by_columns=False, compiled=False, bf16=False, transposed=False, mixture=False):
    """(the model, what is called)"""
    torch.manual_seed(3)
    model = Net()
    if transposed:
        model.blocks[1] = Right()
    if mixture:
        model.blocks[0] = Experts()
    if how == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if hsdp else \
        init_device_mesh("cpu", (size,))
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if by_columns:  # what torch can so divide: even parts alone
        options["shard_placement_fn"] = lambda parameter: (
            Shard(1) if parameter.dim() == 2 and parameter.shape[1] % size == 0 else None)
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, model


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().numpy()


def statistics(kind=""):
    return precondor.Statistics(kind, inv_freq=2, warmup_steps=2)


def train(rank, address, session, how, reshard=True, hsdp=False, by_columns=False, compiled=False, bf16=False,
          transposed=False, mixture=False, micro_batches=1, clip=False, optimizer="AdamW", pause=None, **options):
    """(last weights, whole; decisions of the last step; names of layers; the losses).

    pause: a path. In the middle of the run rank 0 makes a file of it, and goes on with its step once there is one more, `.over`.
    """
    size = dist.get_world_size()
    model, called = make(how, reshard, hsdp, by_columns, compiled, bf16, transposed, mixture)
    losses = []
    with precondor.torch.Preconditioner(called, address, session=session,
                                        **{"method": "mkor", "statistics": statistics(), "exchange": "DELEGATE", **options}) as pre:
        if optimizer == "made":
            optimizer = pre.make_optimizer(0.02)
        else:
            optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02)
        pre.attach(optimizer)  # which does nothing after a step by hand
        for step in range(STEPS):
            x = torch.randn(BATCH * size, 2, 3, 3, generator=torch.Generator().manual_seed(step))[rank::size]
            y = torch.stack([x.sum((1, 2, 3)), x[:, 0].sum((1, 2)), x[:, 1, 0, 0]], 1).tanh()
            optimizer.zero_grad()
            parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches)))
            for place, (part_x, part_y) in enumerate(parts):
                with pre.no_sync() if place + 1 < len(parts) else contextlib.nullcontext():
                    loss = nn.functional.mse_loss(called(part_x).float(), part_y) / len(parts)
                    loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if pause is not None and rank == 0 and step == STEPS // 2:
                pathlib.Path(pause).touch()
                wait_for("the test to go on", pathlib.Path(f"{pause}.over").exists)
            if step % 2 or step == STEPS - 1:
                result = pre.step(loss)
            optimizer.step()
            losses.append(loss.item())
        names = [layer.name for layer in pre.layers]
    return [whole(parameter) for parameter in model.parameters()], result.decisions, names, losses


def spoiled(rank, address, session, exchange):
    """Makes three steps, in the second of which rank 1's part of one gradient has a NaN: (skipped, decisions, whether no gradient is left)."""
    model, _ = make("fsdp")
    told = []
    with precondor.torch.Preconditioner(model, address, session=f"{session}-{exchange}", exchange=exchange, method=None) as pre:
        optimizer = pre.make_optimizer(0.02)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(BATCH, 2, 3, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            if step == rank == 1:
                model.head.weight.grad.to_local().view(-1)[-1] = float("nan")
            result = pre.step()
            optimizer.step()
            told.append((result.skipped, set(result.decisions.values()), not any(one.grad is not None for one in model.parameters())))
    return told


class Residual(nn.Module):
    """A model that tensor parallelism divides: `up` by its outputs, `down` by its inputs."""

    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Residuals(nn.Sequential):
    """For inputs of 6 numbers; with `words` for words, of which there are 7."""

    def __init__(self, hidden, words):
        torch.manual_seed(3)
        super().__init__(Residual(hidden), Residual(hidden), nn.Linear(6, 4))
        self.words = nn.Embedding(7, 6) if words else None

    def forward(self, x):
        if self.words is not None:
            x = self.words((x[..., 0].abs() * 3).long().clamp(0, 6))
        return self[2](self[1](self[0](x)))


def divided(tensor, sequence, partial, hidden, words, hsdp):
    """(the model, the rank's place among the data) for groups of `tensor` ranks, with fully_shard if there are several."""
    model = Residuals(hidden, words)
    data = dist.get_world_size() // tensor
    if hsdp:
        mesh = init_device_mesh("cpu", (data, 1, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
        fully = mesh["replicate", "shard"]
    elif data > 1:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        fully = mesh["data"]
    else:
        mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tensor",))
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    if sequence:  # between the layers each rank has a part of the rows
        plan = {"0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)}
        for block in "01":
            plan.update({f"{block}.norm": SequenceParallel(use_local_output=True),
                         f"{block}.up": ColwiseParallel(input_layouts=Shard(1)), f"{block}.down": RowwiseParallel(output_layouts=Shard(1))})
        plan["2"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    if partial:  # each rank has a term of the gradient of the last weight, from its rows
        for name, one in list(model[2].named_parameters()):
            model[2].register_parameter(name, nn.Parameter(distribute_tensor(one.detach(), mesh["tensor"], [Replicate()])))
        plan["2"] = PrepareModuleInputOutput(
            input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_input=False, output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),))
    if words:  # by its rows
        plan["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    if data > 1:
        for block in list(model)[:2]:
            fully_shard(block, mesh=fully)
        fully_shard(model, mesh=fully)
    return model, dist.get_rank() // tensor, data


def train_divided(rank, address, session, tensor, sequence=False, partial=False, hidden=8, words=False, hsdp=False, optimizer="AdamW",
                  **options):
    """The last weights, whole, and the decisions of the last step. With `tensor` 1 every rank has a whole model: alone
    with the data, if `tensor` is None, or under DistributedDataParallel."""
    if tensor is None:
        groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
        options["process_group"], session = groups[rank], f"{session}-{rank}"
        model, place, data = Residuals(hidden, words), 0, 1
        called = model
    elif tensor == 1:
        model, place, data = Residuals(hidden, words), rank, dist.get_world_size()
        called = nn.parallel.DistributedDataParallel(model)
    else:
        model, place, data = divided(tensor, sequence, partial, hidden, words, hsdp)
        called = model
    with precondor.torch.Preconditioner(called, address, session=session,
                                        **{"method": "mkor", "statistics": statistics(), **options}) as pre:
        optimizer = pre.make_optimizer(0.02) if optimizer == "made" else getattr(torch.optim, optimizer)(model.parameters(), lr=0.02)
        for step in range(STEPS):
            x = torch.randn(4 * data, 6, 6, generator=torch.Generator().manual_seed(step))[place::data]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(called(x), x[..., :4].sin())
            loss.backward()
            decisions = pre.step(loss, learning_rate=0.02).decisions
            optimizer.step()
    return [whole(parameter) for parameter in model.parameters()], decisions


def refused(rank, address, session, case):
    """The error that Preconditioner, or its first step, raises."""
    del rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, options, scaler = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}, None
    if case.startswith("fsdp1"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params="original" in case)
        model = model.module if "inside" in case else model
    elif case == "plain":
        options = {"exchange": "SHARDED"}
    elif case == "tensor and ddp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    elif case == "outside":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
        fully_shard(model[1], mesh=mesh["data"])
    elif case == "convolution":
        model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten())
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    elif case in ("blocks", "covariance"):
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        options = {"selection": precondor.Selection(blocks={"0": 2})} if case == "blocks" else {
            "method": "kfac", "statistics": precondor.Statistics("COVARIANCE")}
    elif case == "part":
        fully_shard(model[0], mesh=mesh)
    else:
        fully_shard(model, mesh=mesh)
        options = {"exchange": {"exchange": "REPLAY"}, "overlap": {"overlap": True}}.get(case, {})
        scaler = torch.amp.GradScaler("cpu") if case == "scaler" else None
    try:
        pre = precondor.torch.Preconditioner(model, address, session=session, **{"method": "mkor", **options})
        try:
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            pre.step(loss, scaler=scaler)
        finally:
            pre.close(end_session=True)
    except precondor.PrecondorError as error:
        return error
    return None


def missed(rank, address, session, exchange):
    """The error of a step in which the first rank, and no other, has a gradient of a layer that it did not call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    called = torch.compile(model, fullgraph=True, backend="eager")
    pre = precondor.torch.Preconditioner(called, address, session=session, exchange=exchange, method="mkor")
    try:
        loss = called(torch.ones(2, 4)).sum()
        if rank == 0:
            pre.discard()
            loss = nn.functional.linear(torch.ones(2, 4), model[0].weight, model[0].bias).sum() + model[1](torch.ones(2, 4)).sum()
        loss.backward()
        pre.step(loss)
    except precondor.PrecondorError as error:
        return error
    finally:
        pre.close(end_session=True)
    return None


def released(rank, address, session):
    """How many of the exchange's buffers outlive the Preconditioner."""
    del rank
    model, _ = make("fsdp")
    with precondor.torch.Preconditioner(model, address, session=session, method="mkor") as pre:
        model(torch.ones(2, 2, 3, 3)).sum().backward()
        pre.step()
        buffers = [weakref.ref(buffer) for buffer in pre._pieces._buffers.values()]
    del pre
    gc.collect()
    return sum(buffer() is not None for buffer in buffers), len(buffers)


FUNCTIONS = {function.__name__: function for function in (train, train_divided, refused, missed, released, spoiled)}
