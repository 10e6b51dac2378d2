# SPDX-License-Identifier: Apache-2.0
"""Reports finished steps while the next step runs."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
import warnings
from typing import Any, Optional, Tuple

from .._client import StepDirective, Worker
from .._errors import InvalidArgumentError, fork_error


class Reporter:
    """Reports a worker's steps on its own thread, so that no step within the lease waits for the coordinator's answer.

    Not thread-safe.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reports: "queue.SimpleQueue[Optional[Tuple[concurrent.futures.Future, Tuple[Any, ...]]]]" = queue.SimpleQueue()
        self._last: Optional[concurrent.futures.Future] = None
        self._known: Optional[StepDirective] = None
        self._process = os.getpid()
        # A daemon, which threading does not join at the interpreter's end: close() first ends the call in which the
        # thread waits.
        self._thread = threading.Thread(target=self._run, name="precondor-reporter", daemon=True)
        self._thread.start()

    def report(self, *arguments: Any) -> None:
        """Calls Worker.report_step on the thread. Precondition: wait() has been called since the last report."""
        self._last = concurrent.futures.Future()
        self._reports.put((self._last, arguments))

    def wait(self) -> None:
        """Waits until the last report is answered, and raises its error. Ctrl-C ends only the wait. Raises ForkError in
        a forked child."""
        self.check_process()
        if self._last is not None:
            self._known = self._last.result()
            self._last = None

    def check_process(self) -> None:
        """Raises ForkError in a forked child, which has no reporter thread."""
        if os.getpid() != self._process:
            raise fork_error(self._process, os.getpid())

    def directive_for(self, step: int) -> Optional[StepDirective]:
        """Returns a directive that covers `step`. Waits for the last report only if the known directive does not. None:
        no step has been reported."""
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

    def close(self) -> None:
        """Ends the thread. Call it after the worker's close()."""
        self._reports.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may call this there
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
