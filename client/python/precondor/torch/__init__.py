# SPDX-License-Identifier: Apache-2.0
"""Precondor for PyTorch: Preconditioner replaces a model's gradients by preconditioned ones. docs/use/pytorch.md is the
manual.

This package imports torch, 1.13 or later; `import precondor` does not.
"""

from .._options import Selection
from ._layers import register_layer
from ._optimizer import BaseOptimizer
from ._preconditioner import Preconditioner
from ._reporter import StepResult

__all__ = ["BaseOptimizer", "Preconditioner", "Selection", "StepResult", "register_layer"]
