#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/build-wheel.sh builds a wheel that brings a server and all libraries, and leaves other packages' protobuf and gRPC alone.

Skips, with the reason, where pip has no registry.
"""

import argparse
import os
import pathlib
import shutil
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
PROGRAMS = {f"precondor/bin/{name}" for name in ("precondor-server", "precondorctl", "precondor-perf")}
CUDA_MODULE = "precondor/lib/libprecondor-cuda.so"


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                          timeout=BUILD_LIMIT_S, **options)


def environment(place):
    """An interpreter of its own, with what users of the package may have beside it: PyPI's protobuf and grpcio. It is kept."""
    python, complete = place / "bin" / "python", place / "complete"
    packages = ["numpy>=1.21", "grpcio", "grpcio-health-checking"]
    made_of = " ".join([sys.version, *packages])
    if complete.exists() and complete.read_text(encoding="utf-8") == made_of:
        return python
    shutil.rmtree(place, ignore_errors=True)
    made = run(sys.executable, "-m", "venv", place)
    if made.returncode == 0:
        made = run(python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check",
                   *packages)
    if made.returncode != 0:
        skip((made.stderr.strip().splitlines() or ["no reason given"])[-1])
    complete.write_text(made_of, encoding="utf-8")
    return python


# Libraries that the wheel brings come from nowhere else, and a client of grpcio and messages of google.protobuf serve in
# the same process, in either order of import.
PROGRAM = """
import sys
address, first = sys.argv[1:]
def theirs():
    import google.protobuf.struct_pb2, grpc, grpc_health.v1.health_pb2 as pb, grpc_health.v1.health_pb2_grpc as pb_grpc
    assert google.protobuf.struct_pb2.Struct().SerializeToString() == b""
    with grpc.insecure_channel(address) as channel:
        answer = pb_grpc.HealthStub(channel).Check(pb.HealthCheckRequest(), timeout=20)
    assert answer.status == pb.HealthCheckResponse.SERVING, answer
if first == "theirs":
    theirs()
import numpy as np
import precondor as p
with p.Client(address) as client:
    session = client.open_session(p.SessionSpec("wheel", [p.Layer("fc", 2, 3)], "identity"))
    with session.join() as worker:
        theirs()
        total = worker.precondition(0, 0, np.ones((2, 3), np.float32), 1).result().gradient.sum()
    session.close()
names = ("libgrpc", "libprotobuf", "libabsl", "libupb", "libgpr")
loaded = {line.split()[-1] for line in open("/proc/self/maps") if any("/" + name in line for name in names)}
print(p.__file__)
print(total, *sorted(path for path in loaded if "/precondor.libs/" not in path))
"""

# The server that the wheel brings, with nothing else of Precondor on the machine.
LOCAL = """
import numpy as np
import precondor as p
from precondor.server import LocalServer
with LocalServer() as server, p.Client(server.address) as client:
    with client.open_session(p.SessionSpec("wheel", [p.Layer("fc", 2, 3)], "identity")).join() as worker:
        print(worker.precondition(0, 0, np.ones((2, 3), np.float32), 1).result().gradient.sum())
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--build", required=True, help="where the wheel's build is kept for the next time")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    venv = pathlib.Path(arguments.build) / "venv-of-user"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = environment(venv)
        built = run(ROOT / "deploy/build-wheel.sh", "--python", sys.executable, "--output", folder, "--build-dir",
                    arguments.build)
        if built.returncode != 0:
            sys.exit(f"deploy/build-wheel.sh failed:\n{built.stdout}{built.stderr}")
        [wheel] = folder.glob("precondor-*manylinux_2_35_x86_64.whl")  # the glibc that docs/use/python.md promises
        if built.stdout.splitlines()[-1] != str(wheel):
            sys.exit(f"deploy/build-wheel.sh said {built.stdout!r}, not {wheel}")
        licences = {entry.rpartition("/")[2] for entry in zipfile.ZipFile(wheel).namelist() if "/licenses/" in entry}
        missing = [name for name in ("precondor", "libgrpc29", "libprotobuf32", "libssl3") if name not in licences]
        if missing:
            sys.exit(f"expected the licence of each library, got none of {missing}: {sorted(licences)}")
        names = {entry for entry in zipfile.ZipFile(wheel).namelist()
                  if not entry.startswith("precondor-") and not entry.endswith("/")}
        own = {entry for entry in names if not entry.startswith("precondor.libs/")}
        if (CUDA_MODULE in own) != ("\nwith the CUDA backend" in built.stderr):
            sys.exit(f"deploy/build-wheel.sh said {built.stderr!r}, got {sorted(own)}")
        extension = own - FILES - PROGRAMS - {CUDA_MODULE}
        if not FILES | PROGRAMS <= own or len(extension) != 1 or not extension.pop().startswith("precondor/_core."):
            sys.exit(f"expected {sorted(FILES | PROGRAMS)} and one extension, got {sorted(own)}")
        installed = run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", "--disable-pip-version-check",
                        wheel)
        if installed.returncode != 0:
            sys.exit(f"pip install {wheel.name} failed:\n{installed.stderr}")
        for program in PROGRAMS:
            name = program.rpartition("/")[2]
            told = run(python.parent / name, "--help")
            if told.returncode != 0 or f"Usage: {name}" not in told.stdout:
                sys.exit(f"the installed {name} --help failed: {told.returncode}\n{told.stdout}{told.stderr}")
        if CUDA_MODULE in own:
            (module,) = venv.glob(f"lib/python3*/site-packages/{CUDA_MODULE}")
            needed = run("readelf", "-d", module).stdout
            if "$ORIGIN/../../nvidia/cu13/lib" not in needed or "libcublas.so.13" not in needed or "libcublas-" in needed:
                sys.exit(f"expected CUDA's libraries from their own packages, got {needed}")
        used = run(python, "-c", LOCAL, cwd=folder)
        if used.returncode != 0 or used.stdout.split() != ["6.0"]:
            sys.exit(f"the installed server does not work: {used.returncode}\n{used.stdout}{used.stderr}")
        server = Server(arguments.server, folder)
        try:
            for first in ("ours", "theirs"):
                used = run(python, "-c", PROGRAM, server.address, first, cwd=folder)
                print(used.stdout + used.stderr)
                where, answer = (used.stdout.splitlines() + ["", ""])[:2]
                if used.returncode != 0 or not where.startswith(str(venv)):
                    sys.exit(f"{first} first: the installed package does not work: {used.returncode}")
                if answer != "6.0":
                    sys.exit(f"{first} first: expected 6.0 and no libraries but the wheel's, got {answer}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
