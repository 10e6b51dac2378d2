#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the training loop of docs/use/python.md on a LocalServer, which has to leave neither a process nor a file.

Usage: local_training.py PAGE, with an empty folder for temporary files
"""

import os
import pathlib
import re
import sys
import tempfile

from precondor.server import LocalServer

loop = re.search(r"```python\n(import sys\n.*?)```", pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"), re.S)[1]
with LocalServer() as server:
    sys.argv[1:] = [server.address]
    exec(compile(loop, "docs/use/python.md", "exec"))  # pylint: disable=exec-used
left = os.listdir(tempfile.gettempdir())
if left:
    sys.exit(f"files are left: {left}")
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:  # there is none
    sys.exit(0)
sys.exit("a process is left")
