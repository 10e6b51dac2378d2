# SPDX-License-Identifier: Apache-2.0
"""Compares the factors of a job's ranks in REPLAY and PULL_FACTORS, where every rank has its own."""

from __future__ import annotations

from typing import Sequence

from .._client import Worker
from .._errors import AbortedError, DataLossError
from .._session import Layer
from ._group import Group

_MOST_TURNS = 16  # reading factors takes about as long as an update


class Agreement:
    """Compares a part of the layers at every inv_freq-th step, and so all layers within at most 16 of these steps."""

    def __init__(self, worker: Worker, group: Group, layers: Sequence[Layer]) -> None:
        self._worker = worker
        self._group = group
        self._layers = layers
        self._turns = min(_MOST_TURNS, len(layers))

    def check(self, step: int, failed: bool) -> None:
        """Compares factors. Call it at the end of each step, on every rank, also on one that failed in the step.

        Raises:
            DataLossError: On every rank, if a layer's factors are not equal on all ranks.
            AbortedError: Another rank has failed.
        """
        turn, rest = divmod(step, self._worker.spec.inv_freq)
        if rest != 0:
            return
        places = range(turn % self._turns, len(self._layers), self._turns)
        # 62 bits, because range_of takes the maximum of each value and of its negative.
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
