# SPDX-License-Identifier: Apache-2.0
"""Precondor for PyTorch: Preconditioner replaces a model's gradients by preconditioned ones. docs/use/pytorch.md is the
manual.

This package imports torch, 2.6 or later; `import precondor` does not.
"""

# pylint: disable=wrong-import-position  # an older torch gets one clear error
import torch as _torch

if tuple(map(int, _torch.__version__.split(".")[:2])) < (2, 6):
    raise ImportError(f"precondor.torch needs torch 2.6 or later, got {_torch.__version__}")

from .._options import Selection
from ._layers import register_layer
from ._optimizer import BaseOptimizer
from ._preconditioner import Preconditioner
from ._recipe import make_optimizer
from ._reporter import StepResult

__all__ = ["BaseOptimizer", "Preconditioner", "Selection", "StepResult", "make_optimizer", "register_layer"]
