# SPDX-License-Identifier: Apache-2.0
"""Reports finished steps while later steps run; and the result of a step."""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from typing import Any, Deque, Dict, Optional

from .._client import Report, StepDirective, Worker
from .._errors import fork_error, InvalidArgumentError


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


class Reporter:
    """Reports a worker's steps, so that no step within the lease waits for the coordinator's answer. Not thread-safe."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reports: Deque[Report] = collections.deque()  # that have yet to be answered, or taken
        self._known: Optional[StepDirective] = None
        self._process = os.getpid()

    def report(self, *arguments: Any) -> None:
        """Begins Worker.report_step."""
        self._reports.append(self._worker.report_step(*arguments, wait=False))

    def check(self) -> None:
        """Raises the error of a report that has been refused by now. Raises ForkError in a forked child."""
        self.check_process()
        while self._reports and self._reports[0].wait(0.0):
            self._take()

    def wait(self) -> None:
        """Waits until all reports are answered, and raises their first error. Ctrl-C ends only the wait. Raises ForkError in
        a forked child."""
        self.check_process()
        while self._reports:
            self._take()

    def _take(self) -> None:
        """Waits until the first report is answered. It has one result: after Ctrl-C, which may come behind that, it is not asked
        again. Later ones tell as much."""
        self._known = self._reports.popleft().result()

    def check_process(self) -> None:
        """Raises ForkError in a forked child, to which the worker does not belong."""
        if os.getpid() != self._process:
            raise fork_error(self._process, os.getpid())

    def settle(self) -> None:
        """Has the reports sent, and waits for half a second at most."""
        if self._reports and os.getpid() == self._process:
            self._reports[-1].wait(0.5)

    def directive_for(self, step: int) -> Optional[StepDirective]:
        """Returns a directive that covers `step`. Waits for reports only if the known directive does not. None: no step has
        been reported."""
        if self._known is None or self._known.lease_through_step < step:
            self.wait()
        return self._known

    def snapshot_for(self, step: int) -> int:
        """Returns the number of the servers' snapshot for `step`; 0 means none."""
        directive = self.directive_for(step)
        return directive.snapshot_id if directive is not None and 0 < directive.snapshot_at == step else 0

    def flush(self) -> None:
        """Waits until the servers have acknowledged everything."""
        self.wait()
        try:
            self._worker.flush()
        except InvalidArgumentError as error:  # it counted as an abstention, and the job continues
            warnings.warn(f"the server refused statistics: {error.message}")
