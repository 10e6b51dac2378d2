# SPDX-License-Identifier: Apache-2.0
"""What the examples share about training: command line, optimizer, preconditioner, loop and report."""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, Tuple

import torch
import torch.distributed

import precondor
from precondor import METHODS
from precondor.torch import Preconditioner
from program import open_json, positive, positive_number, write_json


class Job:
    """This process's place among those that torchrun has started; a single one without torchrun. A context manager."""

    def __init__(self):
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world_size > 1:
            torch.distributed.init_process_group("gloo")

    @property
    def first(self):
        return self.rank == 0

    def wrap(self, model):
        """The model, whose gradients are averaged over ranks where there are several."""
        return torch.nn.parallel.DistributedDataParallel(model) if self.world_size > 1 else model

    def share(self, value):
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def mean(self, values):
        """The means over ranks of a list of numbers."""
        totals = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            torch.distributed.all_reduce(totals)
        return (totals / self.world_size).tolist()

    def part_of(self, batch):
        """This rank's rows of each tensor of a batch; as many as any other rank's."""
        part = len(batch[0]) // self.world_size
        return tuple(tensor[self.rank * part:(self.rank + 1) * part] for tensor in batch)

    def __enter__(self):
        return self

    def __exit__(self, error, *unused):
        if self.world_size > 1:
            if error is None:
                torch.distributed.barrier()  # the server ends with the first rank
            torch.distributed.destroy_process_group()


@dataclasses.dataclass
class Task:
    """A model, its data, and settings that were tried.

    batch: the whole batch of a step, a tuple of tensors with a row an example; each rank trains on its part.
    loss: the mean over a batch's rows. held_out: numbers of a model on data that it was not trained on; one is "loss".
    rates: the learning rate for each way to precondition. mkor_options: what method mkor gets unless told otherwise.
    """

    name: str
    make_model: Callable[[], torch.nn.Module]
    batch: Callable[[int], Tuple[torch.Tensor, ...]]
    loss: Callable[[torch.nn.Module, Tuple[torch.Tensor, ...]], torch.Tensor]
    held_out: Callable[[torch.nn.Module], Dict[str, float]]
    rates: Dict[str, float]
    mkor_options: Dict[str, Any]
    skip: Tuple[str, ...] = ()  # names of layers that are not preconditioned


