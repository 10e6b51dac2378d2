# SPDX-License-Identifier: Apache-2.0
"""Statistics of linear layers under tensor parallelism, where each rank has a part of a layer's inputs or outputs.

The ranks of a tensor-parallel group see the same rows. Each one computes the statistics of its columns, with the signs
of the group's first rank. That rank joins the parts and sends them, and the others abstain. So the statistics are those
of the undivided layer, as the columns of S X are S times the columns of X. Of layers that the plan leaves whole, the
first rank sends its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from .._errors import UnimplementedError
from .._session import SessionSpec, traits_of
from ._group import Group
from ._layers import Matrix
from ._sharded import is_sharded, tensor_placements

# Statistics of a layer: a [k, d_in], g [k, d_out], number of rows.
Joined = Tuple[np.ndarray, np.ndarray, int]


@dataclasses.dataclass(frozen=True)
class Split:
    """The parts of a layer on the ranks of a tensor-parallel group.

    Attributes:
        side: The side that is divided, "input" or "output", or "" if none is. Every rank has the other side whole.
        ranks: The group's ranks, in the order of the parts.
        widths: Columns of each part, without the 1 of a bias.
        part: Index of this rank's part.
    """

    side: str
    ranks: Tuple[int, ...]
    widths: Tuple[int, ...]
    part: int

    @property
    def first(self) -> int:
        """The rank that sends the statistics."""
        return self.ranks[0]


def _split_of(name: str, weight: torch.Tensor, group: Group, under_fsdp: bool, supported: bool) -> Optional[Split]:
    kinds = tensor_placements(weight, under_fsdp)
    if all(kind.is_replicate() for kind in kinds):
        return None
    if not supported or len(kinds) > 1 or weight.dim() != 2 or not kinds[0].is_shard():
        raise UnimplementedError(
            f"layer {name}: statistics of a weight {list(weight.shape)} that is placed {[str(kind) for kind in weight.placements]}",
            "UNIMPLEMENTED", "UNSPECIFIED", "Under tensor parallelism there are statistics of vectors, of whole linear layers, divided along "
            "one dimension of a mesh: ColwiseParallel, RowwiseParallel; methods without statistics and skip= work for all layers")
    mesh, coordinate = weight.device_mesh, weight.device_mesh.get_coordinate()
    ranks = mesh.mesh[tuple(coordinate[:-1])].tolist()
    size = weight.shape[kinds[0].dim]
    most = -(-size // len(ranks))
    widths = tuple(max(0, min(most, size - most * part)) for part in range(len(ranks)))
    if min(widths) == 0:
        raise UnimplementedError(f"layer {name}: a side of {size} on {len(ranks)} ranks leaves one of them nothing", "UNIMPLEMENTED",
                                 "UNSPECIFIED", "Leave the layer whole, or out: skip=")
    return Split("output" if kinds[0].dim == 0 else "input", tuple(group.rank_of(rank) for rank in ranks), widths, coordinate[-1])


def divide(spec: SessionSpec, slots: Sequence[Any], methods: Sequence[str], statistics: Sequence[str], group: Group,
           under_fsdp: bool) -> SessionSpec:
    """Sets `split` of the slots whose methods take statistics, and what their matrices see of each call. Returns the
    session's description with as many sketches as if every rank sent its own.

    Args:
        spec: The session's description.
        slots: The session's layers.
        methods, statistics: Names, by index of the layer.
        group: The job's ranks.
        under_fsdp: fully_shard divides the model too.

    Raises:
        UnimplementedError: A layer is divided in a way that is not supported.
    """
    slots = [slot for slot in slots if traits_of(methods[slot.place]).takes_statistics]
    for slot in slots:
        weight = slot.matrix.weight
        slot.split = _split_of(slot.layer.name, weight, group, under_fsdp,
                               type(slot.matrix) is Matrix and slot.matrix.groups == 1 and statistics[slot.place] != "COVARIANCE")
        if slot.split is not None:
            width = slot.split.widths[slot.split.part]
            slot.matrix.seen = (width, weight.shape[0]) if slot.split.side == "input" else (weight.shape[1], width)
    found = next((slot.split for slot in slots if slot.split is not None), None)
    if found is None:
        return spec
    for slot in slots:
        slot.split = slot.split or dataclasses.replace(found, side="", widths=(0,) * len(found.ranks))
    senders = group.size // len(found.ranks)
    return dataclasses.replace(spec, sketches=spec.sketches or -(-16 // senders))


def divided(tensor: torch.Tensor) -> str:
    """Returns for a message how a tensor is divided; "" if it is not."""
    return f" or is divided as {[str(kind) for kind in tensor.placements]}" if is_sharded(tensor) else ""


def own_parts(split: Optional[Split], x: torch.Tensor, grad: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """Returns this rank's parts of a layer's input and of its output's gradient, of which `split` has the columns. None
    if they are divided in another way."""
    parts = []
    for side, tensor in (("input", x), ("output", grad)):
        if is_sharded(tensor):
            kind = tensor.placements[0]
            by_columns = kind.is_shard(tensor.dim() - 1) or kind.is_shard(-1)
            fits = by_columns if split is not None and split.side == side else kind.is_replicate()
            if len(tensor.placements) > 1 or not fits:
                return None
            tensor = tensor.to_local()
        parts.append(tensor)
    return parts[0], parts[1]


def join(group: Group, splits: Mapping[int, Split], heights: Mapping[int, int],
         own: Mapping[int, Joined]) -> Dict[int, Optional[Joined]]:
    """Returns the statistics of the layers that this rank sends. Collective: every rank calls it with equal layers.

    Args:
        group: The job's ranks.
        splits: The layers' divisions, by index.
        heights: Rows k of their statistics.
        own: This rank's part of the statistics. A layer is left out where the rank has none.

    Returns:
        By index, for the layers of which this rank is the first; None if it has no part. Parts that other ranks do not
        have are NaN.
    """
    places = sorted(splits)

    def block(place: int) -> torch.Tensor:
        split = splits[place]
        if place not in own:
            return torch.full((heights[place] * split.widths[split.part],), float("nan"), dtype=torch.float32, device="cpu")
        part = own[place][0 if split.side == "input" else 1]
        # The part itself, without the bias' 1; nothing of a layer that is whole.
        return torch.from_numpy(np.ascontiguousarray(part[:, :split.widths[split.part]])).reshape(-1)

    def received_from(rank: int) -> List[int]:
        return [place for place in places if splits[place].first == group.rank and rank in splits[place].ranks]

    out = [[block(place) for place in places if splits[place].first == rank] for rank in range(group.size)]
    sizes = [[heights[place] * splits[place].widths[splits[place].ranks.index(rank)] for place in received_from(rank)]
             for rank in range(group.size)]
    sent = torch.cat([torch.zeros(0, dtype=torch.float32, device="cpu"), *(one for of_rank in out for one in of_rank)]).to(group.device)
    received = torch.zeros(sum(map(sum, sizes)), dtype=torch.float32, device=group.device)
    group.all_to_all(received, sent, [sum(of_rank) for of_rank in sizes], [sum(one.numel() for one in of_rank) for of_rank in out])
    views = iter(received.cpu().split([size for of_rank in sizes for size in of_rank]))
    blocks = {(place, rank): next(views).view(heights[place], -1).numpy()
              for rank in range(group.size) for place in received_from(rank)}
    joined: Dict[int, Optional[Joined]] = {}
    for place in received_from(group.rank):
        split = splits[place]
        if place not in own:
            joined[place] = None
            continue
        a, g, rows = own[place]
        whole = np.concatenate([blocks[place, rank] for rank in split.ranks], axis=1)
        if split.side == "input":
            a = np.concatenate([whole, a[:, split.widths[split.part]:]], axis=1)  # with the bias' 1
        elif split.side == "output":
            g = whole
        joined[place] = (a, g, rows)
    return joined
