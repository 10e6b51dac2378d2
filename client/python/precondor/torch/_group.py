# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: torch.distributed's process group, or a single process."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .._errors import AbortedError, DeadlineExceededError, PrecondorError, from_status
from ._hooks import original

_TorchError: Any = getattr(dist, "DistBackendError", RuntimeError)  # torch may be built without its distributed package
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
_LOST = re.compile("closed|closure|reset by peer|broken pipe|refused|aborted|exited", re.IGNORECASE)
_GRACE_S = 2.0  # how long a rank whose collective has failed waits to learn whose has failed too
_MOST_NAMED = 16
_BLOCK = 32  # ranks that are counted together, so that large jobs ask the store little


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a complex tensor's parts, or the tensor."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


class CollectiveDeadlineError(DeadlineExceededError, _TorchError):
    """A rank did not call a collective within the process group's time-out. Is also torch's class of errors."""


class CollectiveAbortedError(AbortedError, _TorchError):
    """A collective failed because another rank ended, or timed out in it. Is also torch's class of errors."""


class Group:
    """Collectives of a process group, which every rank must call in one order. A group of one process communicates with
    no other."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """Makes the group. `device` is the model's, for backends that only support its memory."""
        self._there = there = dist.is_available() and dist.is_initialized()
        self._group = process_group
        self.place = "the constructor"  # what the job does, for messages
        self._calls = 0  # collectives so far, equal on all ranks
        self.rank = dist.get_rank(process_group) if there else 0
        self.size = dist.get_world_size(process_group) if there else 1
        self.device = device if there and "nccl" in dist.get_backend_config(process_group) else torch.device("cpu")
        self._flag = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._flat = torch.zeros(0, dtype=torch.float32, device=self.device)
        self._flags = torch.zeros(0, dtype=torch.float32, device=self.device)
        self._range = torch.zeros(0, dtype=torch.int64, device=self.device)

    def came_later(self) -> bool:
        """Returns whether the process has become one of several ranks since."""
        return not self._there and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def rank_of(self, global_rank: int) -> int:
        """Returns the rank in this group of a process of the job."""
        return global_rank if self._group is None else dist.get_group_rank(self._group, global_rank)

    def check(self, call: Callable[[], Any]) -> Any:
        """Runs call() and returns its result if it succeeded on every rank. If it raised on one rank, raises that error
        on all ranks."""
        own: Optional[Exception] = None
        failure, value = None, None
        try:
            value = call()
        except (CollectiveDeadlineError, CollectiveAbortedError):
            raise  # the next collective would fail too
        except PrecondorError as error:
            own, failure = error, (self.rank, error.code, error.reason, error.message)
        except Exception as error:  # pylint: disable=broad-except  # the others wait in the collective
            own, failure = error, (self.rank, "INTERNAL", "UNSPECIFIED", f"{type(error).__name__}: {error}")
        if self.all(own is None):
            return value
        rank, code, reason, message = next(one for one in self.gather(failure) if one is not None)
        raise own or from_status(code, reason, f"rank {rank}: {message}")

    def gather(self, value: Any) -> List[Any]:
        """Returns every rank's value, in rank order. Values must be small and picklable."""
        if self.size == 1:
            return [value]
        values: List[Any] = [None] * self.size
        with self.waiting("all_gather_object"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def all(self, flag: bool) -> bool:
        """Returns whether the flag is true on every rank."""
        if self.size == 1:
            return flag
        self._flag[0] = 0.0 if flag else 1.0
        with self.waiting("all_reduce"):
            dist.all_reduce(self._flag, group=self._group)
            return self._flag.item() == 0

    def any_of(self, flags: torch.Tensor) -> torch.Tensor:
        """Returns for each of bools [n] whether it is true on any rank. n must be equal on all ranks."""
        if self.size == 1:
            return flags
        if self._flags.numel() < flags.numel():
            self._flags = torch.zeros(flags.numel(), dtype=torch.float32, device=self.device)
        counts = self._flags[:flags.numel()]
        counts.copy_(flags)
        with self.waiting("all_reduce"):
            dist.all_reduce(counts, group=self._group)
            return counts.to(flags.device) > 0

    def range_of(self, values: Sequence[int]) -> Tuple[List[int], List[int]]:
        """Returns for each value, from 0 to 2^62, the minimum and the maximum over all ranks."""
        if self.size == 1:
            return list(values), list(values)
        if self._range.numel() < 2 * len(values):
            self._range = torch.zeros(2 * len(values), dtype=torch.int64, device=self.device)
        both = self._range[:2 * len(values)]
        both.copy_(torch.tensor([*(-value for value in values), *values], dtype=torch.int64, device="cpu"))
        with self.waiting("all_reduce"):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
            least, greatest = both.view(2, -1).tolist()
        return [-value for value in least], greatest

    def broadcast(self, flat: torch.Tensor, rank: int) -> None:
        """Overwrites `flat`, on any device, with that of `rank`."""
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)
        there = flat.to(self.device)  # `flat` itself if it is there
        with self.waiting("broadcast"):
            dist.broadcast(there, source, group=self._group)
        if there is not flat:
            flat.copy_(there)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, received_sizes: List[int], sent_sizes: List[int]) -> None:
        """Exchanges parts of flat tensors on `device`. A rank's sizes must match those that the other ranks expect."""
        with self.waiting("all_to_all_single"):
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)

    def average_gradients(self, parameters: Sequence[torch.nn.Parameter], samples: int) -> None:
        """Replaces .grad, which is not sparse, by the mean over all ranks, weighted by their samples. A rank without a gradient
        counts as zeros. If no rank has a gradient, .grad stays None."""
        if self.size == 1 or not parameters:
            return
        sizes = [1] * (1 + len(parameters)) + [_real(parameter).numel() for parameter in parameters]
        if self._flat.numel() != sum(sizes):
            self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        total, *parts = self._flat.zero_().split(sizes)
        held, values = parts[:len(parameters)], parts[len(parameters):]
        total.fill_(samples)
        for there, parameter, value in zip(held, parameters, values):
            if parameter.grad is not None:
                there.fill_(1)
                value.copy_(_real(parameter.grad).reshape(-1)).mul_(samples)
        with self.waiting("all_reduce"):
            dist.all_reduce(self._flat, group=self._group)
        self._flat[len(held) + 1:] /= self._flat[0]
        for count, parameter, value in zip(self._flat[1:len(held) + 1].tolist(), parameters, values):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to = _real(parameter.grad)
            to.copy_(value.view_as(to))

    @contextlib.contextmanager
    def waiting(self, name: str, ordered: bool = True) -> Iterator[None]:
        """Context of a collective. Replaces torch's error of a time-out or a lost connection by one that names the ranks
        that have not called the collective. ordered: all ranks call it between equal neighbours."""
        self._calls += ordered
        call = self._calls if ordered else 0
        try:
            yield
        except RuntimeError as error:
            timed_out = _TIMED_OUT.search(str(error)) is not None
            if isinstance(error, PrecondorError) or str(error).startswith("CUDA") or not (timed_out or _LOST.search(str(error))):
                raise
            kind, code = (CollectiveDeadlineError, "DEADLINE_EXCEEDED") if timed_out else (CollectiveAbortedError, "ABORTED")
            raise kind(f"{self.place}: rank {self.rank} waited in {name} of torch.distributed; {self._missing(name, call)}", code, "UNSPECIFIED",
                       "Every rank must make equally many steps; a rank that has ended says why itself") from error

    def _missing(self, name: str, call: int) -> str:
        """Returns a text that names the ranks that have not called the collective: theirs has not failed with this rank's."""
        found = []

        def find() -> None:
            try:
                found.append(self._find_missing(f"{self.place}, {name}", call))
            except Exception as error:  # pylint: disable=broad-except  # of the store, or of torch's internals
                found.append(f"which ranks are missing is unknown: the process group's store failed: {error}".splitlines()[0])

        thread = threading.Thread(target=find, daemon=True)  # the store may be on a host that is lost
        thread.start()
        thread.join(2 * _GRACE_S)
        return found[0] if found else "which ranks are missing is unknown: the process group's store does not answer"

    def _find_missing(self, place: str, call: int) -> str:
        """Tells the other ranks through the store that this one has waited `here`. A step without an error writes nothing."""
        c10d = dist.distributed_c10d
        store = c10d._pg_map[self._group or c10d._get_default_group()][1]
        here = f"{place} {call}"

        def count(key: Any, increment: int = 0) -> int:  # a key that was never set counts 0
            return store.add(f"precondor/{key}", increment)

        store.set(f"precondor/{self.rank}", place)
        count(f"any/{self.rank}", 1)
        store.set(f"precondor/{here}/last", str(self.rank))
        if count(f"{here}/{self.rank}", 1) == 1:
            count(f"{here}/block {self.rank // _BLOCK}", 1)
            count(here, 1)
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and count(here) < self.size:
            time.sleep(0.1)
        absent: List[int] = []
        for begin in range(0, self.size, _BLOCK):
            ranks = range(begin, min(begin + _BLOCK, self.size))
            if count(f"{here}/block {begin // _BLOCK}") < len(ranks):
                absent += [rank for rank in ranks if count(f"{here}/{rank}") == 0]
        texts = [f"rank {rank} waits in {store.get(f'precondor/{rank}').decode()}" if count(f"any/{rank}") else
                 f"rank {rank} has not called it" for rank in absent[:_MOST_NAMED]]
        texts += [f"and {len(absent) - _MOST_NAMED} more ranks"] if len(absent) > _MOST_NAMED else []
        return ", ".join(texts) or f"all ranks have called it, rank {store.get(f'precondor/{here}/last').decode()} as the last"


def inside(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside DistributedDataParallel and what torch.compile has wrapped around both."""
    model = original(model)
    return original(model.module) if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def of(model: torch.nn.Module, process_group: Any) -> Tuple[torch.nn.Module, Group, bool]:
    """Returns the model inside DistributedDataParallel, its group, and whether DDP averages the gradients."""
    outer, model = original(model), inside(model)
    averaged = outer is not model
    if averaged:
        process_group = process_group or outer.process_group
    first: Optional[torch.nn.Parameter] = next(model.parameters(), None)
    return model, Group(process_group, torch.device("cpu") if first is None else first.device), averaged
