# SPDX-License-Identifier: Apache-2.0
"""Preconditioner: a Precondor server preconditions a PyTorch model's gradients. docs/use/pytorch.md is the manual."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import time
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
from torch import nn

from .. import server
from .._client import Client, Session, Worker
from .._errors import FailedPreconditionError, InvalidArgumentError, PrecondorError, UnavailableError, check_number, from_status
from .._session import Fallback, Layer, Method, SessionSpec, statistics_of, traits_of
from .._options import ClientOptions, Selection, Statistics
from . import _group, _layers, _local, _optimizer, _recipe, _sharded
from ._amp import skip_text, trained_by, unscale
from ._arguments import check_options, check_types, count_of, number_of, rate_of
from ._buckets import average_rest, refuse_sparse, rest_of, warn_of_other_weights
from ._checkpoint import (add_factors, check_state, close_session, has_factors, lacks_factors, make_state, open_session, restore_factors,
                          restore_snapshot, warn_of_local)
from ._hooks import Switch, guard_hooks, is_compiled, lost_call, original
from ._exchange import Answer, Exchange, Pair, Slot, clip_of, kinds_of, make_pieces, methods_of, scale_of, slots_of, store
from ._reporter import Reporter, StepResult
from ._tensor_parallel import divide, divided, own_parts
from ._watch import watch

# Objects with threads. They are closed before the interpreter ends.
_open: "weakref.WeakSet[Preconditioner]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


class Preconditioner:
    """Preconditions gradients of a model's linear and convolutional layers, stacks of experts and, on request,
    embeddings.

        pre = Preconditioner(model, "local")
        optimizer = pre.make_optimizer(lr=0.004)
        ...
        loss.backward(); pre.step(loss); optimizer.step()

    Where a method takes statistics, hooks record modules' inputs and output gradients at statistic steps. step()
    sends each layer's gradient and replaces it by the answer. Parameters that are no layers (`others`) keep their
    gradients. With torch.distributed every rank makes one, at one point of the program, and calls step() equally often.

    The constructor opens the session. The rank joins, and so waits for all other ranks, in the first forward pass
    of a layer with statistics, the first step() or load_state_dict(). Not thread-safe.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        *,
        session: str = "",
        method: Union[Method, str, None] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        skip: Sequence[str] = (),
        layer_methods: Optional[Mapping[str, Union[Method, str]]] = None,
        parameter_methods: Optional[Mapping[str, Union[Method, str]]] = None,
        selection: Selection = Selection(),
        statistics: Statistics = Statistics(),
        exchange: str = "",
        gradient_dtype: str = "f32",
        overlap: bool = False,
        process_group: Any = None,
        fallback: Fallback = Fallback(),
        seed: int = 0,
        client: ClientOptions = ClientOptions(),
    ) -> None:
        """Connects, opens the session and, for statistics, puts hooks into the model.

        Args:
            model: A plain module, one under fully_shard or tensor parallelism, or DistributedDataParallel itself; may be compiled.
            address: The coordinator's: host:port, or unix:/path/to/socket; or "local": the first rank starts a
                coordinator and a shard on this host, or a shard for each of the model's GPUs, which end with that process.
            session: Unique name of the training run; not needed with "local".
            method: For layers. None: muon for hidden linear layers and soap for others, which need make_optimizer(); or
                mkor with another `optimizer`, exchange REPLAY or PULL_FACTORS, or `fallback`.
            optimizer: Its learning rate is reported and used for KL_CLIP. AMP needs it, or make_optimizer().
            skip: Regular expressions; modules whose whole name matches one are left to the optimizer.
            layer_methods: Methods by regular expressions of whole layer names; the first match counts.
            parameter_methods: Methods, whose answers are whole updates, by regular expressions of whole parameter
                names: makes layers of further matrices (docs/use/pytorch.md).
            selection: Which other modules and parameters are layers.
            statistics: Kind and steps of the statistics of inputs and output gradients.
            exchange: "DIRECT" (the server averages what every rank sends; default of a plain model), "DELEGATE" (the
                job averages, one rank sends each layer and passes the answer on; default of DistributedDataParallel,
                fully_shard and "local" on GPUs), "SHARDED" (every rank sends the parts that fully_shard or tensor
                parallelism gives it), "REPLAY" or "PULL_FACTORS" (the job averages, every rank computes its answer).
            gradient_dtype: Type of gradients on the wire: "f32", "f16" or "bf16".
            overlap: Send gradients during the backward pass: one backward pass a step outside no_sync(), no change of
                gradients before step(), and DIRECT. DDP averages the other parameters by its only communication hook.
            process_group: A group of torch.distributed; None: DDP's, or the default one.
            fallback: When the job falls back to first order.
            seed: That of precondor.SessionSpec.
            client: Time-outs, security, and what happens at the start.

        Raises:
            UnavailableError: No server answers at the address.
            FailedPreconditionError: SPEC_MISMATCH: the session's name is taken, or the model or an option has changed.
            UnimplementedError: The model is divided in a way that is not supported (FSDP1, DataParallel).
            InvalidArgumentError: An option is invalid, a pattern matches nothing, or the model has no layer.
        """
        check_types(model, optimizer, {"address": address, "session": session, "exchange": exchange},
                    {"layer_methods": layer_methods, "parameter_methods": parameter_methods},
                    {"selection": (selection, Selection), "statistics": (statistics, Statistics), "fallback": (fallback, Fallback),
                     "client": (client, ClientOptions)})
        _layers.refuse_unknown(model)
        self._outer = model
        self._model, self._group, self._ddp = _group.of(model, process_group)
        sharded = _sharded.refuse_unknown(self._model, self._group.size)
        self._optimizer, self._overlap = None if optimizer is None else _optimizer.unwrapped(optimizer), overlap
        choice = _layers.Choice(skip, selection, parameter_methods or {})
        self._recipe, chosen = _recipe.choose(self._model, choice, method, exchange, fallback, self._optimizer)
        method = self._recipe.method
        self._others, self._scales = chosen.others, self._recipe.scales(self._model, chosen)
        matrices = [matrix for _, matrix in chosen.matrices]
        self._slots = slots_of(matrices)
        self._entries: _layers.Entries = []
        if not self._slots:
            raise InvalidArgumentError(f"model: no layer to precondition; left to the optimizer: {self._others}",
                                       "INVALID_ARGUMENT")
        _sharded.refuse_whole(self._model, matrices)
        servers = _local.JobServer(self._group, self._slots, address, session, client.local_memory)
        self._spec = SessionSpec(
            name=servers.session, layers=tuple(slot.layer for slot in self._slots), method=method, world_size=self._group.size,
            seed=seed, exchange=exchange or ("DELEGATE" if self._ddp or sharded or (servers.delegate and not overlap) else "DIRECT"),
            statistics=statistics_of(method, statistics.kind), sketches=statistics.sketches, inv_freq=statistics.inv_freq,
            warmup_steps=statistics.warmup_steps, statistics_dtype=statistics.dtype, gradient_dtype=gradient_dtype, fallback=fallback,
            layer_methods=_layers.exceptions(matrices, self._recipe.layer_methods(layer_methods, matrices), statistics.kind))
        check_options(self._spec, sharded=sharded, overlap=overlap, several=self._ddp or self._group.size > 1)
        self._rest = rest_of(model) if overlap and self._ddp else None
        self._kinds, self._methods = kinds_of(self._spec), methods_of(self._spec)
        self._fed = [place for place, name in enumerate(self._methods) if traits_of(name).takes_statistics]
        self._clips = {place: float(clip) for place, clip in clip_of(self._spec).items()}
        self._averages = not self._ddp and not sharded and self._group.size > 1
        if self._averages:
            refuse_sparse(self._model)
        self._pieces = make_pieces(self._spec, self._group, self._slots) if sharded else None
        self._spec = divide(self._spec, self._slots, self._methods, self._kinds, self._group, bool(_sharded.modules_of(self._model)))
        before = self._recipe.before_factors()
        self._other_spec = dataclasses.replace(self._spec, method=before.method, layer_methods=_layers.exceptions(
            matrices, before.layer_methods(layer_methods, matrices), statistics.kind))  # of the default before it had factors
        # The session, and the rank in it once it has joined.
        self._options = client
        self._session: Optional[Session] = None
        self._worker: Optional[Worker] = None
        self._exchange: Optional[Exchange] = None
        self._reporter: Optional[Reporter] = None
        # The step under way.
        self._step, self._mean_positions = 0, statistics.mean_positions
        self._pairs: Dict[int, Pair] = {}
        self._wanted: FrozenSet[int] = frozenset()  # layers of which this step takes statistics
        self._arrived: Set[int] = set()  # overlap: ids of parameters that have their gradient
        self._missed: Optional[PrecondorError] = None  # error of this step
        self._functional = False  # whether this step had calls under torch.func, or with other weights
        # All steps.
        self._holding = self._unwatched = 0  # numbers of active no_sync() and unwatched() contexts
        self._switch = Switch()
        self._tapped = self._made = False  # whether compiled code has called a hook; step(), since the attached optimizer's last step
        self._last: Dict[str, float] = {}
        self._updates_lost = 0
        # All that it leaves on the model, in threads and on servers; given back in the reverse order.
        self._closed, self._why_closed = False, ""
        self._held = contextlib.ExitStack()
        self._release = weakref.finalize(self, self._held.close)
        self._release.atexit = False  # _close_all
        self._warnings = _optimizer.StepWatch(self._parameters(), chosen.frozen, chosen.other_frozen(self._model), self._held)
        self._warnings.follow(optimizer)
        try:
            self._open(servers, chosen)
        except BaseException as error:
            self._give_up(error)
            raise
        self._guarded = not self._fed or guard_hooks()
        _open.add(self)

    def __str__(self) -> str:
        """A table of layers and other parameters, of how each is trained, and why."""
        layers = ((slot.layer.name, _recipe.label_of(self._spec, slot.place), slot.matrix) for slot in self._slots)
        parameters = {_layers.plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        left = ((name, reason, parameters.get(name)) for name, reason in self._others.items())
        return f"Preconditioner of session {self._spec.name}\n{self._recipe.describe(layers, left, self._scales)}"

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> Tuple[Layer, ...]:
        """The layers, in the session's order."""
        return tuple(self._spec.layers)

    @property
    def others(self) -> Dict[str, str]:
        """Reasons, or kinds, of the parameters that are left to the optimizer, by name."""
        return dict(self._others)

    @property
    def spec(self) -> SessionSpec:
        """The session's description."""
        return self._spec

    @property
    def step_number(self) -> int:
        """Number of the next step, from 0."""
        return self._step

    @property
    def mode(self) -> str:
        """Mode of the next step: "SECOND_ORDER" or "FIRST_ORDER"."""
        return "SECOND_ORDER" if self._worker is None else self._worker.mode(self._step)

    @property
    def checkpoint_due(self) -> bool:
        """True after a step() if a checkpoint saved after optimizer.step() matches a snapshot of the servers."""
        return self._snapshot_id() != 0

    def metrics(self) -> Dict[str, float]:
        """Returns numbers for a logger or a progress bar: step (finished steps), second_order (1 or 0, next step),
        updates_lost (updates of layers that servers have lost), WorkerStatus.traffic, and of the last step step_seconds and
        the numbers of layers preconditioned, identity and skipped."""
        traffic = {} if self._worker is None else self._worker.status().traffic
        return {"step": self._step, "second_order": float(self.mode == "SECOND_ORDER"), "updates_lost": self._updates_lost,
                **self._last, **traffic}

    def device_plane(self) -> Dict[str, Any]:
        """Returns WorkerStatus.device_plane: the servers' "backends", how many gradients stayed on their CUDA device ("in_ring") or
        were copied from it by the client ("over_socket"), and the "reason" why the last of these was (docs/operate/cuda.md)."""
        return {"backends": [], "in_ring": 0, "over_socket": 0, "reason": ""} if self._exchange is None else self._exchange.device_plane()

    # --- a step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, loss: Union[float, torch.Tensor, None] = None, *, samples: int = 1,
             learning_rate: Optional[float] = None, scaler: Optional[Any] = None) -> StepResult:
        """Replaces each layer's gradient by the preconditioned one. Call it on every rank, once for each step.

        Call it after the last backward pass and before optimizer.step(). It sets .grad to None for a layer that no rank has used; in
        DIRECT also in the first step in which some rank has not. If a gradient of any rank is not finite, the step is skipped: .grad is
        None for all parameters of the optimizer, which then leaves them. A later step() raises an error of this step's report.

        Args:
            loss: A number, or a tensor with one; reported for metrics and the fallback. None: unknown.
            samples: Weight of this rank's loss and, except with DDP, of its gradients, if batches differ in size.
            learning_rate: None: that of the optimizer's group of the first layer, or of the first layer that is clipped.
            scaler: AMP's GradScaler, for an optimizer that has all layers. step() unscales the gradients unless
                scaler.unscale_(optimizer) was called, which a plain model on several ranks does not permit.

        Raises:
            DeadlineExceededError: The servers were unreachable for longer than the time-outs.
            AbortedError: The job rolled back, or another rank failed. After an error begin again from a checkpoint.
            FailedPreconditionError: A layer's parameter has been replaced in the model, or Ctrl-C has interrupted the step before.
            DataLossError: In REPLAY and PULL_FACTORS: the ranks' factors differ.
        """
        began = time.monotonic()
        loss, samples = number_of(loss), count_of(samples)
        self._entries = _layers.check_present(self._model, (slot.matrix for slot in self._slots), self._entries)
        self._join()
        self._recipe.check_optimizer(self._optimizer, self._methods, self._whole_updates)
        self._warnings.before_step(self._functional and bool(self._wanted))
        self._reporter.check()
        if self._group.came_later():
            self._warnings.once("group", "Preconditioner: torch.distributed was initialized after it was made, so that it averages no ranks' "
                                         "gradients. Unless DistributedDataParallel does, make it afterwards")
        rate = rate_of(learning_rate, self._optimizer, bool(self._clips), self._slots[min(self._clips, default=0)].matrix.weight)
        self._exchange.check_sent(self._overlap, scaler is not None or samples != 1)
        self._exchange.unused.fill()
        trained = trained_by(self._optimizer, self._model, self._parameters())
        # A server names the ranks that are missing, and a collective does not. But statistics are sent if all ranks agree.
        answers_first = self._averages and self._spec.exchange == "DIRECT" and scaler is None and not self._wanted
        loss_scale, finite = unscale(scaler, self._optimizer, trained, self._slots, self._group, self._averages,
                                     (not self._ddp or self._overlap) and not answers_first, self._pieces is not None)
        if not answers_first:
            self._settle(finite, samples, scaler)
        self._exchange.collect(self._step, self._pairs if finite else {}, loss_scale, self._wanted)
        answers = self._answers(finite, loss_scale, samples)
        if answers_first:
            finite = self._group.all(finite)
            self._settle(finite, samples, scaler)
        self._exchange.unused.look(answer.decision == "SKIP" and finite for answer in answers.values())
        scale = scale_of(self._clips, answers, rate)
        store(self._slots, answers, self._clips, scale, self._pieces, self._warn)
        for parameter in () if finite else trained:
            parameter.grad = None
        self._reporter.report(self._step, loss, samples, rate or 0.0, finite)
        decisions = {slot.layer.name: answers[slot.place].decision for slot in self._slots if slot.place in answers}
        result = StepResult(self._step, self.mode, decisions, not finite, scale, self._exchange.updates_lost)
        self._updates_lost += sum(result.updates_lost.values())
        self._warnings.after_step(not finite, scaler)
        self._begin(self._step + 1)
        self._made, self._functional = True, False
        self._last = {**result.counts(), "step_seconds": time.monotonic() - began}
        return result

    def param_groups(self, weight_decay: float = 0.01) -> List[Dict[str, Any]]:
        """Returns parameter groups for BaseOptimizer. Layers whose method's answers are whole updates (docs/use/methods)
        have their own groups. Matrices have weight decay; biases and other vectors have none."""
        check_number("weight_decay", weight_decay, 0.0, math.inf)
        self._recipe.needs_optimizer = False
        return _optimizer.groups_of(self._model, self._whole_updates(), weight_decay, self._scales)

    def make_optimizer(self, lr: float, *, weight_decay: float = 0.01, **options: Any) -> _optimizer.BaseOptimizer:
        """Returns a BaseOptimizer of param_groups(), whose rate step() then uses. Options: betas, eps."""
        options = self._recipe.optimizer_options(options)
        made = self._optimizer = _optimizer.BaseOptimizer(self.param_groups(weight_decay), lr, **options)
        self._warnings.watch(made)
        return made

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes optimizer.step() call step() first, unless it was called since the last one. Only
        optimizer.step(closure) reports the loss. With a GradScaler, or to report the loss, call step(loss,
        scaler=scaler) yourself.

        Raises:
            InvalidArgumentError: LBFGS, or an optimizer that does not train every layer.
        """
        def before(loss: Any) -> None:
            if not self._made:
                self.step(loss)
            self._made = False

        self._held.callback(_optimizer.attach(optimizer, self._parameters(), before).remove)
        self._warnings.follow(optimizer)
        self._optimizer = self._optimizer or _optimizer.unwrapped(optimizer)
        self._made = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for every backward pass of a step except the last, with `overlap`, DDP (it enters DDP's no_sync) or
        fully_shard (it calls set_requires_gradient_sync)."""
        outer = original(self._outer)
        with contextlib.ExitStack() as stack:
            if self._ddp:
                stack.enter_context(outer.no_sync())
            elif self._pieces is not None:
                stack.enter_context(_sharded.without_sync(outer))
            self._holding += 1
            try:
                yield
            finally:
                self._holding -= 1

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context for passes that are not part of the step: torch.autograd.grad of a penalty or an attack, and losses
        that are only measured. Its forward and backward passes do not count in the statistics."""
        self._unwatched += 1
        on, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._unwatched -= 1
            self._switch.on = on

    def discard(self) -> None:
        """Drops the statistics of the backward passes since the last step, for a batch that is given up or tried again.
        The caller zeroes the gradients.

        Raises:
            FailedPreconditionError: With overlap, if gradients have been sent already.
        """
        if self._exchange is not None and self._exchange.any_sent():
            raise FailedPreconditionError(f"discard: gradients of step {self._step} have left", "FAILED_PRECONDITION",
                                          "UNSPECIFIED", "Without overlap they leave in step() alone")
        self._begin(self._step)

    # --- checkpoints and the end --------------------------------------------------------------------------------------------

    def state_dict(self, *, factors: bool = False) -> Dict[str, Any]:
        """Returns the state for load_state_dict: the step, and the number of the servers' snapshot if checkpoint_due.

        Call it on every rank after optimizer.step() and before the next forward pass, and save it with the model's and the
        optimizer's state. Waits until the servers have acknowledged everything, so that a job that is killed at any
        instant can resume.

        Args:
            factors: Rank 0 also reads the servers' factors into its state, which then needs no session on the servers.
        """
        warn_of_local(self._address, factors)
        self._group.check(self._flush) if factors else self._flush()
        state = make_state(self._spec, self._step, self._snapshot_id(), self.mode, self._exchange, factors)
        return add_factors(state, self._group, self._worker) if factors else state

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True, precondorctl: str = "",
                        snapshot_paths: Union[str, "os.PathLike[str]", Sequence[Union[str, "os.PathLike[str]"]]] = ()) -> None:
        """Joins at the step of a state_dict(). Call it on every rank, before the first forward pass or step.

        Rank 0 first restores the factors from `snapshot_paths`, or, with `exact`, from its state if that has them. Otherwise the
        servers must have the factors of that step: the job has done no step since.

        Args:
            state: From state_dict().
            snapshot_paths: Data directories of the shards, copies or of stopped servers, with the state's snapshot
                (`precondorctl snapshot restore`, for which a server with an access file requires the role operator).
            exact: False: continue with the servers' factors, which may be of a later step or missing.
            precondorctl: The program; "": the package's.

        Raises:
            InvalidArgumentError: The state is of other layers, or has no snapshot.
            FailedPreconditionError: The rank has joined already; with `exact`, the factors are not those of the step.
        """
        self._group.check(lambda: check_state(state, self._spec, self._worker, exact and not snapshot_paths))
        step = state["step"]
        if snapshot_paths:
            self._group.check(lambda: self._group.rank == 0 and restore_snapshot(
                state, snapshot_paths, self._address, self._options.security, precondorctl, self._group.size))
            self._open_session(may_fail=True)  # the snapshot's description may differ in more
        elif exact and has_factors(state, self._group):
            self._spec, self._other_spec = restore_factors(state, self._group, self._client, (self._spec, self._other_spec))
        elif self._is_new and step > 0 and exact:
            # Otherwise the next attempt would find the session and use its factors.
            self._group.check(lambda: self._group.rank == 0 and self._session.created and self._session.close())
            raise lacks_factors(f"session {self._spec.name}: the servers have no factors of it")
        self._join(step, state if exact and not snapshot_paths else {**state, "factor_versions": ()})
        later = self._worker.rollback_step
        if exact and not all(self._group.gather(later is None or later < step)):
            self._worker.close()
            self._worker = None
            raise lacks_factors(f"session {self._spec.name}: the job has been beyond step {step}, and the factors are of a later step")

    def close(self, *, end_session: bool = False) -> None:
        """Removes the hooks and disconnects; later calls do nothing. The session stays, to resume from a checkpoint.
        With end_session, given by all ranks, the servers free its factors once every rank has called close(). An object that
        the program drops is closed."""
        if self._closed:
            return
        self._closed, self._group.place = True, "close"
        try:
            if end_session:
                answers = not server.has_ended(self._address)  # otherwise the session has ended too
                if answers:
                    self._flush()
                self._group.gather(None)
                if answers and self._group.rank == 0:
                    close_session(self._session)
            elif self._reporter is not None:
                self._reporter.settle()
        finally:
            self._worker = None
            self._release.detach()  # called at the interpreter's end, it does nothing
            self._held.close()

    def __enter__(self) -> "Preconditioner":
        return self

    def __exit__(self, kind: Any, *unused: object) -> None:
        self.close(end_session=kind is None)

    # --- implementation -----------------------------------------------------------------------------------------------

    def _open(self, servers: _local.JobServer, chosen: _layers.Chosen) -> None:
        held, name, options = self._held, self._spec.name, self._options
        self._address = address = servers.start(held)
        self._client: Client = self._group.check(lambda: held.enter_context(
            Client(address, options.for_calls(), rank_devices=servers.devices)))
        if options.replace:
            self._group.check(lambda: self._group.rank == 0 and self._client.close_session(name))
        with servers.opening():
            self._open_session()
        self._is_new = any(self._group.gather(self._session.unused))
        if servers.are_own and self._group.size == 1:  # no other process uses the session
            held.callback(_local.end_session, self._session, address)
        for other in list(_open):  # one that was given up, whose hooks would join, and raise its errors
            if other._worker is None and not set(other._parameters()).isdisjoint(self._parameters()):
                other.close()
                other._why_closed = ", because another one was made for its parameters before its first step"
        if self._rest is not None:
            held.callback(self._rest.end)
            self._rest.begin(self._group, self._parameters())
        watch(held, self._slots, self._fed, chosen, self._switch, on_forward=self._on_forward, on_tap=self._on_tap,
              on_call=self._on_call, on_gradient=self._on_gradient, overlap=self._overlap)

    def _open_session(self, may_fail: bool = False) -> None:
        def open_it() -> None:
            with contextlib.suppress(FailedPreconditionError) if may_fail else contextlib.nullcontext():
                self._session, (self._spec, self._other_spec) = open_session(self._client, (self._spec, self._other_spec))

        self._group.check(lambda: self._group.rank == 0 and open_it())
        self._group.check(lambda: self._group.rank == 0 or open_it())  # the session that rank 0 has chosen

    def _join(self, first_step: int = 0, state: Optional[Mapping[str, Any]] = None) -> None:
        if self._closed:
            raise from_status("FAILED_PRECONDITION", "UNSPECIFIED", f"session {self._spec.name}: this Preconditioner has been closed{self._why_closed}")
        if self._worker is not None:
            return
        try:
            self._enter(first_step, state)
        except BaseException as error:
            self._give_up(error, first_step)
            raise

    def _give_up(self, error: BaseException, first_step: int = 0) -> None:
        """Leaves nothing behind after an error: hooks would raise it for the model's next Preconditioner, and a traceback may keep
        this object. A session of its own without a step ends, so that the next try finds the name free."""
        if self._session is not None and self._session.created and first_step == 0 and not isinstance(error, UnavailableError):
            with contextlib.suppress(PrecondorError):
                self._session.close()
        self.close()

    def _enter(self, first_step: int, state: Optional[Mapping[str, Any]]) -> None:
        if not self._is_new and state is None:
            raise from_status(
                "FAILED_PRECONDITION", "UNSPECIFIED",
                f"session {self._spec.name} is there already, with factors of another run. Make the Preconditioner again, and load "
                f"that run's checkpoint before the first forward pass (load_state_dict), choose another name, or begin anew with "
                f"client=ClientOptions(replace=True)")
        self._worker = self._session.join(self._group.rank, first_step, factor_versions=(state or {}).get("factor_versions", ()))
        # DDP writes its buckets to the gradients at the end of the backward pass, when answers may have arrived.
        self._exchange = Exchange(self._worker, self._group, self._slots, in_place=self._rest is None, pieces=self._pieces,
                                  averages=self._averages and self._spec.exchange == "DIRECT", own_servers=server.is_local(self._address))
        self._exchange.resume(state or {})
        self._reporter = Reporter(self._worker)
        self._held.callback(self._worker.close)
        if self._averages and state is None:
            warn_of_other_weights(self._group, self._model)
        self._begin(first_step)

    def _begin(self, step: int) -> None:
        if self._reporter is not None:
            self._reporter.directive_for(step)  # otherwise ranks' directives, and graphs, could differ
        self._guarded = self._guarded or guard_hooks()
        self._step, self._group.place = step, f"step {step}"
        self._pairs = {}
        self._missed = None
        self._arrived = set()
        self._wanted = frozenset(place for place in self._fed
                                 if self._worker is not None and self._worker.needs_statistics(step, place))
        self._switch.on = self._worker is None or bool(self._wanted)

    def _on_forward(self, slots: Sequence[Slot], module: nn.Module, inputs: Tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return
        # functional_call puts other tensors in a weight's place. So does fully_shard during a forward pass.
        if not _sharded.has_memory(output) or (self._pieces is None and module.weight is not slots[0].matrix.weight):
            self._functional = True
            return
        if not inputs:
            self._warn(slots[0], "its module was called with keywords alone; no statistics of such calls")
            return
        self._on_call(slots, inputs[0], output)

    def _on_call(self, slots: Sequence[Slot], x: torch.Tensor, output: torch.Tensor, around: Tuple[int, int] = (0, 0)) -> None:
        """Records a call with the weight, or with its rows except `around[0]` before and `around[1]` behind them."""
        if not self._wants(slots):
            return
        # Under autocast the layer computes with a copy in its own type, and its input may be overwritten.
        step, x = self._step, x.detach().to(output.dtype)
        version, inputs = x._version, [x]

        me = weakref.ref(self)  # a loss that is kept keeps its graph, and the graph this function

        def on_backward(unused: Any, grads: Tuple[Optional[torch.Tensor], ...]) -> None:
            own = me()
            if own is None or own._unwatched:
                return
            if not inputs:
                own._warn(slots[0], "a second backward pass through one call of its module counts in no statistics: add the losses up")
            elif (x := inputs.pop())._version == version:
                own._on_backward(step, slots, x, grads[0], around)
            else:
                own._warn(slots[0], "the input of its module was written over before the backward pass; no statistics of such calls")

        # Registered on the node, which an operation in place after the module leaves as it is, and not on the tensor.
        output.grad_fn.register_hook(on_backward)

    def _wants(self, slots: Sequence[Slot]) -> bool:
        """Returns whether current passes count in the statistics of these layers."""
        if self._unwatched or self._closed or not slots[0].matrix.weight.requires_grad:
            return False
        self._join()
        self._reporter.check_process()
        return slots[0].place in self._wanted

    def _on_tap(self, slots: Sequence[Slot], x: torch.Tensor, grad: torch.Tensor) -> None:
        """Handles the backward pass of a call in a compiled graph."""
        self._tapped = True
        if self._wants(slots):
            self._on_backward(self._step, slots, x, grad, (0, 0))

    @torch.no_grad()
    def _on_backward(self, step: int, slots: Sequence[Slot], x: torch.Tensor, grad: Optional[torch.Tensor],
                     around: Tuple[int, int]) -> None:
        if grad is None or grad.numel() == 0 or step != self._step or self._worker is None:
            return
        if not _sharded.has_memory(grad):
            self._functional = True
            return
        if any(around):
            grad = nn.functional.pad(grad, around)  # outputs that were not computed have no gradient
        matrix, parts = slots[0].matrix, own_parts(slots[0].split, x, grad)
        with torch.autocast(grad.device.type, enabled=False):  # a backward pass may run under autocast
            rows = [] if parts is None else list(matrix.rows(*parts))
            if not rows:
                self._warn(slots[0], f"its module made {list(grad.shape)} of {list(x.shape)}, which is not its product{divided(x)}; "
                                     "no statistics of such calls")
                return
            samples = matrix.samples(parts[1])
            for slot, (a, g) in zip(slots, rows):
                first, outputs = matrix.range_of(slot.group, grad.shape[-1])
                if any(around) and (first + outputs <= around[0] or first >= grad.shape[-1] - around[1]):
                    continue  # a block of which the call has computed nothing
                pair = self._pairs.get(slot.place)
                if pair is None:
                    pair = self._pairs[slot.place] = Pair(self._worker, step, slot, self._kinds[slot.place], self._mean_positions)
                pair.add(a, g, samples)

    @torch.no_grad()
    def _on_gradient(self, slots: Sequence[Slot], parameter: int) -> None:
        if self._holding or self._worker is None:
            return
        self._arrived.add(parameter)
        if self._exchange.is_sent(slots[0]):
            raise FailedPreconditionError(
                f"layer {slots[0].layer.name}: a second backward pass in step {self._step}, whose gradient has left",
                "FAILED_PRECONDITION", "UNSPECIFIED",
                "With overlap put every backward pass of a step but the last into no_sync()")
        if all(id(one) in self._arrived for one in slots[0].matrix.parameters()):
            self._send(slots, finite=True, loss_scale=1.0, samples=1)

    def _settle(self, finite: bool, samples: int, scaler: Optional[Any]) -> None:
        """Warns of a step that is skipped, and averages the gradients that neither DDP nor the server averages."""
        if not finite and (scaler is None or not scaler.is_enabled()):
            self._warnings.once("skip", skip_text(self._step, self._model))
        if self._averages:
            average_rest(self._group, self._model, self._parameters() if self._spec.exchange == "DIRECT" else (), samples)

    def _send(self, slots: Sequence[Slot], *, finite: bool, loss_scale: float, samples: int, more: bool = False) -> None:
        for slot in slots if finite and self._wanted else ():
            if slot.place in self._wanted and slot.place not in self._pairs:
                self._miss(slot)
        self._exchange.send(self._step, slots, self._pairs, wanted=self._wanted, finite=finite, loss_scale=loss_scale, samples=samples,
                            more=more)

    def _answers(self, finite: bool, loss_scale: float, samples: int) -> Dict[int, Answer]:
        """Sends the step and returns its answers. At a statistic step all ranks raise an error of an answer, or of _miss, that one
        of them found; in SHARDED, where nothing else is collective, at every step, and also an error of sending."""
        sharded = self._spec.exchange == "SHARDED"

        def send() -> None:
            self._send([slot for slot in reversed(self._slots) if not self._exchange.is_sent(slot)], finite=finite,
                       loss_scale=loss_scale, samples=samples, more=True)

        def receive() -> Dict[int, Answer]:
            if sharded:
                send()
            answers = self._exchange.receive(self._step)
            if self._missed is not None:
                raise self._missed
            return answers

        if not sharded:
            send()
        return self._group.check(receive) if self._wanted or sharded else receive()

    def _miss(self, slot: Slot) -> None:
        """Warns of a layer with a gradient but no call. If compiled code may have lost the call, stores an error."""
        if self._warnings.has_given(slot.place) or self._functional or not slot.matrix.has_gradient() or \
                not bool(_sharded.local(slot.matrix.weight.grad).any()):
            return
        if self._tapped or is_compiled(self._outer):
            self._missed = self._missed or lost_call(slot.layer.name, self._step)
            return
        self._warn(slot, "it has a gradient, but no forward pass of its module in this step had a backward pass. There are no "
                         "statistics of it, and its gradient stays as it is. If its weight is used by something else than its "
                         "module, skip= leaves it out")

    def _warn(self, slot: Slot, what: str) -> None:
        """Warns once for each layer, because the first reason usually explains the others."""
        self._warnings.once(slot.place, f"layer {slot.layer.name}: {what}")

    def _parameters(self) -> List[nn.Parameter]:
        """Returns the parameters of the layers."""
        return [parameter for slot in self._slots for parameter in slot.matrix.parameters()]

    def _whole_updates(self) -> Set[nn.Parameter]:
        """Returns the parameters of layers whose answers are whole updates."""
        return {parameter for slot in self._slots if traits_of(self._methods[slot.place]).whole_updates
                for parameter in slot.matrix.parameters()}

    def _snapshot_id(self) -> int:
        """Number of the servers' snapshot for the next step; 0 means none."""
        return 0 if self._worker is None else self._reporter.snapshot_for(self._step)

    def _flush(self) -> None:
        if self._worker is not None:
            self._reporter.flush()
