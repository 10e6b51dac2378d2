# SPDX-License-Identifier: Apache-2.0
"""Runs the programs that are part of the package. The installed commands call these functions."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import List

from ._errors import UnavailableError


def path_of(name: str) -> str:
    """Returns the path of a program of the package.

    Raises:
        UnavailableError: This installation has no programs; one from a wheel has them.
    """
    program = pathlib.Path(__file__).absolute().parent / "bin" / name
    if not program.is_file():
        raise UnavailableError(f"{name}: expected it in {program.parent}, where this installation of precondor has no programs",
                               "UNAVAILABLE", advice="Install the package from a wheel")
    if not os.access(program, os.X_OK):  # some installers keep no file modes
        program.chmod(0o755)
    return str(program)


def _run(name: str, arguments: List[str]) -> None:
    program = path_of(name)
    sys.stdout.flush()
    os.execv(program, [name, *arguments])


def server() -> None:
    _run("precondor-server", sys.argv[1:])


def ctl() -> None:
    _run("precondorctl", sys.argv[1:])


def perf() -> None:
    _run("precondor-perf", sys.argv[1:])
