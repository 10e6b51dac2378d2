# SPDX-License-Identifier: Apache-2.0
"""What an exchange asks of CUDA; all of it, so that a test can have the host's memory stand for a device's."""

from __future__ import annotations

from typing import Any, Optional

import torch


def ordinal(tensor: torch.Tensor) -> Optional[int]:
    """Which device has it, as CUDA counts in this process; None: none."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def stream(tensor: torch.Tensor) -> int:
    """The cudaStream_t that this thread works on, on the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def synchronize(tensor: torch.Tensor) -> None:
    """Waits for that stream."""
    torch.cuda.current_stream(tensor.device).synchronize()


def matrix(tensor: torch.Tensor) -> Any:
    """With `__cuda_array_interface__`."""
    return tensor


def pinned(size: int) -> torch.Tensor:
    """f32, of the host's memory that the device copies from and to by itself."""
    return torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)


def first_of(model: torch.nn.Module) -> int:
    """The number of the model's first CUDA device; 0 where it has none."""
    return next((parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda), 0)
