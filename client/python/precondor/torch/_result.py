# SPDX-License-Identifier: Apache-2.0
"""What Preconditioner.step returns."""

from __future__ import annotations

import dataclasses
from typing import Dict


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What became of one step.

    mode: "SECOND_ORDER" or "FIRST_ORDER".
    decisions: by layer, "PRECONDITIONED", "IDENTITY" (the averaged gradient as it is) or "SKIP" (it has no gradient now);
        empty where the job's own gradients are the answers, in first order but for DIRECT.
    skipped: the whole step was, for an overflow under AMP: no parameter of the optimizer has a gradient now.
    scale: the factor of KL_CLIP; 1 otherwise.
    """

    step: int
    mode: str
    decisions: Dict[str, str]
    skipped: bool
    scale: float
