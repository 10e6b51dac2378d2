# SPDX-License-Identifier: Apache-2.0
"""CUDA's libraries in packages of Python's (the extra `cuda`) that lie apart from this one: in a user's or the system's
site-packages, or on PYTHONPATH. libprecondor-cuda.so itself finds only those beside it, and the system's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
from typing import Dict, List, Mapping

_FOLDER = "cu13/lib"  # in the namespace package `nvidia`
_LAST = "libcusolver.so.12"  # needs the others


def folders() -> List[str]:
    """Returns the folders with such libraries."""
    spec = importlib.util.find_spec("nvidia")
    found = [pathlib.Path(one) / _FOLDER for one in (spec.submodule_search_locations if spec else None) or ()]
    return [str(folder) for folder in found if folder.is_dir()]


@functools.lru_cache(maxsize=None)
def preload() -> None:
    """Loads them into this process, as long as none is missing, so that libprecondor-cuda.so need not find them."""
    for folder in folders():
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"{folder}/{_LAST}")
            return


def with_search_path(environment: Mapping[str, str]) -> Dict[str, str]:
    """Returns the environment for a process that finds them."""
    known = [one for one in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if one]
    path = known + [folder for folder in folders() if folder not in known]
    return {**environment, **({"LD_LIBRARY_PATH": os.pathsep.join(path)} if path else {})}
