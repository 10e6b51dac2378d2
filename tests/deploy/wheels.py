# SPDX-License-Identifier: Apache-2.0
"""Builds and uses the wheels of deploy/build-wheel.sh, for each Python on this machine."""

import os
import pathlib
import shutil
import subprocess

from deploy_tools import ROOT, TOOLS, run

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
PAGE = ROOT / "docs/use/python.md"
LOCAL_TRAINING = ROOT / "tests/deploy/local_training.py"
CAN_BUILD = "import ensurepip, pathlib, sysconfig; pathlib.Path(sysconfig.get_path('include'), 'Python.h').stat()"


def interpreters():
    """The Pythons of this machine by version: Debian's, those on PATH and those of pyenv, if they have headers and pip."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv") / "versions"
    found = {}
    for version in VERSIONS:
        name = f"python{version}"
        for python in (f"/usr/bin/{name}", shutil.which(name), *pyenv.glob(f"{version}.*/bin/{name}")):
            if python and os.path.exists(python) and subprocess.run(
                    [python, "-c", CAN_BUILD], capture_output=True, check=False).returncode == 0:
                found[version] = python
                break
    return found


def build(python, output):
    """The wheel for that interpreter, in the folder `output`."""
    run(ROOT / "deploy/build-wheel.sh", "--python", python, "--output", output, timeout=1500)
    (wheel,) = output.glob("precondor-*.whl")
    return wheel


def download_dependencies(wheel, version):
    """Puts what the wheel needs with that Python beside it, on a GPU too."""
    run(TOOLS / "bin/pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        f"--python-version={version}", "--dest", wheel.parent, f"{wheel}[cuda]", timeout=600)


def check_losses(printed):
    """An AssertionError unless the training loop of docs/use/python.md has printed these lines."""
    losses = [float(loss) for loss in printed.split()]
    if len(losses) != 40 or losses[-1] > 0.01 * losses[0]:
        raise AssertionError(printed)
