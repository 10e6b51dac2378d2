# SPDX-License-Identifier: Apache-2.0
"""The tools of deploy/install.sh --deploy, with which every test of this folder begins. Without them it is skipped."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # what CTest shows as skipped
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "precondor"
TOOLS = CACHE / "deploy-tools"
sys.path.insert(1, str(ROOT / "tests/e2e/chaos"))  # for `cluster`, which starts servers and waits for conditions


def require(*programs):
    """Puts the tools' programs on PATH and their packages on sys.path, before Debian's packages of the same names.

    Skips this test if one of `programs` is missing. Call it before the import of such a package.
    """
    os.environ["PATH"] = f"{TOOLS / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
    sys.path[1:1] = map(str, TOOLS.glob("lib/python3*/site-packages"))  # [0] is the test's own folder
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        skip(f"no {', '.join(missing)}; deploy/install.sh --deploy installs it")


def run(*command, **options):
    """The finished process, its output as text; an AssertionError with the end of that if it failed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done


def skip(reason):
    print(f"{pathlib.Path(sys.argv[0]).name}: skipped: {reason}")
    sys.exit(SKIPPED)


def skip_unless_root():
    if os.geteuid() != 0:
        skip("not root, which containers in namespaces of their own need here")
