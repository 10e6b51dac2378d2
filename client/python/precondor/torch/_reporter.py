# SPDX-License-Identifier: Apache-2.0
"""Reports of finished steps, beside the next step."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from typing import Any, Optional, Tuple

from .._client import StepDirective, Worker
from .._errors import fork_error


class Reporter:
    """Reports a worker's steps on a thread of its own: within the lease no step waits for the coordinator's answer.

    One thread uses it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reports: "queue.SimpleQueue[Optional[Tuple[concurrent.futures.Future, Tuple[Any, ...]]]]" = queue.SimpleQueue()
        self._last: Optional[concurrent.futures.Future] = None
        self._known: Optional[StepDirective] = None
        self._process = os.getpid()
        # Not joined at the interpreter's end by threading itself: close() first ends what the thread waits in.
        self._thread = threading.Thread(target=self._run, name="precondor-reporter", daemon=True)
        self._thread.start()

    def report(self, *arguments: Any) -> None:
        """Worker.report_step, later. wait() has been called since the last."""
        self._last = concurrent.futures.Future()
        self._reports.put((self._last, arguments))

    def wait(self) -> None:
        """Until the last report is answered; raises what it did. Ctrl-C leaves it as it is. ForkError in a forked child."""
        self.check_process()
        if self._last is not None:
            self._known = self._last.result()
            self._last = None

    def check_process(self) -> None:
        """ForkError in a forked child, which has no reporter."""
        if os.getpid() != self._process:
            raise fork_error(self._process, os.getpid())

    def directive_for(self, step: int) -> Optional[StepDirective]:
        """One that covers `step`, or tells that a snapshot is taken as of it; waits for an answer only where it has to. None:
        no step has been reported."""
        if self._known is None or self._known.lease_through_step < step:
            self.wait()
        return self._known

    def close(self) -> None:
        """After the worker's."""
        self._reports.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            report = self._reports.get()
            if report is None:
                return
            future, arguments = report
            try:
                future.set_result(self._worker.report_step(*arguments))
            except BaseException as error:  # raised by wait()  # pylint: disable=broad-except
                future.set_exception(error)
