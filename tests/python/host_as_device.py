# SPDX-License-Identifier: Apache-2.0
"""The host's memory in the place of a CUDA device's, for clients and servers whose CUDA runs on the host."""

import contextlib
from unittest import mock

import torch

from device_test import OnDevice
from precondor.torch import _device


@contextlib.contextmanager
def host_as_device(ordinal=lambda tensor: 0, free=1 << 30):
    """precondor.torch takes tensors for those of the device that `ordinal` gives, of which so many bytes are free. What it waited
    for comes with it, by name."""
    calls = {"stream": 0, "synchronize": 0, "pinned": 0}

    def count(name, value):
        calls[name] += 1
        return value

    with mock.patch.multiple(
            _device, ordinal=ordinal, is_part_of_gpu=lambda tensor: False, free_bytes=lambda tensor: free,
            stream=lambda tensor: count("stream", 0),
            synchronize=lambda tensor: count("synchronize", None), matrix=lambda tensor: OnDevice(tensor.numpy()),
            pinned=lambda size: count("pinned", torch.empty(size, dtype=torch.float32))):
        yield calls
