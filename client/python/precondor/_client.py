# SPDX-License-Identifier: Apache-2.0
"""Client, Session, Worker and Future for NumPy arrays. precondor/client.h is the C++ interface and has all rules.

Every call that waits has a deadline, lets other Python threads run, and ends at Ctrl-C.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import math
import warnings
import weakref
from typing import Any, Callable, Dict, List, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union, overload

import numpy as np

from . import _core, _cuda_libraries, _session
from ._errors import check_number, check_text, check_whole, invalid
from ._options import ClientOptions, Security, check_for_calls
from ._session import SessionSpec

# Objects with threads. They are closed before the interpreter ends, because their threads must not outlive the
# libraries in which they run.
_open: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)

_MOST_RANK = (1 << 32) - 1
_LAYERS = (-(1 << 63), (1 << 63) - 1)  # indexes that no session has are NotFoundError

# Checks of arguments by their names, made after _core has refused one by a TypeError, which has no name.
_CHECKS: Dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("step", "samples", "first_row", "first_step", "incarnation", "stream"), check_whole),
    "rank": lambda what, value: value is None or check_whole(what, value, 0, _MOST_RANK),
    "layer": lambda what, value: check_whole(what, value, *_LAYERS),
    "device": lambda what, value: check_whole(what, value, 0, (1 << 31) - 1),
    **dict.fromkeys(("loss", "learning_rate", "row_scale", "timeout", "clip"), check_number),
    **dict.fromkeys(("side", "session", "name"), check_text),
}

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _names_arguments(call: _Call) -> _Call:
    """Makes a function raise InvalidArgumentError, which names the argument, in place of _core's TypeError."""
    @functools.wraps(call)
    def checked(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except TypeError:
            try:
                given = inspect.signature(call).bind(*arguments, **options).arguments
            except TypeError:
                given = {}  # arguments are missing, as the first error says
            for name, value in given.items():
                if name in _CHECKS:
                    _CHECKS[name](name, value)
            raise

    return checked  # type: ignore[return-value]


class Preconditioned(NamedTuple):  # a step makes one for each layer
    """Outcome of one gradient.

    Attributes:
        gradient: f32 [d_out, d_in]; the array given as `out`, if any. None if decision is "SKIP".
        decision: "PRECONDITIONED"; "IDENTITY" (the averaged gradient itself); or "SKIP" (a rank had no usable gradient:
            skip the optimizer step, as every replica does).
        factor_version: Version of the factors that preconditioned the gradient.
        inner_product: <D, U>, for kl_clip_scale.
        reason: Reason of the decision, for people.
    """

    gradient: Optional[np.ndarray]
    decision: str
    factor_version: int
    inner_product: float
    reason: str


@dataclasses.dataclass(frozen=True)
class StepDirective:
    """The coordinator's answer to a reported step.

    Attributes:
        lease_through_step: Start no step beyond this one.
        next_mode: "SECOND_ORDER" or "FIRST_ORDER", the mode of the step after the reported one.
        snapshot_at: Step of the servers' last snapshot. A checkpoint that is saved before this step begins matches the
            snapshot. 0 means none.
        snapshot_id: Number of that snapshot.
    """

    lease_through_step: int
    next_mode: str
    snapshot_at: int
    snapshot_id: int


class Report:
    """A report that is under way. Thread-safe."""

    def __init__(self, core: _core.Report) -> None:
        self._core = core

    def wait(self, timeout: float) -> bool:
        """Has the report sent and waits for the answer, at most `timeout` seconds; 0: only looks. Returns whether result() would
        return without waiting."""
        return self._core.wait(timeout)

    def result(self) -> StepDirective:
        """Waits for the answer, as Worker.report_step does. Call it once. Ctrl-C ends only the wait."""
        return StepDirective(*self._core.result())


class Future:
    """The answer to one gradient. Thread-safe. Keeps the arrays alive until the answer is complete."""

    def __init__(self, core: _core.Future) -> None:
        self._core = core

    def ready(self) -> bool:
        """Returns whether result() would return without waiting."""
        return self._core.ready()

    @_names_arguments
    def wait(self, timeout: float = math.inf) -> bool:
        """Waits for the answer, at most `timeout` seconds, and returns ready(). Ctrl-C ends only the wait."""
        return self._core.wait(timeout)

    def result(self) -> Preconditioned:
        """Waits for the answer and returns it. Repeated calls return equal results.

        Raises:
            DeadlineExceededError: No answer within the client's result_timeout after the submission.
            PrecondorError: The gradient was refused, or had a wrong shape, layer or step: precondition() reports these
                errors here.
        """
        return results([self])[0]


def results(futures: Sequence[Future]) -> List[Preconditioned]:
    """Waits for answers of one worker, in order, and returns them. Raises the first error."""
    return [Preconditioned(*one) for one in _core.results([future._core for future in futures])]


def warn_of_lost_updates(session: str, lost: Mapping[str, int]) -> None:
    """Warns if servers have lost updates of layers: numbers by the layers' names."""
    if lost:
        names = ", ".join(list(lost)[:3]) + (", ..." if len(lost) > 3 else "")
        warnings.warn(f"session {session}: a server has lost updates of {len(lost)} {'layer' if len(lost) == 1 else 'layers'} ({names}), "
                      f"up to {max(lost.values())} each. Training goes on with older factors, and differs from a run without the "
                      "loss. A server with --data-dir keeps its updates (docs/operate/operations.md)")


def lost_since(before: Mapping[str, int], now: Mapping[str, int]) -> Dict[str, int]:
    """Returns the updates that were lost between two WorkerStatus.lost_updates."""
    return {name: updates - before.get(name, 0) for name, updates in now.items() if updates != before.get(name, 0)}


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """Counts and states since a worker joined.

    Attributes:
        epoch: Version of the session's membership.
        traffic: Counters, in bytes: statistics_bytes and gradient_bytes (payload sent), result_bytes (payload received),
            and overhead_bytes (headers, acknowledgements and control calls, both ways); and the number of reconnects.
        device_plane: The "backends" of the shards that the worker has reached ("cpu", "cuda"), how many gradients in device
            memory stayed there ("in_ring") or were copied to the host ("over_socket"), and the "reason" of the last copy.
        lost_updates: Numbers of updates that servers have lost, by the layers' names: such a server has come back with
            older factors, or none. Training goes on, but not as without the loss.
    """

    epoch: int
    traffic: Mapping[str, int]
    device_plane: Mapping[str, Any]
    lost_updates: Mapping[str, int]


class Sketch:
    """The signs of SIGNED for one side of a layer at a step, made by Worker.sketch. For callers that compute the sketches
    themselves, or from a part of the rows at a time; docs/develop/math/statistics.md has the formula."""

    def __init__(self, core: _core.Worker, step: int, layer: int, side: str, rank: Optional[int]) -> None:
        self._core = core
        self._key = step, layer, side
        self._rank = rank

    @_names_arguments
    def signs(self, first_row: int, rows: int) -> np.ndarray:
        """Returns the signs, f32 [k, rows] of +1 and -1, for `rows` rows of the rank, from `first_row` on."""
        return self._core.sketch_signs(*self._key, first_row, rows, self._rank)

    @_names_arguments
    def sums(self, first_row: int, rows: np.ndarray, ones: bool = False) -> np.ndarray:
        """Returns the unscaled sums, f32 [k, d], for a part `rows` [n, d] of the rank's rows, which begins at row
        `first_row`. With `ones` a 1 is appended to each row, and the result is [k, d + 1]."""
        return self._core.sketch_sums(*self._key, first_row, rows, ones, self._rank)


class Worker:
    """One rank of one session, made by Session.join. Thread-safe. Steps may overlap as far as the lease allows.

    Steps count from 0. A layer is given as its index in spec.layers. Ctrl-C in a waiting call, except in a future's,
    ends the worker: join again to go on. Calls raise ForkError in a forked child.

    Attributes:
        spec: The session's description, with all defaults filled in.
        rank: This worker's rank.
        rollback_step: The step to which the job had rolled back when this worker joined; None if it never has. A rollback
            leaves the factors as they are, with the updates of later steps.
    """

    def __init__(self, core: _core.Worker) -> None:
        self._core = core
        self.spec: SessionSpec = _session.from_dict(core.spec())
        self.rank: int = core.rank()
        self.rollback_step: Optional[int] = core.rollback_step()
        _open.add(self)

    def status(self) -> WorkerStatus:
        """Returns counters, and what has happened to the session, since the worker joined."""
        fields = self._core.status()
        lost = {self.spec.layers[place].name: updates for place, updates in fields["lost_updates"].items()}
        return WorkerStatus(**{**fields, "lost_updates": lost})

    @_names_arguments
    def mode(self, step: int) -> str:
        """Returns the mode of a step up to the lease's end: "SECOND_ORDER" or "FIRST_ORDER"."""
        return self._core.mode_of(step)

    @_names_arguments
    def needs_statistics(self, step: int, layer: int) -> bool:
        """Returns whether to call send_statistics or abstain_statistics for the layer at this step. Raises
        NotFoundError if the session has no such layer."""
        return self._core.needs_statistics(step, layer)

    @_names_arguments
    def sends_gradient(self, layer: int) -> bool:
        """Returns whether this rank sends the layer's gradient: in DELEGATE one rank does, otherwise all. Raises
        NotFoundError if the session has no such layer."""
        return self._core.sends_gradient(layer)

    @_names_arguments
    def compute_statistics(self, step: int, layer: int, side: str, rows: np.ndarray, row_scale: float = 1.0) -> np.ndarray:
        """Computes one side's statistics of this rank's rows, for send_statistics. docs/develop/math/statistics.md has the formulas.

        Args:
            step: The step.
            layer: Index of the layer.
            side: "input" (d = d_in; with has_bias the rows end in a 1) or "output" (d = d_out; gradients of the outputs).
            rows: [n, d], n >= 1.
            row_scale: 1 for inputs. For output gradients of a loss that is a mean over rows, the number of rows.

        Returns:
            f32 [k, d] with k = 1 for means and the rank's number of sketches for SIGNED. For COVARIANCE [n, d], or the
            packed lower triangle [1, d (d + 1) / 2] if that is smaller.

        Raises:
            InvalidArgumentError: rows have another shape, or side another value.
            NotFoundError: No such layer.
        """
        return self._core.statistics(step, layer, side, rows, row_scale)

    def sketch(self, step: int, layer: int, side: str, rank: Optional[int] = None) -> Sketch:
        """Returns the signs of SIGNED of a layer's side at a step, for the rows of `rank`, by default this one."""
        for what, value in (("step", step), ("layer", layer), ("side", side), ("rank", rank)):
            _CHECKS[what](what, value)
        return Sketch(self._core, step, layer, side, rank)

    @_names_arguments
    def send_statistics(self, step: int, layer: int, a: np.ndarray, g: np.ndarray, samples: int) -> None:
        """Sends the statistics of one layer at a statistic step. The arrays are copied before this returns. flush()
        raises what the server refuses later.

        Args:
            step: The step.
            layer: Index of the layer.
            a: Statistics of the inputs, [k, d_in], from compute_statistics.
            g: Statistics of the output gradients, [k, d_out], from compute_statistics.
            samples: Number of this rank's rows.

        Raises:
            InvalidArgumentError: A wrong shape.
            FailedPreconditionError: Not a statistic step.
            NotFoundError: No such layer.
        """
        self._core.send_statistics(step, layer, a, g, samples)

    @_names_arguments
    def abstain_statistics(self, step: int, layer: int) -> None:
        """Takes part in a statistic step without statistics (skipped AMP step, unused layer)."""
        self._core.abstain_statistics(step, layer)

    @_names_arguments
    def precondition(self, step: int, layer: int, gradient: Any, samples: int, out: Optional[np.ndarray] = None, *,
                     parts: Optional[Sequence[Tuple[int, int, int, int, bool]]] = None, device: int = 0, stream: int = 0,
                     more: bool = False) -> Future:
        """Sends a gradient and returns the future of the preconditioned one.

        An f32 gradient whose rows have no gaps is sent from the array's own memory: do not write to it until the future
        is ready. Other arrays are converted first. A gradient that is not finite is answered "SKIP". The future raises
        all errors except those below.

        Args:
            step: The step.
            layer: Index of the layer.
            gradient: [d_out, d_in], real numbers; or f32 [d_out, d_in] in the memory of a CUDA device, with
                `__cuda_array_interface__` as torch's and CuPy's arrays have, which the answer replaces. The latter requires
                libprecondor-cuda.so (docs/operate/cuda.md), and can stay on the device if the shard is there too.
            samples: Weight of the gradient in DIRECT. With `parts` it is ignored.
            out: f32 [d_out, d_in] for the answer, which may be `gradient` itself. None: a new array; not with `parts`.
            parts: Exchange "SHARDED", in which every rank calls this for every layer: rectangles (first row, rows, first
                column, columns, sent) of [d_out, d_in]. Those that are sent, of all ranks, contain each element once; the
                others are only received. `gradient` is f32 [1, n], the elements of the sent parts, each row by row. `out`
                is required, f32 [1, m], for those of all these parts.
            device: Number of the CUDA device in this process.
            stream: The cudaStream_t whose work produces the gradient (`torch.cuda.current_stream().cuda_stream`).
            more: Another gradient follows at once. A small one in host memory may wait for it, to share its message, until a
                missing answer is asked for, and .2 s at most.

        Raises:
            InvalidArgumentError: `gradient` is no matrix of real numbers, on a device no f32 matrix, or `out` cannot be
                written in place.
        """
        if hasattr(gradient, "__cuda_array_interface__"):
            if out is not None or parts is not None:
                raise invalid("gradient", "one in host memory, with out or parts", gradient)
            _cuda_libraries.preload()
            return Future(self._core.precondition_on_device(step, layer, gradient, samples, device, stream))
        if parts is not None:
            return Future(self._core.precondition_parts(step, layer, parts, gradient, out))
        return send_all(self, step, [(layer, gradient, out)], samples, more)[0]

    @_names_arguments
    def device_plane_status(self, layer: int, device: int = 0) -> str:
        """Returns "" if the layer's gradients in this device's memory may stay there, or if that is not known yet;
        otherwise the reason why they go through the host while the connection to the shard lasts. Raises NotFoundError
        if the session has no such layer."""
        _cuda_libraries.preload()
        return self._core.device_plane_status(layer, device)

    @_names_arguments
    def abstain_gradient(self, step: int, layer: int) -> Future:
        """Abstains from the step's gradient, so that every rank's answer is "SKIP". Returns the future of the
        answer."""
        return Future(self._core.abstain_gradient(step, layer))

    @_names_arguments
    def factors_checksum(self, layer: int) -> int:
        """Returns a checksum of the layer's factors in REPLAY and PULL_FACTORS, which is equal on ranks whose factors
        are bitwise equal.

        Waits for the updates of the statistics that this rank has sent. Compare the values of all ranks at one step.

        Raises:
            FailedPreconditionError: The session has another exchange.
            NotFoundError: No such layer.
            DeadlineExceededError: The updates did not arrive within result_timeout.
        """
        return self._core.factors_checksum(layer)

    @_names_arguments
    def read_factors(self, layer: int) -> bytes:
        """Reads a layer's factors from its server, for Client.restore_session.

        They are exactly those after the last step if every rank has that step's answers and has called flush(), and if no
        rank sends anything for the next step before this call returns.

        Returns:
            The factors as the layer's method saves them.

        Raises:
            NotFoundError: no such layer. DeadlineExceededError: result_timeout.
        """
        return self._core.read_factors(layer)

    def flush(self) -> None:
        """Waits until all contributions are acknowledged. Raises the first refusal of statistics since the last
        flush."""
        self._core.flush()

    @overload
    def report_step(self, step: int, loss: float, samples: int, learning_rate: float, finite: bool = True, *,
                    wait: Literal[True] = True) -> StepDirective: ...

    @overload
    def report_step(self, step: int, loss: float, samples: int, learning_rate: float, finite: bool = True, *,
                    wait: Literal[False]) -> Report: ...

    @_names_arguments
    def report_step(self, step: int, loss: float, samples: int, learning_rate: float, finite: bool = True, *,
                    wait: bool = True) -> Union[StepDirective, Report]:
        """Reports a finished step, in order of steps, and waits until the next one may start.

        Args:
            step: The finished step.
            loss: This rank's loss, a mean over `samples`.
            samples: Weight of the loss.
            learning_rate: The step's learning rate.
            finite: False if the step was skipped because of values that are not finite.
            wait: False: returns a Report at once. The work of the next step may begin before its result(). Steps shorter
                than 20 ms then share a call. close() does not wait for the last ones.

        Raises:
            AbortedError: The job rolled back to an earlier step, which the message names.
            DeadlineExceededError: The coordinator was unreachable for lease_timeout at the end of the lease.
        """
        if not wait:
            return Report(self._core.begin_report(step, loss, samples, finite, learning_rate))
        return StepDirective(*self._core.report_step(step, loss, samples, finite, learning_rate))

    def close(self, *, leave: bool = False) -> None:
        """Closes the connections. Waiting calls and unanswered futures end with CancelledError.

        Args:
            leave: Give the rank back to the coordinator first; call flush() before. Otherwise the next process that joins
                with the rank takes it over.

        Raises:
            UnavailableError: With `leave`, the coordinator does not answer; at once if it was a LocalServer that has ended.
                The connections are closed.
        """
        try:
            if leave:
                self._core.leave()
        finally:
            self._core.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def send_all(worker: Worker, step: int, gradients: Sequence[Tuple[int, Any, Optional[np.ndarray]]], samples: int,
             more: bool) -> List[Future]:
    """Does what Worker.precondition does for several layers: for each the index, and the gradient and `out` in host memory."""
    return [Future(one) for one in worker._core.precondition(step, gradients, samples, more)]


class Session:
    """An open session, made by Client.open_session.

    Attributes:
        name: Name of the session.
        created: True if this call of open_session created the session, False if it existed with an equal description.
        unused: True if no worker has ever joined the session: it is new, or a job that has ended left it before its first step.
    """

    def __init__(self, client: "Client", name: str, created: bool, unused: bool) -> None:
        self._client = client
        self.name = name
        self.created = created
        self.unused = unused

    def join(self, rank: int = 0, first_step: int = 0, incarnation: int = 0, factor_versions: Sequence[int] = ()) -> Worker:
        """Takes a rank and waits until every rank has joined.

        Args:
            rank: The rank.
            first_step: First step of this process: 0, or the step of its checkpoint.
            incarnation: Number of the process that takes the rank; the process with the highest number has the rank. 0
                means the current time.
            factor_versions: By layer, the factor_version of this rank's last answer before first_step; 0: unknown.
                WorkerStatus.lost_updates then counts the updates that the servers have lost since. Empty: all are unknown.

        Raises:
            DeadlineExceededError: A rank did not join within join_timeout.
            AbortedError: The job has just rolled back to a step before first_step, which the message names; begin with
                that step.
            NotFoundError: The session was closed, or has no such rank.
            PermissionDeniedError: The session belongs to another job (docs/operate/security.md).
        """
        return self._client.join(self.name, rank, first_step, incarnation, factor_versions)

    def close(self) -> bool:
        """Does what Client.close_session does for this session."""
        return self._client.close_session(self.name)


class Client:
    """Makes the control calls of one process to a coordinator. Thread-safe.

    Ctrl-C in a waiting call ends the client. In a forked child, the parent's clients and any new client raise
    ForkError.

    Args:
        address: The coordinator's: host:port, or unix:/path/to/socket.
        options: Time-outs, security and the trace. `replace` and `local_memory` have to be the defaults.
        rank_devices: The CUDA device of each rank's gradients (precondor.cuda_device_id; b"": none), or nothing. In
            DELEGATE a rank on the device of a layer's shard then sends the layer, in sessions that this client creates.

    Raises:
        UnavailableError: No server answers within connect_timeout.
        FailedPreconditionError: The server is a shard and not a coordinator, or is of an incompatible release.
        UnimplementedError: The process at the address is no Precondor server, or one of another version.
        UnauthenticatedError, PermissionDeniedError: The server does not know this client, or gives it another role.
        InvalidArgumentError: An argument has another type.
        NotFoundError: A file of `options.security` cannot be read.
    """

    def __init__(self, address: str, options: ClientOptions = ClientOptions(), *, rank_devices: Sequence[bytes] = ()) -> None:
        from . import server  # pylint: disable=import-outside-toplevel  # `python -m precondor.server` expects it not imported
        check_text("address", address)
        check_for_calls("options", options)
        if isinstance(rank_devices, bytes) or not all(isinstance(one, bytes) for one in rank_devices):
            raise invalid("rank_devices", "bytes for each rank", rank_devices)
        files = options.security or Security()
        self._core = _core.Client(address, options.connect_timeout, options.rpc_timeout, options.result_timeout,
                                  options.join_timeout, options.lease_timeout, files.tls_ca, files.tls_cert, files.tls_key,
                                  files.token_file, options.traceparent, list(rank_devices), server.watch_of(address))
        _open.add(self)
        try:
            self._core.wait_for_server()
        except BaseException:
            self.close()
            raise

    def open_session(self, spec: SessionSpec) -> Session:
        """Opens the session, or finds it open with an equal description.

        Raises:
            InvalidArgumentError: A field is invalid; the message has the field, the accepted values and the actual
                value.
            FailedPreconditionError: Reason "SPEC_MISMATCH": a session of this name differs in the field that the
                message names.
            UnimplementedError, ResourceExhaustedError: The servers do not support it, or have no room.
        """
        fields = _session.to_dict(spec)
        return Session(self, spec.name, *self._core.open_session(fields))

    def restore_session(self, spec: SessionSpec, step: int, factors: Sequence[bytes]) -> Session:
        """Opens a session that begins with `step` and with the factors that Worker.read_factors returned for each layer.

        Its world_size and its servers may differ from those of the session that was read. Session.join waits until the
        servers have the factors.

        Raises:
            InvalidArgumentError: `factors` does not have one entry per layer.
            FailedPreconditionError: a session of this name exists, or a layer's factors are of another method,
                configuration or shape.
        """
        self._core.restore_session(_session.to_dict(spec), step, list(factors))
        return Session(self, spec.name, created=True, unused=False)

    @_names_arguments
    def join(self, session: str, rank: int = 0, first_step: int = 0, incarnation: int = 0, factor_versions: Sequence[int] = ()) -> Worker:
        """Does what Session.join does, for a session that another process has opened. The worker may outlive the
        client."""
        return Worker(self._core.join(session, rank, incarnation, first_step, list(factor_versions)))

    @_names_arguments
    def close_session(self, name: str) -> bool:
        """Ends the session for all ranks and frees its factors on the servers. Returns False if it did not exist.

        Raises:
            UnavailableError: No server answers within rpc_timeout; at once if the server was a LocalServer that has ended.
        """
        return self._core.close_session(name)

    def close(self) -> None:
        """Ends waiting calls with CancelledError. Does not affect workers."""
        self._core.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


@_names_arguments
def cuda_device_id(device: int) -> bytes:
    """Returns what identifies a CUDA device of this process in every process of the host, for Client.rank_devices.

    Raises:
        UnavailableError: There is no such device, or the installation has no CUDA backend.
    """
    _cuda_libraries.preload()
    return _core.cuda_device_id(device)


@_names_arguments
def kl_clip_scale(inner_products: Union[Sequence[float], np.ndarray], learning_rate: float, clip: float) -> float:
    """Returns the factor by which scaling KL_CLIP (a method option) multiplies all PRECONDITIONED answers of a step:
    min(1, sqrt(clip / (learning_rate^2 |sum of inner products|))); 1 if the sum is 0, 0 if it is not a number."""
    return _core.kl_clip_scale(inner_products, learning_rate, clip)