def method_option(text):
    """name=value as a pair; the value is a number or true or false where it reads like one."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text}")
    if value in ("true", "false"):
        return name, value == "true"
    with contextlib.suppress(ValueError):
        return name, float(value)
    return name, value


def add_arguments(parser, steps, batch):
    """Adds the arguments that gpt and convnet share."""
    group = parser.add_argument_group("preconditioner")
    group.add_argument("--precondition", choices=("server", "none"), default="server", help="by Precondor or not at all (%(default)s)")
    group.add_argument("--method", choices=sorted(METHODS), default="mkor", help="the server's (%(default)s)")
    group.add_argument("--option", type=method_option, action="append", default=[], metavar="NAME=VALUE",
                       help="of the method, e.g. rank=32; may be repeated")
    group.add_argument("--exchange", default="", choices=("", "DIRECT", "DELEGATE", "REPLAY", "PULL_FACTORS"),
                       help="DIRECT: the server averages gradients; DELEGATE: the ranks have (DELEGATE under torchrun); REPLAY, "
                       "PULL_FACTORS: and each works out its answer itself")
    group.add_argument("--gradient-dtype", choices=("f32", "bf16", "f16"), default="f32", help="on the wire (%(default)s)")
    group.add_argument("--overlap", action="store_true",
                       help="gradients leave during the backward pass; not under torchrun, where they are averaged first")
    group.add_argument("--server", metavar="ADDRESS", default="local",
                       help="one that runs already, host:port or unix:/path/to/socket; else one is started for this run")
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=positive, default=steps, help="optimizer steps (%(default)s)")
    group.add_argument("--batch", type=positive, default=batch, help="rows of a step, over all ranks (%(default)s)")
    group.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    group.add_argument("--learning-rate", type=positive_number, metavar="RATE",
                       help="at first; it falls to 0 along a line (a rate that was tried, for the example and preconditioner)")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--eval-every", type=positive, default=50, help="steps between looks at held-out data (%(default)s)")
    group.add_argument("--quiet", action="store_true", help="no progress")
    group.add_argument("--json", metavar="FILE", help="write settings, losses and times; - is standard output")


def make_optimizer(arguments, model, rate):
    """Weight decay for matrices, not for biases and what normalisation has."""
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    if arguments.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9)
    return torch.optim.AdamW(groups, lr=rate)


class Trainer:
    """A model, its optimizer and its preconditioner, one step at a time."""

    def __init__(self, task, arguments, job):
        torch.manual_seed(arguments.seed)  # the same weights on every rank
        self.task = task
        self.job = job
        self.model = job.wrap(task.make_model())
        self.rate = arguments.learning_rate or task.rates[arguments.precondition]
        self.optimizer = make_optimizer(arguments, self.model, self.rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / arguments.steps))
        self.server_side = None
        if arguments.precondition == "server":
            tried = task.mkor_options if arguments.method == "mkor" else {}
            self.server_side = Preconditioner(self.model, arguments.server, optimizer=self.optimizer,
                                              session=job.share(f"{task.name}-{os.getpid()}-{time.time_ns()}"),
                                              method=precondor.Method(arguments.method, {**tried, **dict(arguments.option)}),
                                              exchange=arguments.exchange, skip=task.skip, overlap=arguments.overlap,
                                              gradient_dtype=arguments.gradient_dtype, seed=arguments.seed)

    def step(self, number):
        """One optimizer step; this rank's loss."""
        batch = self.job.part_of(self.task.batch(number))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, batch)
        loss.backward()
        if self.server_side is not None:
            self.server_side.step(loss)
        self.optimizer.step()
        self._schedule.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        model = self.model.module if self.job.world_size > 1 else self.model
        model.eval()
        numbers = self.task.held_out(model)
        model.train()
        return numbers

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Ends the session too, unless there is an error."""
        if self.server_side is not None:
            self.server_side.__exit__(*error)


def train(trainer, arguments, job):
    """All steps. Returns losses (means over ranks), held-out numbers, and seconds of each step."""
    losses, held_out, seconds = [], [], []
    first = time.monotonic()
    for step in range(arguments.steps):
        begin = time.monotonic()
        losses.append(trainer.step(step))
        seconds.append(time.monotonic() - begin)
        if job.first and ((step + 1) % arguments.eval_every == 0 or step + 1 == arguments.steps):
            held_out.append({"step": step + 1, **trainer.evaluate()})
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in held_out[-1].items() if name != "step")
            if not arguments.quiet:
                print(f"{trainer.task.name}: step {step + 1} of {arguments.steps}, {time.monotonic() - first:.0f} s, "
                      f"training loss {losses[-1]:.4f}, held-out {numbers}", file=sys.stderr, flush=True)
    return job.mean(losses), held_out, seconds


def report_of(task, arguments, job, trainer, results):
    losses, held_out, seconds = results
    server_side = trainer.server_side
    return {
        "example": task.name, "precondition": arguments.precondition, "method": arguments.method if server_side else None,
        "optimizer": arguments.optimizer, "learning_rate": trainer.rate, "steps": arguments.steps, "batch": arguments.batch,
        "world_size": job.world_size, "seed": arguments.seed,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "preconditioned_layers": [layer.name for layer in server_side.layers] if server_side else [],
        "losses": losses, "held_out": held_out, "median_step_seconds": statistics.median(seconds),
        "metrics": server_side.metrics() if server_side else {},
    }


def run_task(parser, arguments, make_task):
    """Trains and reports, on every rank."""
    with Job() as job:
        if arguments.batch % job.world_size:
            parser.error(f"--batch: expected a multiple of the {job.world_size} ranks, got {arguments.batch}")
        if job.first:
            open_json(arguments.json)
        task = make_task(arguments)
        with Trainer(task, arguments, job) as trainer:
            report = report_of(task, arguments, job, trainer, train(trainer, arguments, job))
        if not job.first:
            return
        if arguments.json:
            write_json(arguments.json, report)
        if arguments.json != "-":
            print(f"{task.name}: {arguments.precondition}, {arguments.optimizer} at {report['learning_rate']:g}: "
                  f"training loss {report['losses'][-1]:.4f}, held-out loss {report['held_out'][-1]['loss']:.4f} after "
                  f"{arguments.steps} steps of {1e3 * report['median_step_seconds']:.1f} ms")
