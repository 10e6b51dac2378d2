# SPDX-License-Identifier: Apache-2.0
"""What the callbacks do with a preconditioner's state in a framework's checkpoints."""

from __future__ import annotations

import warnings
from typing import Any, Mapping, Optional

from .. import Preconditioner


def resume(preconditioner: Preconditioner, state: Optional[Mapping[str, Any]]) -> None:
    """Goes on from rank 0's result of state_dict(factors=True); without one a warning tells. Call it on every rank."""
    group = preconditioner._group
    rest = group.gather({key: value for key, value in (state or {}).items() if key != "factors"})[0]
    if not rest:
        warnings.warn("PrecondorCallback: training resumes with new factors and momentum, because its checkpoint has none of a Preconditioner")
        return
    own = state if group.rank == 0 else rest
    preconditioner.load_state_dict(own, exact=rest["mode"] != "FIRST_ORDER")  # a restored session chooses its mode anew
