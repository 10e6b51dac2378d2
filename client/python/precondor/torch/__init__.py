# SPDX-License-Identifier: Apache-2.0
"""Precondor for PyTorch."""

from .lamb import Lamb

__all__ = ["Lamb"]
