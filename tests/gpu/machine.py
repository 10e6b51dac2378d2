# SPDX-License-Identifier: Apache-2.0
"""The facts of this machine: the device, its driver, CUDA's libraries and tools, and the commit that is tested."""

import glob
import os
import pathlib
import platform
import re
import shutil
import site
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# CUDA's libraries that the loader does not know are in these folders: the wheels of this Python and of environments at common
# places, then the toolkit's folders. Torch in one process with our client must not get libraries of two releases.
LIBRARY_FOLDERS = ["/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64", "/usr/local/cuda/targets/x86_64-linux/lib",
                   "/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu/nvidia/current"]
WHEEL_FOLDERS = ["nvidia/*/lib"]
ENVIRONMENTS = ["/opt/*/lib/python3*/site-packages", "/opt/*/.venv/lib/python3*/site-packages",
                "/usr/lib/python3*/*-packages", "/usr/local/lib/python3*/*-packages"]
LIBRARIES = ("libcublas.so.", "libcublasLt.so.", "libcusolver.so.", "libcusparse.so.", "libnvJitLink.so.")
TOOL_FOLDERS = ["/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*",
                "/usr/local/cuda/compute-sanitizer"]


def output_of(command, seconds=30):
    """Returns the output of `command`, or None where it cannot run, fails or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def library_folders():
    """The folders that have a library of CUDA, each library once: the first folder that has it counts."""
    packages = [*site.getsitepackages(), site.getusersitepackages(), *sys.path, *ENVIRONMENTS]
    patterns = [f"{place}/{folder}" for place in packages if place for folder in WHEEL_FOLDERS] + LIBRARY_FOLDERS
    folders, seen = [], set()
    for pattern in patterns:
        for folder in sorted(glob.glob(pattern), reverse=True):
            names = {name for name in os.listdir(folder) if name.startswith(LIBRARIES)} - seen
            if names:
                folders.append(folder)
                seen |= names
    return folders


def environment():
    """For programs that link CUDA's libraries."""
    given = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(dict.fromkeys(given + library_folders()))}


def find_tool(name):
    """The path of one of CUDA's tools, or None."""
    found = shutil.which(name)
    if found:
        return found
    for pattern in TOOL_FOLDERS:
        for folder in sorted(glob.glob(pattern), reverse=True):
            found = shutil.which(name, path=folder)
            if found:
                return found
    return None


def _version(tool, pattern):
    path = find_tool(tool)
    found = re.search(pattern, output_of([path, "--version"]) or "") if path else None
    return found[1] if found else None


def revision(programs):
    """The commit of the programs: the pack's own, or that of this tree."""
    packed = programs / "revision"
    if packed.exists():
        return packed.read_text(encoding="utf-8").strip()
    commit = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    return commit and commit + (" and changes" if output_of(["git", "-C", str(ROOT), "status", "--porcelain"]) else "")


def _device():
    """Facts of the first device, by nvidia-smi, or what the driver says in /proc where that tool is missing."""
    names = {"device": "name", "driver": "driver_version", "memory": "memory.total", "compute capability": "compute_cap",
             "greatest clock": "clocks.max.sm", "greatest memory clock": "clocks.max.mem", "power limit": "power.limit"}
    listed = output_of(["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader"])
    if listed:
        return dict(zip(names, listed.splitlines()[0].split(", ")))
    device = re.search(r"^Model:\s*(.*)", _content("/proc/driver/nvidia/gpus/*/information"), re.MULTILINE)
    driver = re.search(r"Kernel Module\D*([\d.]+)", _content("/proc/driver/nvidia/version"))
    return {"device": device and device[1], "driver": driver and driver[1]}


def _content(pattern):
    return "".join(pathlib.Path(path).read_text(encoding="utf-8") for path in sorted(glob.glob(pattern))[:1])


def describe(programs, imitation):
    """For the report, each value a text or None."""
    facts = {"revision": revision(programs), "system": platform.platform(), "libc": " ".join(platform.libc_ver()),
             "cores": str(os.cpu_count()), "python": platform.python_version()}
    if imitation:
        return {"device": "the host's imitation of CUDA", **facts}
    return {**_device(), **facts,
            "nvcc": _version("nvcc", r"release \S+, V(\S+)"), "ncu": _version("ncu", r"Version (\S+)"),
            "compute-sanitizer": _version("compute-sanitizer", r"Version (\S+)"),
            "cmake": _version("cmake", r"version (\S+)"), "g++": _version("g++", r"\) (\S+)"),
            "libraries": ":".join(library_folders()) or None}
