# SPDX-License-Identifier: Apache-2.0
"""Programs of a check: run with a time limit, their output read line by line."""

import collections
import os
import queue
import signal
import subprocess
import threading
import time

from gpu import results

LAST_CHARACTERS = 8 << 20  # the lines that are kept to judge a program by
LINE_CHARACTERS = 1 << 16  # a longer line counts as several


class Program:
    """A running program. `lines` yields what it prints; after that `status` is its exit status, or None when its time
    was over and it was killed."""

    _running = set()
    _lock = threading.RLock()  # a signal's handler runs on a thread that may have it

    def __init__(self, command, source, log, environment=None):
        self.source, self.log = source, log
        self.status = None
        self.last = collections.deque()
        self._characters = 0  # of them
        self._queue = queue.Queue(maxsize=10_000)
        self._logged = 0
        self._killed = False
        log.log(source, "$ " + " ".join(str(word) for word in command))
        # A group of its own, so that what the program starts ends with it; no session, which would outlive a command.
        # pylint: disable=consider-using-with
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         text=True, errors="replace", env=environment, process_group=0)
        with self._lock:
            self._running.add(self)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._process.stdout as output:
            for line in iter(lambda: output.readline(LINE_CHARACTERS), ""):
                self._put(line.rstrip("\n"))
        self._put(None)

    def _put(self, line):
        """Waits while the queue is full, but not for a program that was killed."""
        while not self._killed:
            try:
                self._queue.put(line, timeout=.2)
                return
            except queue.Full:
                pass

    def lines(self, deadline):
        """Yields each line at once. `deadline()` is the moment (time.monotonic) by which the next line must come."""
        while True:
            left = deadline() - time.monotonic()
            try:
                if left <= 0:
                    raise queue.Empty
                line = self._queue.get(timeout=left)
            except queue.Empty:
                self.kill()
                return
            if line is None:
                break
            self.last.append(line)
            self._characters += len(line) + 1
            while self._characters > LAST_CHARACTERS:
                self._characters -= len(self.last.popleft()) + 1
            self._log_line(line)
            yield line
        # A program can close its output and go on.
        try:
            self.status = self._process.wait(timeout=max(.01, deadline() - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def _log_line(self, line):
        self._logged += len(line) + len(self.source) + 4
        if self._logged <= results.LOG_BYTES_OF_A_CHECK:
            self.log.log(self.source, line)

    def kill(self):
        """Ends the program and all that it has started."""
        self._killed = True
        with self._lock:
            self._running.discard(self)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._logged > results.LOG_BYTES_OF_A_CHECK:
            self.log.log(self.source, "... lines are left out here; these are the last:")
            for line in list(self.last)[-40:]:
                self.log.log(self.source, line[:1000])
            self._logged = 0

    @classmethod
    def kill_all(cls):
        with cls._lock:
            running = list(cls._running)
        for program in running:
            program.kill()


def run(command, seconds, source, log, environment=None):
    """The exit status, None where `seconds` were not enough, and the last lines as a text."""
    deadline = time.monotonic() + seconds
    try:
        program = Program(command, source, log, environment)
    except OSError as error:
        log.log(source, str(error))
        return 127, str(error)
    for _ in program.lines(lambda: deadline):
        pass
    return program.status, "\n".join(program.last)
