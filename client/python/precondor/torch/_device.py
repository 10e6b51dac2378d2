# SPDX-License-Identifier: Apache-2.0
"""All uses of CUDA by an exchange, so that a test can replace them and use host memory as a device's."""

from __future__ import annotations

import functools
import logging
import os
import sys
import uuid
import warnings
from typing import Any, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import torch

from .._client import cuda_device_id
from .._errors import PrecondorError

_log = logging.getLogger("precondor")


def ordinal(tensor: torch.Tensor) -> Optional[int]:
    """Returns the number of the tensor's CUDA device in this process; None: it is on no CUDA device."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def identity(tensor: torch.Tensor) -> bytes:
    """Returns the tensor's CUDA device as Client.rank_devices has it. Empty: it is on no CUDA device, or the installation has no
    CUDA backend."""
    device = ordinal(tensor)
    return b"" if device is None else _identity_of(device)


@functools.lru_cache(maxsize=None)
def _identity_of(device: int) -> bytes:
    try:
        return cuda_device_id(device)
    except PrecondorError as error:
        warnings.warn(f"Preconditioner: gradients leave CUDA device {device}: {error.message}")
        return b""


def gpu_name(tensor: torch.Tensor) -> str:
    """Returns the name of the tensor's CUDA device for CUDA_VISIBLE_DEVICES, in every process of the host."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if own.startswith("MIG-"):  # a process has at most one part of a GPU
        return own
    return f"{'MIG' if is_part_of_gpu(tensor) else 'GPU'}-{uuid.UUID(bytes=identity(tensor))}"


def is_part_of_gpu(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's CUDA device is an instance of MIG, which the device's name says."""
    return " MIG " in torch.cuda.get_device_name(tensor.device)


def free_bytes(tensor: torch.Tensor) -> int:
    """Returns how much memory of the tensor's CUDA device is free."""
    return int(torch.cuda.mem_get_info(tensor.device)[0])


def stream(tensor: torch.Tensor) -> int:
    """Returns the cudaStream_t that this thread currently uses on the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def synchronize(tensor: torch.Tensor) -> None:
    """Waits for that stream."""
    torch.cuda.current_stream(tensor.device).synchronize()


def to_host(tensors: Sequence[torch.Tensor]) -> List[np.ndarray]:
    """Returns copies, or the tensors' own memory if it is the host's. Waits once for each CUDA device."""
    copies = [one.to("cpu", non_blocking=one.is_cuda) for one in tensors]
    for device in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [one.numpy() for one in copies]


def matrix(tensor: torch.Tensor) -> Any:
    """Returns an object with `__cuda_array_interface__` for the tensor."""
    return tensor


def pinned(size: int) -> torch.Tensor:
    """Returns f32 elements of pinned host memory, which the device copies directly."""
    return torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)


def tell_servers(plane: Mapping[str, Any], weights: Iterable[torch.Tensor], first: bool, own: bool) -> None:
    """Tells where the servers compute, and how gradients get there.

    Args:
        plane: WorkerStatus.device_plane after the first answers.
        weights: Those of the layers.
        first: This is the job's first rank, which tells what all have in common.
        own: The servers are the job's own, so that gradients of a GPU can stay on it.
    """
    on_gpu = any(ordinal(weight) is not None for weight in weights)
    through_host = f"gradients leave their GPU through the host's memory: {plane['reason']}" if on_gpu and plane["reason"] else ""
    if first and plane["backends"]:  # earlier servers do not say
        _tell("; ".join(filter(None, (f"the servers compute with backend {', '.join(plane['backends'])}", through_host))))
    if on_gpu and "cpu" in plane["backends"]:
        warnings.warn("Preconditioner: the model is on a GPU, and a server computes on the CPU, which takes many times as long. "
                      "Its log says why: there is no GPU where it runs, or no CUDA backend (pip install 'precondor[cuda]')")
    elif own and through_host:
        moved = "offers no ring" in through_host or "another device" in through_host
        warnings.warn(f"Preconditioner: {through_host}. That takes many times as long as on it (docs/operate/cuda.md)" +
                      (". Make the Preconditioner when the model is on its GPU, one GPU in each process" if moved else ""))


def _tell(line: str) -> None:
    _log.info(line)
    if not _log.hasHandlers():  # nor does Python show it by itself
        print(f"precondor: {line}", file=sys.stderr)
