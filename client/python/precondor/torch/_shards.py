# SPDX-License-Identifier: Apache-2.0
"""Moves gradients of a model whose parameters are divided among the ranks: the parts of each layer go to the rank that
sends it, and the parts of its answer come back.

One all-to-all of a step moves the pieces to the layers' owners, and a second one moves the answers to all ranks that
have a part of them.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import torch

from ._group import Group
from ._pieces import Piece, pieces_of
from ._sharded import settle

LINE = 3  # numbers that go with a layer's answer

class Shards:
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
