# SPDX-License-Identifier: Apache-2.0
"""The tools that deploy/install.sh --deploy installs; without them a test is skipped."""

import os
import pathlib
import shutil
import site
import sys

SKIPPED = 77  # what CTest shows as skipped
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "precondor"
TOOLS = CACHE / "deploy-tools"


def require(*programs):
    """Puts the tools' programs on PATH and their packages on sys.path; skips this test if one of `programs` is missing."""
    os.environ["PATH"] = f"{TOOLS / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
    for folder in TOOLS.glob("lib/python3*/site-packages"):
        site.addsitedir(str(folder))
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        print(f"{pathlib.Path(sys.argv[0]).name}: skipped: no {', '.join(missing)}; deploy/install.sh --deploy installs it")
        sys.exit(SKIPPED)
