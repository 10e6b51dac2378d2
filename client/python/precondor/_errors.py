# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the package, and advice for each."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Optional, Type, TypeVar

_MOST_SHOWN = 120  # characters of a value in a message
_MOST_WHOLE = (1 << 64) - 1

_Kind = TypeVar("_Kind")


class PrecondorError(Exception):
    """A call that failed. `str(error)` has the message and the advice.

    Attributes:
        code: Name of the status code, e.g. "UNAVAILABLE". Each code has a subclass.
        reason: ErrorReason, e.g. "SPEC_MISMATCH"; "UNSPECIFIED" if the code says enough.
        message: What failed, with the key, the expected and the actual value; without the advice.
        advice: What to do; may be empty.
    """

    def __init__(self, message: str, code: str = "UNKNOWN", reason: str = "UNSPECIFIED", advice: str = "") -> None:
        super().__init__(f"{message}. {advice}" if advice else message)
        self.code = code
        self.reason = reason
        self.message = message
        self.advice = advice


class InvalidArgumentError(PrecondorError, ValueError):
    """An invalid argument: a shape, a type or an option. Nothing was changed."""


class NotFoundError(PrecondorError, LookupError):
    """No such session, layer or rank; or a file of Security that cannot be read."""


class FailedPreconditionError(PrecondorError):
    """The call is not possible in this state: another description of the session, a step too early, another process
    that has the rank, or a closed object."""


class AbortedError(PrecondorError):
    """The job rolled back to an earlier step, or another rank failed."""


class ResourceExhaustedError(PrecondorError):
    """The servers have no room for the session, or for so many requests at a time."""


class UnavailableError(PrecondorError, ConnectionError):
    """No server answers at the address, or the server is shutting down."""


class DeadlineExceededError(PrecondorError, TimeoutError):
    """The call took longer than the client's time-out for it."""


class DataLossError(PrecondorError):
    """Stored state is damaged."""


class UnimplementedError(PrecondorError, NotImplementedError):
    """The server does not know the call, the method or the mode."""


class UnauthenticatedError(PrecondorError):
    """The server does not know this client: the call had no token or certificate that the server lists."""


class PermissionDeniedError(PrecondorError):
    """The server knows this client, but the client's role does not permit the call."""


class InternalError(PrecondorError):
    """A bug of Precondor, or a failure of a device."""


class CancelledError(PrecondorError):
    """The worker or client was closed, or Ctrl-C ended one of its calls, on this or another thread."""


class ForkError(PrecondorError, RuntimeError):
    """A client of the parent process was used in a forked child, which has none of its threads."""


_CLASSES = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "OUT_OF_RANGE": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "FAILED_PRECONDITION": FailedPreconditionError,
    "ABORTED": AbortedError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "DATA_LOSS": DataLossError,
    "UNIMPLEMENTED": UnimplementedError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "INTERNAL": InternalError,
    "CANCELLED": CancelledError,
}

_ADVICE_OF_REASON = {
    "SPEC_MISMATCH": "The session name is taken by a session of another description: another job uses it, or the model "
                     "or its options changed since the last run. Choose another name, or end that session first "
                     "(Client.close_session)",
    "UNKNOWN_SESSION": "Open the session first (Client.open_session); it may have been closed meanwhile",
    "STALE_INCARNATION": "A newer process has this rank: end this one, or give every process a rank of its own",
    "STALE_EPOCH": "Load the checkpoint of the step that is named and join again with it as first_step",
    "STEP_TOO_FAR_AHEAD": "Report each finished step (Worker.report_step) before the next one",
    "CAPACITY": "Give the servers more memory, add shards, or choose a smaller rank or low-rank factors",
    "DRAINING": "The server is going down; go on with another, or later",
}

_ADVICE_OF_CODE = {
    "UNAVAILABLE": "Check the address (the coordinator's, host:port or unix:/path) and that precondor-server runs there; "
                   "ClientOptions(connect_timeout=...) is how long a client waits for it",
    "UNIMPLEMENTED": "What answers is no Precondor server, or one of another version: use the same version on both "
                     "sides",
    "UNAUTHENTICATED": "Check security (precondor.Security) and that the server's access file lists this client's token or "
                       "certificate (docs/operate/security.md)",
    "CANCELLED": "Join again to go on",
}


def from_status(code: str, reason: str, message: str) -> PrecondorError:
    """Returns the exception for a status of the C++ client."""
    advice = _ADVICE_OF_REASON.get(reason) or _ADVICE_OF_CODE.get(code, "")
    return _CLASSES.get(code, PrecondorError)(message, code, reason, advice)


def fork_error(owner: int, here: int) -> ForkError:
    """Returns the exception for process `here`, forked from `owner`, which had a client."""
    return ForkError(
        f"process {here} was forked from process {owner}, which has a precondor client, and a fork has none of its threads",
        "FAILED_PRECONDITION", "UNSPECIFIED",
        "Use precondor in the parent alone, start the child with multiprocessing's 'spawn' or 'forkserver', or make the "
        "first client of the parent after forking")


# --- arguments of the package's own functions --------------------------------------------------------------------------


def invalid(what: str, expected: str, value: Any, advice: str = "") -> InvalidArgumentError:
    """Returns the exception for argument `what`, for which a user gave `value`."""
    text = repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"{type(value).__name__} of {value.dtype}, of shape {list(value.shape)}"
    elif len(text) > _MOST_SHOWN:
        text = f"{type(value).__name__} {text[:_MOST_SHOWN]}..."
    return InvalidArgumentError(f"{what}: expected {expected}, got {text}", "INVALID_ARGUMENT", "UNSPECIFIED", advice)


def check_mapping(what: str, value: Optional[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns `value`, {} for None. Raises InvalidArgumentError if it is no mapping from texts."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(what, "a dict", value)
    for key in value:
        if not isinstance(key, str):
            raise invalid(what, "a dict with keys of type str", key)
    return value


def check_number(what: str, value: Any, least: float = -math.inf, below: Optional[float] = None) -> float:
    """Returns `value` as a float. Raises InvalidArgumentError unless it is a number; with `least`, of at least that and not NaN;
    and with `below` less than that, which may be infinity."""
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = None
    if number is not None and (least == -math.inf or number >= least) and (below is None or number < below):
        return number
    expected = "a finite number" if below == math.inf else "a number"
    expected += "" if least == -math.inf else f" of at least {least:g}"
    raise invalid(what, expected if below in (None, math.inf) else f"{expected} and below {below:g}", value)


def check_whole(what: str, value: Any, least: int = 0, most: int = _MOST_WHOLE) -> int:
    """Returns `value` as an int. Raises InvalidArgumentError unless it is a whole number of least ... most."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise invalid(what, f"a whole number of {least} ... {most}", value)
    return number


def check_bool(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(what, "a bool", value)
    return value


def check_text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(what, "a str", value)
    return value


def expect_instance(what: str, value: Any, kind: Type[_Kind]) -> _Kind:
    """Returns `value`. Raises InvalidArgumentError unless it is an instance of `kind`, a class of precondor; a dict is none."""
    if not isinstance(value, kind):
        raise invalid(what, f"a precondor.{kind.__name__}", value, f"Write {what}=precondor.{kind.__name__}(...)")
    return value
