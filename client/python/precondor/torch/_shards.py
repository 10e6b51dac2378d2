# SPDX-License-Identifier: Apache-2.0
"""Moves gradients of a model under fully_shard (FSDP2): the rows of each layer go to the rank that sends it, and the
rows of its answer come back.

Each rank has a rectangle of every parameter, which torch's DTensor describes. One all-to-all of a step moves the
rectangles to the layers' owners, and a second one moves the answers to all ranks that have a part of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._group import Group
from ._layers import Matrix, has_gradient

# A parameter's rectangle on a rank: whether this rank sends it (one of several equal rectangles is sent), offsets,
# sizes.
_Rectangle = Tuple[bool, Tuple[int, ...], Tuple[int, ...]]


def is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "__create_chunk_list__") and hasattr(parameter, "device_mesh")


def modules_of(model: nn.Module) -> List[Any]:
    """Returns the modules with which fully_shard has been called."""
    return [module for module in model.modules() if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the tensor, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def refuse_unknown(model: nn.Module, world_size: int) -> bool:
    """Returns whether the model is under fully_shard. Raises UnimplementedError for parameters that are divided in
    another way."""
    names = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    under_fsdp = bool(modules_of(model))
    for name, parameter in names.items():
        kinds = [type(one).__name__ for one in parameter.placements]
        if not under_fsdp or kinds not in (["Shard"], ["Replicate", "Shard"]):
            raise UnimplementedError(
                f"parameter {name} is placed {kinds}: tensor parallelism", "UNIMPLEMENTED", "UNSPECIFIED",
                "Parameters in parts are supported under fully_shard alone, with a mesh of one dimension or of (replicate, shard)")
        if parameter.device_mesh.size() != world_size:
            raise UnimplementedError(
                f"parameter {name} is on a mesh of {parameter.device_mesh.size()} ranks, of a job of {world_size}", "UNIMPLEMENTED",
                "UNSPECIFIED", "The mesh of fully_shard has to be the ranks of process_group")
    return bool(names)


def refuse_whole(matrices: Sequence[Matrix]) -> None:
    """Raises InvalidArgumentError for a layer that is not sharded while others are, because nothing averages its
    gradient."""
    for matrix in matrices:
        if not all(is_sharded(parameter) for parameter in matrix.parameters()):
            raise InvalidArgumentError(
                f"layer {matrix.name}: expected a parameter under fully_shard, as others are", "INVALID_ARGUMENT", "UNSPECIFIED",
                "Call fully_shard with the whole model too, before Preconditioner; or leave the layer out: skip=")


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes only accumulate gradients."""
    modules = modules_of(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


@dataclasses.dataclass
class _Piece:
    """A rank's part of a layer's weight (part 0) or bias (part 1).

    Attributes:
        sends: This rank sends the gradient of this piece.
        there: Its place in the layer's part of Matrix.split.
        here: Its place in the rank's rectangle.
        shape: Shape of both.
    """

    parameter: nn.Parameter
    part: int
    sends: bool
    there: Tuple[slice, ...]
    here: Tuple[slice, ...]
    shape: Tuple[int, ...]

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of_gradient(self) -> Optional[torch.Tensor]:
        return local(self.parameter.grad)[self.here] if has_gradient(self.parameter) else None


def _rectangle(parameter: torch.Tensor) -> _Rectangle:
    chunks = parameter.__create_chunk_list__()
    coordinate = parameter.device_mesh.get_coordinate()
    sends = all(place == 0 for place, kind in zip(coordinate, parameter.placements) if kind.is_replicate())
    if not chunks:
        return sends, (0,) * parameter.dim(), (0,) * parameter.dim()
    return sends, tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def _piece(slot: Any, part: int, parameter: nn.Parameter, rectangle: _Rectangle) -> Optional[_Piece]:
    """Returns a rank's piece of a layer, or None. The layer is a range of the parameter's rows: all, except in a
    convolution with groups and in a stack of experts."""
    sends, offsets, sizes = rectangle
    rows = parameter.shape[0] // slot.matrix.groups
    first = slot.group * rows
    begin, end = max(offsets[0], first), min(offsets[0] + sizes[0], first + rows)
    if begin >= end or 0 in sizes:
        return None
    rest = list(zip(offsets[1:], sizes[1:]))
    return _Piece(parameter, part, sends, (slice(begin - first, end - first), *(slice(o, o + s) for o, s in rest)),
                  (slice(begin - offsets[0], end - offsets[0]), *(slice(0, s) for _, s in rest)),
                  (end - begin, *sizes[1:]))


class Shards:
    """Moves the gradients and answers of the session's layers between ranks. Collective: every rank makes equal calls,
    in one order."""

    def __init__(self, group: Group, slots: Sequence[Any]) -> None:
        self._group = group
        self._slots = slots
        rectangles = group.gather([[_rectangle(one) for one in slot.matrix.parameters()] for slot in slots])
        # Indexed by slot and rank.
        self._pieces: List[List[List[_Piece]]] = []
        for place, slot in enumerate(slots):
            of_ranks = []
            for of_rank in rectangles:
                found = [_piece(slot, part, one, of_rank[place][part]) for part, one in enumerate(slot.matrix.parameters())]
                of_ranks.append([piece for piece in found if piece is not None])
            self._pieces.append(of_ranks)
        self._buffers: Dict[str, torch.Tensor] = {}
        self._answers: Dict[int, List[Tuple[_Piece, torch.Tensor]]] = {}

    def owned(self, rank: int) -> List[Any]:
        """Returns the slots whose gradients the rank sends."""
        return [slot for slot in self._slots if slot.place % self._group.size == rank]

    def collect(self) -> None:
        """Fills the buffers of this rank's slots with their gradients from all ranks."""
        me, ranks = self._group.rank, range(self._group.size)

        def moving(rank: int, owner: int) -> List[Tuple[Any, _Piece]]:
            return [(slot, piece) for slot in self.owned(owner) for piece in self._pieces[slot.place][rank] if piece.sends]

        out, incoming = [moving(me, owner) for owner in ranks], [moving(rank, me) for rank in ranks]
        sent = self._views("rows out", [piece.numel() for one in out for _, piece in one])
        for (_, piece), view in zip((pair for one in out for pair in one), sent):
            gradient = piece.of_gradient()
            if gradient is None:
                view.zero_()
            else:
                view.view(piece.shape).copy_(gradient)
        received = self._views("rows in", [piece.numel() for one in incoming for _, piece in one])
        self._exchange("rows", [sum(piece.numel() for _, piece in one) for one in out],
                       [sum(piece.numel() for _, piece in one) for one in incoming])
        for (slot, piece), view in zip((pair for one in incoming for pair in one), received):
            slot.parts[piece.part][piece.there].copy_(view.view(piece.shape))

    def distribute(self, lines: torch.Tensor) -> Dict[int, List[float]]:
        """Sends the answers in the buffers of this rank's slots to all ranks, with one row of `lines` [own slots, 2]
        for each slot. Returns the rows of all slots, by index of the slot."""
        me, ranks = self._group.rank, range(self._group.size)

        def sizes(owner: int, rank: int) -> List[int]:
            slots = self.owned(owner)
            return [2 * len(slots), *(piece.numel() for slot in slots for piece in self._pieces[slot.place][rank])]

        out, incoming = [sizes(me, rank) for rank in ranks], [sizes(owner, me) for owner in ranks]
        views = iter(self._views("answers out", [size for one in out for size in one]))
        for rank in ranks:
            next(views).copy_(lines.reshape(-1))
            for slot in self.owned(me):
                for piece in self._pieces[slot.place][rank]:
                    next(views).view(piece.shape).copy_(slot.parts[piece.part][piece.there])
        views = iter(self._views("answers in", [size for one in incoming for size in one]))
        self._exchange("answers", [sum(one) for one in out], [sum(one) for one in incoming])
        found: Dict[int, List[float]] = {}
        for owner in ranks:
            slots = self.owned(owner)
            found.update(zip([slot.place for slot in slots], next(views).view(-1, 2).tolist()))
            for slot in slots:
                self._answers[slot.place] = [(piece, next(views).view(piece.shape)) for piece in self._pieces[slot.place][me]]
        return found

    def store(self, place: int, scale: float) -> None:
        """Copies a slot's answer, times `scale`, to this rank's part of the gradient."""
        for piece, answer in self._answers[place]:
            gradient = piece.of_gradient()
            if gradient is not None:
                gradient.copy_(answer if scale == 1.0 else answer.mul_(scale))

    def _views(self, name: str, sizes: List[int]) -> Sequence[torch.Tensor]:
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(sum(sizes), dtype=torch.float32, device=self._group.device)
        return self._buffers[name].split(sizes) if sizes else ()

    def _exchange(self, name: str, out: List[int], incoming: List[int]) -> None:
        self._group.all_to_all(self._buffers[f"{name} in"], self._buffers[f"{name} out"], incoming, out)
