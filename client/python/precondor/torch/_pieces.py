# SPDX-License-Identifier: Apache-2.0
"""The pieces of layers that ranks have, where the parameters of a model are divided among them.

Each rank has a rectangle of every parameter, which torch's DTensor describes, or all of it. Gathering moves the pieces to one rank for
each layer; Parts (exchange SHARDED) sends them as they are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .._client import Future, Worker
from .._errors import UnimplementedError
from ._group import Group
from ._layers import has_gradient
from ._sharded import is_sharded, local, settle

# A parameter's rectangle on a rank: offsets and sizes.
_Rectangle = Tuple[Tuple[int, ...], Tuple[int, ...]]


@dataclasses.dataclass
class Piece:
    """A rank's part of a layer's weight (part 0) or bias (part 1).

    Attributes:
        sends: This rank sends the gradient of this piece: the first of the ranks with equal rectangles.
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


def _rectangle(parameter: torch.Tensor) -> Optional[_Rectangle]:
    """Returns None if the rank's tensor is not the rectangle that its description says."""
    if not is_sharded(parameter):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    chunks = parameter.__create_chunk_list__()
    offsets, sizes = (tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if chunks else ((0,) * parameter.dim(),) * 2
    own = local(parameter)
    return (offsets, sizes) if tuple(own.shape) == sizes or own.numel() == 0 == torch.Size(sizes).numel() else None


def _piece(slot: Any, part: int, parameter: nn.Parameter, rectangle: _Rectangle, sends: bool) -> Optional[Piece]:
    """Returns a rank's piece of a layer, or None. The layer is a range of the parameter's rows or columns: all, except in a matrix
    of several layers."""
    offsets, sizes = rectangle
    axis = min(slot.matrix.axis, parameter.dim() - 1)
    first, length = slot.matrix.range_of(slot.group, parameter.shape[axis])
    begin, end = max(offsets[axis], first), min(offsets[axis] + sizes[axis], first + length)
    if begin >= end or 0 in sizes:
        return None
    there, here = [slice(o, o + s) for o, s in zip(offsets, sizes)], [slice(0, s) for s in sizes]
    there[axis], here[axis] = slice(begin - first, end - first), slice(begin - offsets[axis], end - offsets[axis])
    return Piece(parameter, part, sends, tuple(there), tuple(here), (*sizes[:axis], end - begin, *sizes[axis + 1:]))


def pieces_of(group: Group, slots: Sequence[Any]) -> List[List[List[Piece]]]:
    """Returns the pieces of layers, by slot and rank. Collective. Raises UnimplementedError if the pieces of a layer that
    are sent are not the whole layer."""
    rectangles = group.gather([[_rectangle(one) for one in slot.matrix.parameters()] for slot in slots])
    pieces: List[List[List[Piece]]] = []
    for place, slot in enumerate(slots):
        of_ranks: List[List[Piece]] = [[] for _ in rectangles]
        if any(None in known[place] for known in rectangles):
            raise UnimplementedError(f"layer {slot.layer.name}: torch describes a rank's part of it wrongly", "UNIMPLEMENTED",
                                     "UNSPECIFIED", "Choose sizes that the mesh divides evenly; or leave the layer out: skip=")
        for part, parameter in enumerate(slot.matrix.parameters()):
            seen: Set[_Rectangle] = set()
            for of_rank, known in zip(of_ranks, rectangles):
                rectangle = known[place][part]
                piece = _piece(slot, part, parameter, rectangle, rectangle not in seen)
                seen.add(rectangle)
                of_rank += [] if piece is None else [piece]
        pieces.append(of_ranks)
        sent = sum(piece.numel() for of_rank in of_ranks for piece in of_rank if piece.sends)
        if sent != slot.layer.d_out * slot.layer.d_in:
            raise UnimplementedError(
                f"layer {slot.layer.name}: the ranks' parts have {sent} numbers, of {slot.layer.d_out * slot.layer.d_in}",
                "UNIMPLEMENTED", "UNSPECIFIED", "Its parameters are divided in a way that is not supported: skip=")
    return pieces


LINE = 4  # numbers that go with a layer's answer

class Gathering:
    """Moves the gradients and answers of the session's layers between ranks. Collective: every rank makes equal calls,
    in one order."""

    def __init__(self, group: Group, slots: Sequence[Any]) -> None:
        self._group = group
        self._slots = slots
        self._pieces = pieces_of(group, slots)
        self._buffers: Dict[str, torch.Tensor] = {}
        self._answers: Dict[int, List[Tuple[Piece, torch.Tensor]]] = {}

    def owned(self, rank: int) -> List[Any]:
        """Returns the slots whose gradients the rank sends."""
        return [slot for slot in self._slots if slot.delegate == rank]

    def collect(self) -> None:
        """Fills the buffers of this rank's slots with their gradients from all ranks."""
        settle(parameter for slot in self._slots for parameter in slot.matrix.parameters())
        me, ranks = self._group.rank, range(self._group.size)

        def moving(rank: int, owner: int) -> List[Tuple[Any, Piece]]:
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
        """Sends the answers in the buffers of this rank's slots to all ranks, with one row of `lines` [own slots, LINE]
        for each slot. Returns the rows of all slots, by index of the slot."""
        me, ranks = self._group.rank, range(self._group.size)

        def sizes(owner: int, rank: int) -> List[int]:
            slots = self.owned(owner)
            return [LINE * len(slots), *(piece.numel() for slot in slots for piece in self._pieces[slot.place][rank])]

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
            found.update(zip([slot.place for slot in slots], next(views).view(-1, LINE).tolist()))
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
        if name not in self._buffers or self._buffers[name].numel() != sum(sizes):  # a new session may have other owners
            self._buffers[name] = torch.zeros(sum(sizes), dtype=torch.float32, device=self._group.device)
        return self._buffers[name].split(sizes) if sizes else ()

    def _exchange(self, name: str, out: List[int], incoming: List[int]) -> None:
        self._group.all_to_all(self._buffers[f"{name} in"], self._buffers[f"{name} out"], incoming, out)


# First row, rows, first column, columns, sent.
_Range = Tuple[int, int, int, int, bool]


@dataclasses.dataclass
class _Part:
    """A piece as a rectangle of its layer's matrix.

    Attributes:
        order: Order of the piece's dimensions in which its elements are those of the rectangle, row by row.
    """

    piece: Piece
    rectangle: _Range
    order: Tuple[int, ...]

    @property
    def sent(self) -> bool:
        return self.rectangle[4]

    def in_its_shape(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elements `values` of the rectangle in the piece's shape, as a view."""
        shape = [self.piece.shape[one] for one in self.order]
        return values.view(shape).permute([self.order.index(one) for one in range(len(self.order))])


def _part(slot: Any, piece: Piece) -> _Part:
    rows, cols = slot.layer.d_out, slot.layer.d_in
    # The place of the piece in the matrix; it has no memory.
    view = slot.matrix.split(torch.empty(rows, cols, device="meta"))[piece.part][piece.there]
    long = [one for one in range(view.dim()) if view.shape[one] > 1]
    down = sorted((one for one in long if view.stride(one) >= cols), key=lambda one: -view.stride(one))
    along = sorted((one for one in long if view.stride(one) < cols), key=lambda one: -view.stride(one))
    for dims, step in ((down, cols), (along, 1)):
        for one in reversed(dims):
            if view.stride(one) != step:
                raise UnimplementedError(
                    f"layer {slot.layer.name}: a rank's part is no rectangle of [{rows}, {cols}]", "UNIMPLEMENTED", "UNSPECIFIED",
                    'exchange="DELEGATE" works with every division of parameters')
            step *= view.shape[one]
    rectangle = (view.storage_offset() // cols, math.prod(view.shape[one] for one in down), view.storage_offset() % cols,
                 math.prod(view.shape[one] for one in along), piece.sends)
    if slot.matrix.has_lookups and rectangle[3] != cols:
        raise UnimplementedError(
            f"layer {slot.layer.name}: a rank has a part of each row, and cannot tell which rows have no gradient", "UNIMPLEMENTED",
            "UNSPECIFIED", 'exchange="DELEGATE" works with every division of parameters')
    short = [one for one in range(view.dim()) if one not in long]
    return _Part(piece, rectangle, (*short, *down, *along))


class Parts:
    """This rank's parts of the session's layers. Making it, and collect(), are collective."""

    def __init__(self, group: Group, slots: Sequence[Any]) -> None:
        self._slots = slots
        # Made for all ranks, so that all raise the same error.
        parts = [[[_part(slot, piece) for piece in pieces] for pieces in of_ranks]
                 for slot, of_ranks in zip(slots, pieces_of(group, slots))]
        self._parts: List[List[_Part]] = [of_ranks[group.rank] for of_ranks in parts]
        # By index of the layer: elements of the sent parts, and of all parts.
        self._out = [_flat(part.piece.numel() for part in parts if part.sent) for parts in self._parts]
        self._in = [_flat(part.piece.numel() for part in parts) for parts in self._parts]

    def collect(self) -> None:
        """Prepares the gradients. Parts need not be collected."""
        settle(parameter for slot in self._slots for parameter in slot.matrix.parameters())

    def send(self, worker: Worker, step: int, slot: Any) -> Future:
        """Sends this rank's parts of the slot's gradient. Returns the future of their answer."""
        parts, out = self._parts[slot.place], self._out[slot.place]
        for part, values in _divided(out, [part for part in parts if part.sent]):
            gradient = part.piece.of_gradient()
            if gradient is None:
                values.zero_()
            else:
                part.in_its_shape(values).copy_(gradient)
        return worker.precondition(step, slot.place, out.numpy(), 1, self._in[slot.place].numpy(),
                                   parts=[part.rectangle for part in parts])

    def store(self, place: int, scale: float) -> None:
        """Copies a slot's answer, times `scale`, to this rank's part of the gradient. Rows of lookups without a gradient
        stay zeros."""
        for part, values in _divided(self._in[place], self._parts[place]):
            gradient = part.piece.of_gradient()
            if gradient is None:
                continue
            if self._slots[place].matrix.has_lookups:
                rows = gradient.permute(part.order).reshape(part.rectangle[1], -1)
                values.view(part.rectangle[1], -1).masked_fill_(~rows.ne(0).any(1, keepdim=True).cpu(), 0.0)
            gradient.copy_(part.in_its_shape(values.mul_(scale) if scale != 1.0 else values))


def _flat(sizes: Iterable[int]) -> torch.Tensor:
    return torch.empty((1, sum(sizes)), dtype=torch.float32, device="cpu")


def _divided(flat: torch.Tensor, parts: Sequence[_Part]) -> Iterable[Tuple[_Part, torch.Tensor]]:
    """Returns the elements of each part, as views."""
    return zip(parts, flat[0].split([part.piece.numel() for part in parts]) if parts else ())
