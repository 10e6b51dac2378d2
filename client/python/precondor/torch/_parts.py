# SPDX-License-Identifier: Apache-2.0
"""Sends a rank's parts of gradients, and stores its parts of the answers, in exchange SHARDED: no rank has a whole
gradient of a layer, and none moves between ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterable, List, Sequence, Tuple

import torch

from .._client import Future, Worker
from .._errors import UnimplementedError
from ._group import Group
from ._pieces import Piece, pieces_of
from ._sharded import settle

# First row, rows, first column, columns, sent.
_Rectangle = Tuple[int, int, int, int, bool]


@dataclasses.dataclass
class _Part:
    """A piece as a rectangle of its layer's matrix.

    Attributes:
        order: Order of the piece's dimensions in which its elements are those of the rectangle, row by row.
    """

    piece: Piece
    rectangle: _Rectangle
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
    # Where the piece lies in the matrix; without memory.
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
