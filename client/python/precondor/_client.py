# SPDX-License-Identifier: Apache-2.0
"""Client, Session, Worker and Future: NumPy in, NumPy out. precondor/client.h is the same in C++, and has the rules.

Every call that may wait has a deadline, leaves other Python threads running, and ends at Ctrl-C.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import weakref
from typing import Any, Dict, Optional, Sequence, Union

import numpy as np

from . import _core, _session
from ._session import SessionSpec

# What has threads: ended before the interpreter ends, as those must not outlive the libraries they run in.
_open: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


@dataclasses.dataclass(frozen=True)
class Preconditioned:
    """What became of one gradient.

    gradient: f32 [d_out, d_in], the array given as `out` if one was; None when decision is "SKIP".
    decision: "PRECONDITIONED"; "IDENTITY": the averaged gradient as it is; "SKIP": some rank had no usable gradient:
        skip the optimizer step, as every replica does.
    factor_version: of the factors that it was made with.
    inner_product: <D, U>, for kl_clip_scale.
    reason: of the decision, for people.
    """

    gradient: Optional[np.ndarray]
    decision: str
    factor_version: int
    inner_product: float
    reason: str


@dataclasses.dataclass(frozen=True)
class StepDirective:
    """The coordinator's answer to a reported step.

    lease_through_step: start no step beyond this one.
    next_mode: "SECOND_ORDER" or "FIRST_ORDER", of the step after the reported one.
    snapshot_at, snapshot_id: save a checkpoint when this is the step begun next, to go with that snapshot; 0: none.
    """

    lease_through_step: int
    next_mode: str
    snapshot_at: int
    snapshot_id: int


@dataclasses.dataclass(frozen=True)
class Security:
    """The files with which a client knows its servers and proves who it is, each read again when it changes.

    docs/security.md says how to make them. They apply to host:port addresses; a unix: address needs none.

    tls_ca: certificates (PEM) of the authorities that sign servers' certificates; without it connections are in plaintext.
    tls_cert, tls_key: this client's certificate and its key, for servers that require one.
    token_file: one line, the bearer token that goes with every call.
    """

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""


class Future:
    """The answer to one gradient. Thread-safe; holds the arrays until it is there."""

    def __init__(self, core: _core.Future) -> None:
        self._core = core

    def ready(self) -> bool:
        """Whether result() would not wait."""
        return self._core.ready()

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits, at most `timeout` seconds; ready(). Ctrl-C ends the wait, and the future stays as it is."""
        return self._core.wait(timeout)

    def result(self) -> Preconditioned:
        """Waits for the answer; repeated calls return the same.

        Raises:
            DeadlineExceededError: not within the client's result_timeout of its submission.
            PrecondorError: it was refused, or had a wrong shape, layer or step, of which precondition() itself tells nothing.
        """
        return Preconditioned(*self._core.result())


