# SPDX-License-Identifier: Apache-2.0
"""All uses of CUDA by an exchange, so that a test can replace them and use host memory as a device's."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any, Iterable, Optional, Sequence

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
        _log.info("gradients leave CUDA device %d: %s", device, error)
        return b""


def free_bytes(tensor: torch.Tensor) -> int:
    """Returns how much memory of the tensor's CUDA device is free."""
    return int(torch.cuda.mem_get_info(tensor.device)[0])


def stream(tensor: torch.Tensor) -> int:
    """Returns the cudaStream_t that this thread currently uses on the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def synchronize(tensor: torch.Tensor) -> None:
    """Waits for that stream."""
    torch.cuda.current_stream(tensor.device).synchronize()


def matrix(tensor: torch.Tensor) -> Any:
    """Returns an object with `__cuda_array_interface__` for the tensor."""
    return tensor


def pinned(size: int) -> torch.Tensor:
    """Returns f32 elements of pinned host memory, which the device copies directly."""
    return torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)


def tell_backends(backends: Sequence[str], weights: Iterable[torch.Tensor]) -> None:
    """Logs where the servers compute. Warns if that is the CPU, and the weights are on a GPU."""
    if backends:  # earlier servers do not say
        _log.info("the servers compute with backend %s", ", ".join(backends))
    if "cpu" in backends and any(ordinal(weight) is not None for weight in weights):
        warnings.warn("Preconditioner: the model is on a GPU, and a server computes on the CPU, which takes many times as long. "
                      "Its log says why: there is no GPU where it runs, or no CUDA backend (pip install 'precondor[cuda]')")
