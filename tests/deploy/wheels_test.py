#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/build-wheel.sh makes a wheel that installs and trains, for each Python from 3.9 to 3.13 on this machine.

Says which of these are not there; skipped without any.
"""

import os
import pathlib
import sys
import tempfile
import unittest

import wheels
from deploy_tools import ROOT, require, run, skip

require("g++", "cmake")


class WheelsTest(unittest.TestCase):
    def check(self, version, python, folder):
        wheel = wheels.build(python, folder)
        tag = f"cp{version.replace('.', '')}"
        self.assertTrue(wheel.name.endswith(f"-{tag}-{tag}-manylinux_2_35_x86_64.whl"), wheel.name)
        run(python, "-m", "venv", folder / "venv")
        inside = folder / "venv/bin/python"
        run(inside, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", wheel, timeout=600)
        (package,) = (folder / "venv/lib").glob("python3*/site-packages/precondor")
        run(inside, "-W", "error", "-m", "compileall", "-q", "-f", package)
        temporary = folder / "temporary"
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary)}
        environment.pop("PYTHONPATH", None)
        wheels.check_losses(run(inside, "-B", wheels.LOCAL_TRAINING, wheels.PAGE, env=environment, timeout=120).stdout)
        run(inside, "-B", ROOT / "tests/python/local_server_test.py", env=environment, timeout=300)

    def test_each_python_installs_its_wheel_and_trains(self):
        pythons = wheels.interpreters()
        print("not on this machine:", [version for version in wheels.VERSIONS if version not in pythons], flush=True)
        for version, python in pythons.items():
            with self.subTest(version), tempfile.TemporaryDirectory() as folder:
                print("Python", version, python, flush=True)
                self.check(version, python, pathlib.Path(folder))


if __name__ == "__main__":
    if not wheels.interpreters():
        skip("no Python with its headers")
    unittest.main(argv=[argument for argument in sys.argv if argument != "--full"], verbosity=2)
