# SPDX-License-Identifier: Apache-2.0
"""This process's place among the ranks of an example."""

import os

import torch
import torch.distributed

# What the last collective worked on: gloo's threads let go of a tensor after its collective is over, and if theirs is the last
# reference they want the interpreter's lock for it, with which torch 1.13 waits for them when a group ends.
_kept = []


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
            _kept.append(totals)
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
                torch.distributed.barrier()  # gives gloo's threads the time to let go of what came before
            torch.distributed.destroy_process_group()
