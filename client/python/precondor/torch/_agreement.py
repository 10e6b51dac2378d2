# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a job in REPLAY or PULL_FACTORS, which have the factors themselves, still have the same."""

from __future__ import annotations

from typing import Sequence

from .._client import Worker
from .._errors import AbortedError, DataLossError
from .._session import Layer
from ._group import Group

_MOST_TURNS = 16  # reading factors costs about what an update does


class Agreement:
    """Compares a part of the layers at every inv_freq-th step, and so all of them in at most 16 such steps."""

    def __init__(self, worker: Worker, group: Group, layers: Sequence[Layer]) -> None:
        self._worker = worker
        self._group = group
        self._layers = layers
        self._turns = min(_MOST_TURNS, len(layers))

    def check(self, step: int, failed: bool) -> None:
        """At the end of each step, on every rank, also on one that has failed in it.

        Raises:
            DataLossError: on every rank, when a layer's factors are not the same on all.
            AbortedError: another rank has failed.
        """
        turn, rest = divmod(step, self._worker.spec.inv_freq)
        if rest != 0:
            return
        places = range(turn % self._turns, len(self._layers), self._turns)
        # 62 bits: the greatest is taken of each and of its negative.
        own = [0 if failed else self._worker.factors_checksum(place) >> 2 for place in places]
        least, most = self._group.range_of([int(failed), *own])
        if failed:
            return
        if most[0]:
            raise AbortedError(f"step {step}: another rank has failed", "ABORTED", "UNSPECIFIED",
                               "Its own exception says why; all ranks go back to one checkpoint")
        for place, one, other in zip(places, least[1:], most[1:]):
            if one != other:
                raise DataLossError(
                    f"layer {self._layers[place].name}: step {step}: the ranks' factors are no longer the same, bit for bit",
                    "DATA_LOSS", "UNSPECIFIED",
                    "Their weights may have parted since a checkpoint of up to "
                    f"{self._turns * self._worker.spec.inv_freq} steps ago: begin all ranks again from an earlier one. Ranks on "
                    "several kinds of processors, or with several releases of OpenBLAS, round otherwise: exchange DELEGATE is "
                    "for them")
