# SPDX-License-Identifier: Apache-2.0
"""The pieces of layers that ranks have, where the parameters of a model are divided among them.

Each rank has a rectangle of every parameter, which torch's DTensor describes, or all of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from .._errors import UnimplementedError
from ._group import Group
from ._layers import has_gradient
from ._sharded import is_sharded, local

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
