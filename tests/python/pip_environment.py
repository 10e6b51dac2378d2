# SPDX-License-Identifier: Apache-2.0
"""Packages of PyPI for a test, in a virtual environment in the build folder. Where that fails the test is skipped."""

import os
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77  # what CTest shows as skipped


def skip(reason):
    print(f"{pathlib.Path(sys.argv[0]).name}: skipped: {reason}")
    sys.exit(SKIPPED)


def environment(venv, packages):
    """The interpreter of the virtual environment, which is made if it is missing."""
    python = venv / "bin" / "python"
    if python.exists():
        return python
    venv.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=venv.parent) as fresh:
        place = pathlib.Path(fresh) / "venv"
        for command in ([sys.executable, "-m", "venv", str(place)],
                        [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input",
                         "--disable-pip-version-check", *packages]):
            try:
                run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                skip(f"{' '.join(command[:4])}: {error}")
            if run.returncode != 0:
                lines = run.stderr.strip().splitlines() or ["no reason given"]
                skip(f"{' '.join(command[:4])}: {lines[-1]}")
        try:
            os.rename(place, venv)
        except OSError:  # another run was quicker
            pass
    return python


def run_inside(venv, packages):
    """Runs this program again, with the same arguments and --inside, by that interpreter, and ends as it does."""
    python = environment(venv.absolute(), packages)
    sys.exit(subprocess.run([str(python), "-B", *sys.argv, "--inside"], env={**os.environ, "JAX_PLATFORMS": "cpu"},
                            check=False).returncode)
