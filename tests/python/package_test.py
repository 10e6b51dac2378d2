#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`pip wheel client/python` builds, and the wheel works in an environment that has nothing else of this tree.

Skips, with the reason, where pip has no registry.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from interop_test import ROOT, Server

SKIPPED = 77
BUILD_LIMIT_S = 1100
SOURCES = ROOT / "client" / "python"
FILES = {str(path.relative_to(SOURCES)) for path in (SOURCES / "precondor").rglob("*")
         if path.suffix in (".py", ".pyi", ".typed")}


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          timeout=BUILD_LIMIT_S, **options)


def environment(place):
    """An interpreter of its own with what the build needs, so that its absence is told from a build that fails."""
    python = place / "bin" / "python"
    made = run(sys.executable, "-m", "venv", place)
    if made.returncode == 0:
        made = run(python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check",
                   "scikit-build-core>=0.10", "pybind11>=2.10", "ninja", "numpy>=1.21")
    if made.returncode != 0:
        skip((made.stderr.strip().splitlines() or ["no reason given"])[-1])
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--build", required=True, help="where the wheel's build is kept for the next time")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = environment(folder / "venv")
        path = {"CMAKE_BUILD_PARALLEL_LEVEL": "2", **os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        built = run(python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check",
                    f"--config-settings=build-dir={arguments.build}", "-w", folder, ROOT / "client/python", env=path)
        if built.returncode != 0:
            sys.exit(f"pip wheel failed:\n{built.stdout}{built.stderr}")
        [wheel] = folder.glob("precondor-*.whl")
        names = {entry for entry in zipfile.ZipFile(wheel).namelist() if not entry.startswith("precondor-")}
        extension = names - FILES
        if not FILES <= names or len(extension) != 1 or not extension.pop().startswith("precondor/_core."):
            sys.exit(f"expected {sorted(FILES)} and one extension, got {sorted(names)}")
        installed = run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
        if installed.returncode != 0:
            sys.exit(f"pip install {wheel.name} failed:\n{installed.stderr}")
        server = Server(arguments.server, folder)
        try:
            program = ("import sys, precondor as p; c = p.Client(sys.argv[1]); "
                       "s = c.open_session(p.SessionSpec('wheel', [p.Layer('fc', 2, 3)], 'identity')); "
                       "import numpy as np; w = s.join(); g = np.ones((2, 3), np.float32); "
                       "print(p.__file__, w.precondition(0, 0, g, 1).result().gradient.sum()); s.close()")
            used = run(python, "-c", program, server.address, cwd=folder)
        finally:
            server.stop()
        print(used.stdout + used.stderr)
        if used.returncode != 0 or not used.stdout.startswith(str(folder / "venv")) or not used.stdout.endswith("6.0\n"):
            sys.exit(f"the installed package does not work: {used.returncode}")


if __name__ == "__main__":
    main()
