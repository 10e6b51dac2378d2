#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a program in the environment that tests/torch2.sh makes, on the CPU and with one thread: torch2.py PROGRAM ARGUMENTS...

Exits with 77, which CTest shows as skipped, where that environment is not installed.
"""

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "torch2.sh"

venv = pathlib.Path(subprocess.run([str(SCRIPT), "--print"], capture_output=True, text=True, check=True).stdout.strip())
if not (venv / "complete").exists():
    print(f"skipped: no torch in {venv}; tests/torch2.sh installs it")
    sys.exit(77)
python = str(venv / "bin" / "python")
os.execve(python, [python, "-B", *sys.argv[1:]], {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", **os.environ})
