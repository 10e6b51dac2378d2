# SPDX-License-Identifier: Apache-2.0
"""Results of checks: one JSON object a line in results.jsonl. A result is on the disk before the next check begins, so that a
killed run loses none. And one log of everything that programs print.

Records, by their key `record`:
  start   a phase begins: phase, seconds (its limit), checks (names), imitation, filter, machine; first without checks
  check   one check's end: phase, check, status (passed, failed, skipped, not run), reason, seconds, ...
  row     a measurement: phase, check, and the fields of tests/bench/rows.py
  kernel  of phase profile: phase, check, and what the profiler says of one kernel
  end     the phase's end
"""

import json
import os
import pathlib
import threading
import time

RESULTS = "results.jsonl"
LOG = "log.txt"
REPORT = "report.md"
LOG_BYTES_OF_A_CHECK = 200_000
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"


class Results:
    """Appends to the files of a folder. Threads: all methods from any thread."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.frozen = False  # from then on nothing is added
        self._lock = threading.RLock()  # a signal's handler runs on a thread that may have it
        # A run that was killed can have left half a line.
        path = self.folder / RESULTS
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._results = open(path, "a", encoding="utf-8")  # pylint: disable=consider-using-with
        self._log = open(self.folder / LOG, "a", encoding="utf-8", errors="replace")  # pylint: disable=consider-using-with
        if torn:
            self._results.write("\n")

    def add(self, record, **fields):
        line = json.dumps({"record": record, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields})
        with self._lock:
            if self.frozen:
                return
            self._results.write(line + "\n")
            self._results.flush()
            os.fsync(self._results.fileno())

    def close(self):
        with self._lock:
            self._results.close()
            self._log.close()

    def log(self, source, line):
        with self._lock:
            self._log.write(f"[{source}] {line}\n")
            self._log.flush()


def read(folders):
    """The records of results.jsonl in each folder, in order. Lines that a killed run has left half written are left out."""
    records = []
    for folder in folders:
        path = pathlib.Path(folder) / RESULTS
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and "record" in record:
                records.append(record)
    return records
