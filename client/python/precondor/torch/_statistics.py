# SPDX-License-Identifier: Apache-2.0
"""Computes statistics of rows on the tensor's own device, in f32, over any number of micro-batches.

docs/develop/math/statistics.md has the formulas.
"""

from __future__ import annotations

import math
from typing import Callable, List, Optional

import numpy as np
import torch


class Vectors:
    """MEAN, PER_WORKER_MEAN and SIGNED of one side: weighted sums of the rows.

    Args:
        signs: signs(first_row, rows) returns [k, rows] of +1 and -1; None for the means.
        ones: A 1 is appended to each row.
        sums: sums(first_row, rows) returns the signed sums of rows in host memory, with the 1; None: computed from
            signs.
    """

    def __init__(self, signs: Optional[Callable[[int, int], np.ndarray]], ones: bool,
                 sums: Optional[Callable[[int, np.ndarray], np.ndarray]] = None) -> None:
        self._signs = signs
        self._sums = sums
        self._ones = ones
        self._sum: Optional[torch.Tensor] = None
        self.rows = 0

    def add(self, rows: torch.Tensor, scale: float = 1.0) -> None:
        """Adds rows [n, d] of any floating type, each with its 1 times `scale`."""
        rows = rows.to(torch.float32)
        in_host = self._sums is not None and rows.device.type == "cpu"
        total = torch.from_numpy(self._sums(self.rows, rows.numpy())) if in_host else self._total(rows)
        total = total * scale
        self._sum = total if self._sum is None else self._sum + total
        self.rows += rows.shape[0]

    def _total(self, rows: torch.Tensor) -> torch.Tensor:
        n = rows.shape[0]
        if self._signs is None:
            total = rows.sum(0, keepdim=True)
            ones = torch.full((1, 1), float(n), dtype=torch.float32, device=rows.device)
        else:
            weights = torch.from_numpy(self._signs(self.rows, n))
            if rows.is_cuda:  # a copy from other memory would wait for the device
                weights = weights.pin_memory().to(rows.device, non_blocking=True)
            weights = weights.to(rows.device)
            total = weights @ rows
            ones = weights.sum(1, keepdim=True)
        return torch.cat([total, ones], dim=1) if self._ones else total

    def finish(self, row_scale: float) -> torch.Tensor:
        """Returns f32 [k, d] for Worker.send_statistics, on the rows' device. Precondition: at least one row was added."""
        divisor = self.rows if self._signs is None else math.sqrt(self.rows)
        return self._sum * (row_scale / divisor)


class Covariance:
    """COVARIANCE of one side: keeps the rows while they have fewer elements than the packed lower triangle, and then
    that."""

    def __init__(self, ones: bool) -> None:
        self._ones = ones
        self._parts: List[torch.Tensor] = []
        self._moment: Optional[torch.Tensor] = None
        self.rows = 0

    def add(self, rows: torch.Tensor, scale: float = 1.0) -> None:
        """Adds rows [n, d] of any floating type, each with its 1 times `scale`."""
        rows = rows.to(torch.float32) * scale  # a copy: the next micro-batch may reuse this memory
        if self._ones:
            rows = torch.nn.functional.pad(rows, (0, 1), value=scale)
        self.rows += rows.shape[0]
        self._parts.append(rows)
        if 2 * self.rows < rows.shape[1] + 1:
            return
        for part in self._parts:
            moment = part.T @ part
            self._moment = moment if self._moment is None else self._moment + moment
        self._parts = []

    def finish(self, row_scale: float) -> torch.Tensor:
        """Returns f32 [n, d] or [1, d (d + 1) / 2] for Worker.send_statistics, in host memory. Precondition: at least one row was
        added."""
        if self._moment is None:
            return (torch.cat(self._parts) * row_scale).cpu()
        d = self._moment.shape[0]
        i, j = torch.tril_indices(d, d, device=self._moment.device)
        return (self._moment[i, j] * (row_scale**2 / self.rows)).reshape(1, -1).cpu()
