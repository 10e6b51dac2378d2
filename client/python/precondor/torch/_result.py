# SPDX-License-Identifier: Apache-2.0
"""The result of Preconditioner.step."""

from __future__ import annotations

import dataclasses
from typing import Dict


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Outcome of one step.

    Attributes:
        step: Number of the step.
        mode: "SECOND_ORDER" or "FIRST_ORDER".
        decisions: By layer name: "PRECONDITIONED", "IDENTITY" (the averaged gradient itself) or "SKIP" (.grad is None
            now). Empty if the job's own gradients are the answers: in first order, except in DIRECT.
        skipped: The whole step was skipped because a gradient of some rank was not finite: .grad of every parameter of the
            optimizer is None now.
        scale: The factor of KL_CLIP; 1 for other scalings.
        updates_lost: By layer name: updates that a server has lost since the last step, so that the layer goes on with
            older factors. Empty if none are lost.
    """

    step: int
    mode: str
    decisions: Dict[str, str]
    skipped: bool
    scale: float
    updates_lost: Dict[str, int] = dataclasses.field(default_factory=dict)

    def counts(self) -> Dict[str, float]:
        """Returns the numbers of layers preconditioned, identity and skipped."""
        decisions = list(self.decisions.values())
        return {**{kind.lower(): float(decisions.count(kind)) for kind in ("PRECONDITIONED", "IDENTITY")},
                "skipped": float(decisions.count("SKIP"))}
