# SPDX-License-Identifier: Apache-2.0
"""How the callbacks go on with a preconditioner's state from a framework's checkpoint."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, Optional

from .. import Preconditioner


def resume(preconditioner: Preconditioner, read: Callable[[], Optional[Mapping[str, Any]]]) -> None:
    """Goes on from what `read` returns on rank 0, a result of state_dict(factors=True); a warning tells if there is none. Call it on every
    rank."""
    group = preconditioner._group
    state = group.check(lambda: (read() or {}) if group.rank == 0 else {})
    rest = group.gather({key: value for key, value in state.items() if key != "factors"})[0]
    if not rest:
        warnings.warn("PrecondorCallback: training resumes with new factors and momentum, because its checkpoint has none of a Preconditioner")
        return
    # A restored session chooses its mode anew.
    preconditioner.load_state_dict({**rest, **state}, exact=rest["mode"] != "FIRST_ORDER")
