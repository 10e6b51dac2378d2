# SPDX-License-Identifier: Apache-2.0
"""Programs that a test starts beside our servers."""

import pathlib
import subprocess


class Program:
    """A process with its log in `folder`, ended at the end."""

    def __init__(self, folder, arguments, environment=None):
        self.log = pathlib.Path(folder) / f"{pathlib.Path(arguments[0]).name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