class Worker:
    """One rank of one session. Made by Session.join. Thread-safe; steps may overlap as far as the lease allows.

    Steps count from 0. Layers are places in spec.layers. Ctrl-C in a call that waits, other than a future's, ends the
    worker: join again to go on. Unusable in a forked child (ForkError).
    """

    def __init__(self, core: _core.Worker) -> None:
        self._core = core
        self.spec: SessionSpec = _session.from_dict(core.spec())
        self.rank: int = core.rank()
        _open.add(self)

    @property
    def epoch(self) -> int:
        """Rises whenever a process takes a rank or a layer moves."""
        return self._core.epoch()

    @property
    def rollback_step(self) -> Optional[int]:
        """The step that the job had gone back to when this worker joined: factors stayed as they were, with updates of later
        steps. None: it never has."""
        return self._core.rollback_step()

    def mode(self, step: int) -> str:
        """"SECOND_ORDER" or "FIRST_ORDER", of a step up to the lease's end."""
        return self._core.mode_of(step)

    def needs_statistics(self, step: int, layer: int) -> bool:
        """Whether to send_statistics, or abstain_statistics, of the layer at this step. NotFoundError: no such layer."""
        return self._core.needs_statistics(step, layer)

    def sends_gradient(self, layer: int) -> bool:
        """DELEGATE: when this rank sends the layer; otherwise always. NotFoundError: no such layer."""
        return self._core.sends_gradient(layer)

    def compute_statistics(self, step: int, layer: int, side: str, rows: np.ndarray, row_scale: float = 1.0) -> np.ndarray:
        """One side's statistics of this rank's rows; see precondor.compute_statistics."""
        return self._core.statistics(step, layer, side, rows, row_scale)

    def sketch_signs(self, step: int, layer: int, side: str, first_row: int, rows: int) -> np.ndarray:
        """The signs of SIGNED, f32 [k, rows] of +1 and -1, of this rank's rows first_row, first_row + 1 ...: for who makes
        the sketches elsewhere, or a part of the rows at a time; docs/math/statistics.md has the formula."""
        return self._core.sketch_signs(step, layer, side, first_row, rows)

    def sketch_sums(self, step: int, layer: int, side: str, first_row: int, rows: np.ndarray, ones: bool = False) -> np.ndarray:
        """The sums of SIGNED before they are scaled, f32 [k, d], of a part of this rank's rows [n, d]: those from first_row on.
        ones: each row ends in a 1 more, which it does not have yet; [k, d + 1]."""
        return self._core.sketch_sums(step, layer, side, first_row, rows, ones)

    def send_statistics(self, step: int, layer: int, a: np.ndarray, g: np.ndarray, samples: int) -> None:
        """Sends the statistics of one layer's inputs and output gradients at a statistic step; copied when it returns.

        a: [k, d_in], g: [k, d_out], as compute_statistics made them. samples: rows of this rank.

        Raises:
            InvalidArgumentError: a shape. FailedPreconditionError: not a statistic step. NotFoundError: no such layer.
            What the server refuses surfaces in flush().
        """
        self._core.send_statistics(step, layer, a, g, samples)

    def abstain_statistics(self, step: int, layer: int) -> None:
        """Takes part in the statistic step without any (skipped AMP step, unused layer)."""
        self._core.abstain_statistics(step, layer)

    def precondition(self, step: int, layer: int, gradient: np.ndarray, samples: int,
                     out: Optional[np.ndarray] = None) -> Future:
        """Sends gradient [d_out, d_in] and returns the future of the preconditioned one, f32 [d_out, d_in].

        An f32 gradient whose rows have no gaps is sent from where it lies: do not write to it until the future is ready.
        Others are converted first. `out`: where to write, f32; may be the gradient itself. samples: its weight in DIRECT.
        A gradient that is not finite is answered "SKIP".

        Raises:
            InvalidArgumentError: no matrix of real numbers, or an `out` that cannot be written in place.
            All else is the future's to raise.
        """
        return Future(self._core.precondition(step, layer, gradient, out, samples))

    def precondition_on_device(self, step: int, layer: int, gradient: Any, samples: int, *, device: int = 0,
                               stream: int = 0) -> Future:
        """As `precondition`, for a matrix in the memory of a CUDA device, which the preconditioned one replaces.

        gradient: f32 [d_out, d_in] with `__cuda_array_interface__`, as torch's and CuPy's have; `device` as CUDA counts,
        `stream` the cudaStream_t whose work makes it (`torch.cuda.current_stream().cuda_stream`). Needs
        libprecondor-cuda.so (docs/cuda.md). To a shard on the same host and device it need not leave the device.

        Raises:
            InvalidArgumentError: no such matrix.
            All else is the future's to raise.
        """
        return Future(self._core.precondition_on_device(step, layer, gradient, samples, device, stream))

    def device_plane(self) -> Dict[str, Any]:
        """How many such gradients stayed on the device ("in_ring"), or went "over_socket", and the last one's "reason"."""
        return self._core.device_plane()

    def device_plane_status(self, layer: int, device: int = 0) -> str:
        """Empty while the layer's gradients in this device's memory may stay there, or until that is known; otherwise why they
        go through the host, for as long as the connection to the shard lasts. NotFoundError: no such layer."""
        return self._core.device_plane_status(layer, device)

    def data_plane_status(self) -> str:
        """Empty while gradients go the way of spec.data_plane, or wait for it. Otherwise, with "COLLECTIVE", why those of some
        shard go over gRPC until the next epoch."""
        return self._core.data_plane_status()

    def abstain_gradient(self, step: int, layer: int) -> Future:
        """This rank has no gradient: the answer of every rank is "SKIP"."""
        return Future(self._core.abstain_gradient(step, layer))

    def factors_checksum(self, layer: int) -> int:
        """In REPLAY and PULL_FACTORS: the same on all ranks whose factors of the layer are the same, bit for bit. Compare it
        at the same step on all ranks; it waits for the updates of what this rank has sent.

        Raises:
            FailedPreconditionError: another exchange. NotFoundError: no such layer. DeadlineExceededError: result_timeout.
        """
        return self._core.factors_checksum(layer)

    def flush(self) -> None:
        """Waits until everything sent is acknowledged; raises the first refusal of statistics since the last flush."""
        self._core.flush()

    def report_step(self, step: int, loss: float, samples: int, learning_rate: float, finite: bool = True) -> StepDirective:
        """Reports a finished step, in order of steps, and waits until the next one may be started.

        Raises:
            AbortedError: the job rolled back to an earlier step, which the message names.
            DeadlineExceededError: the coordinator was gone for lease_timeout at the end of the lease.
        """
        return StepDirective(*self._core.report_step(step, loss, samples, finite, learning_rate))

    def metrics(self) -> Dict[str, int]:
        """Payload and frame bytes since the worker joined: statistics_bytes and gradient_bytes out, result_bytes in,
        overhead_bytes (headers, acknowledgements, control) both ways; plane_bytes, the part of gradient_bytes and
        result_bytes that went over communicators (SessionSpec.data_plane); reconnects."""
        return self._core.traffic()

    def leave(self) -> None:
        """Gives the rank back; flush() first. Then close()."""
        self._core.leave()

    def close(self) -> None:
        """Ends all calls and futures with CancelledError and closes the connections; the rank is not given back."""
        self._core.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class Session:
    """An open session. Made by Client.open_session."""

    def __init__(self, client: "Client", name: str, created: bool) -> None:
        self._client = client
        self.name = name
        self.created = created  # by this call; False: it was there with the same description

    def join(self, rank: int = 0, first_step: int = 0, incarnation: int = 0) -> Worker:
        """Takes the rank's place and waits until every rank has joined.

        first_step: that this process begins with, or goes on from after a checkpoint. incarnation: of processes that
        take the same rank the one with the higher has it; 0: the time.

        Raises:
            DeadlineExceededError: some rank did not join within join_timeout.
            AbortedError: the job has just gone back to a step before first_step; begin with the one that is named.
            NotFoundError: the session is gone, or has no such rank.
            PermissionDeniedError: it is another job's (docs/security.md).
        """
        return self._client.join(self.name, rank, first_step, incarnation)

    def close(self) -> bool:
        """Ends the session for all; the servers forget its factors. False: there was none."""
        return self._client.close_session(self.name)


