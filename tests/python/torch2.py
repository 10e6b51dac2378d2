#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a test program with PyTorch 2: torch2.py TEST ARGUMENTS..., in the environment that tests/torch2.sh makes.

Exits with 77, which CTest shows as skipped, where that environment is not installed.
"""

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "torch2.sh"

venv = pathlib.Path(subprocess.run([str(SCRIPT), "--print"], capture_output=True, text=True, check=True).stdout.strip())
if not (venv / "complete").exists():
    print(f"skipped: no torch 2 in {venv}; tests/torch2.sh installs it")
    sys.exit(77)
python = str(venv / "bin" / "python")
os.execv(python, [python, "-B", *sys.argv[1:]])
