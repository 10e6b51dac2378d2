# SPDX-License-Identifier: Apache-2.0
"""Precondor for Python: sends statistics and gradients to a preconditioning server and receives preconditioned
gradients.

Begin with Client. docs/use/python.md is the manual.
"""

from ._client import (Client, Future, Preconditioned, Report, Session, Sketch, StepDirective, Worker, WorkerStatus, cuda_device_id,
                      kl_clip_scale)
from ._errors import (AbortedError, CancelledError, DataLossError, DeadlineExceededError, FailedPreconditionError,
                      ForkError, InternalError, InvalidArgumentError, NotFoundError, PermissionDeniedError,
                      PrecondorError, ResourceExhaustedError, UnauthenticatedError, UnavailableError, UnimplementedError)
from ._options import ClientOptions, Security, Selection, Statistics
from ._session import METHODS, Fallback, Layer, LayerMethod, Method, SessionSpec

__version__ = "0.1.0"

__all__ = [
    "AbortedError", "CancelledError", "Client", "ClientOptions", "DataLossError", "DeadlineExceededError", "FailedPreconditionError",
    "Fallback", "ForkError", "Future", "InternalError", "InvalidArgumentError", "Layer", "LayerMethod", "METHODS", "Method",
    "NotFoundError", "PermissionDeniedError", "Preconditioned", "PrecondorError", "Report", "ResourceExhaustedError", "Security", "Selection",
    "Session", "SessionSpec", "Sketch", "Statistics", "StepDirective", "UnauthenticatedError", "UnavailableError",
    "UnimplementedError", "Worker", "WorkerStatus", "cuda_device_id", "kl_clip_scale"
]