class Client:
    """Control calls of one process, to the coordinator at `address` (host:port, or unix:/path/to/socket). Thread-safe.

    Timeouts are in seconds: connect_timeout for a server's first answer, rpc_timeout of one control call, result_timeout
    from a gradient's submission to its answer, join_timeout until all ranks are in, lease_timeout that a step waits for
    a coordinator at the end of its lease. plane_device is the CUDA device of its own that a worker of this client has in
    communicators of NCCL (docs/collective.md). security is of all connections, those to shards too. traceparent is the W3C
    Trace Context of what this client works for (docs/monitoring.md); without one the client begins a trace of its own.

    Ctrl-C in a call that waits ends the client. Unusable in a forked child, as is any new one there (ForkError).

    Raises:
        UnavailableError: no server answers within connect_timeout. FailedPreconditionError: it is a shard, not a coordinator.
        UnimplementedError: what answers is no Precondor server, or one of another version.
        UnauthenticatedError, PermissionDeniedError: the server does not know this client, or gives it another role.
    """

    def __init__(self, address: str, *, connect_timeout: float = 10.0, rpc_timeout: float = 30.0,
                 result_timeout: float = 120.0, join_timeout: float = 120.0, lease_timeout: float = 600.0,
                 plane_device: int = 0, security: Security = Security(), traceparent: str = "") -> None:
        self._core = _core.Client(address, connect_timeout, rpc_timeout, result_timeout, join_timeout, lease_timeout,
                                  plane_device, security.tls_ca, security.tls_cert, security.tls_key, security.token_file,
                                  traceparent)
        _open.add(self)
        self._core.wait_for_server()

    def open_session(self, spec: SessionSpec) -> Session:
        """Opens the session, or finds it open with the same description.

        Raises:
            InvalidArgumentError: names the field, what was expected and what came.
            FailedPreconditionError: reason "SPEC_MISMATCH": there is one of this name that differs in the named field.
            UnimplementedError, ResourceExhaustedError: the servers cannot do it, or have no room.
        """
        return Session(self, spec.name, self._core.open_session(_session.to_dict(spec)))

    def join(self, session: str, rank: int = 0, first_step: int = 0, incarnation: int = 0) -> Worker:
        """Session.join, of a session that another process has opened. The worker may outlive the client."""
        return Worker(self._core.join(session, rank, incarnation, first_step))

    def close_session(self, name: str) -> bool:
        """Ends the session for all; the servers forget its factors. False: there was none."""
        return self._core.close_session(name)

    def close(self) -> None:
        """Ends all calls with CancelledError. Workers go on."""
        self._core.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def compute_statistics(spec: SessionSpec, rows: np.ndarray, *, step: int, layer: int, side: str, rank: int = 0,
                       row_scale: float = 1.0) -> np.ndarray:
    """One side's statistics of one rank's rows [n, d], n >= 1, for Worker.send_statistics. Pure; docs/math/statistics.md.

    side: "input" (d = d_in; with has_bias the rows end in a 1) or "output" (d = d_out: gradients of the outputs).
    row_scale: 1 for inputs; for output gradients of a loss that is a mean over rows, the number of rows.
    Returns f32 [k, d] with k = 1 for means and the rank's sketches for SIGNED; for COVARIANCE [n, d], or the packed
    lower triangle [1, d (d + 1) / 2] where that is smaller.

    Raises:
        InvalidArgumentError: rows of another shape, or another side. NotFoundError: no such layer.
    """
    return _core.compute_statistics(_session.to_dict(spec), rank, step, layer, side, rows, row_scale)


def kl_clip_scale(inner_products: Union[Sequence[float], np.ndarray], learning_rate: float, clip: float) -> float:
    """By how much the method option scaling KL_CLIP has all PRECONDITIONED answers of a step multiplied:
    min(1, sqrt(clip / (learning_rate^2 |sum of inner products|))); 1 when the sum is 0, 0 when it is no number."""
    return _core.kl_clip_scale(inner_products, learning_rate, clip)
