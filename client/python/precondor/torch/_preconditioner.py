# SPDX-License-Identifier: Apache-2.0
"""Preconditioner: a PyTorch model's gradients, preconditioned by a Precondor server. docs/pytorch.md is the manual."""

from __future__ import annotations

import atexit
import contextlib
import time
import warnings
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Type, Union

import torch
from torch import nn

from .._client import Client, Security, Session, Worker, kl_clip_scale
from .._errors import FailedPreconditionError, InvalidArgumentError, PrecondorError, UnimplementedError, from_status
from .._layer_methods import statistics_of
from .._session import Layer, Method, SessionSpec, traits_of
from . import _device, _group, _layers, _local, _optimizer, _recipe, _shards
from ._amp import optimized, unscale
from ._arguments import check_options, count_of, number_of, rate_of
from ._attention import Tap
from ._buckets import rest_of
from ._checkpoint import check_state, make_state, restore_snapshot
from ._compiled import SUPPORTED, Switch, TappedHook, guard_hooks, is_compiled, original
from ._exchange import Answer, Exchange, Pair, Slot, clip_of, kinds_of, methods_of, slots_of
from ._hooks import Hook, after_accumulation, after_forward, right_after_forward
from ._reporter import Reporter
from ._result import StepResult

# What has threads: ended before the interpreter ends.
_open: "weakref.WeakSet[Preconditioner]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


atexit.register(_close_all)


class Preconditioner:
    """Preconditions the gradients of a model's linear and convolutional layers, of stacks of experts, and on request of its embeddings.

        pre = Preconditioner(model, "local")
        optimizer = pre.make_optimizer(lr=0.004)
        ...
        loss.backward(); pre.step(loss); optimizer.step()

    It watches the modules' inputs and output gradients, sends statistics of them at statistic steps, sends each layer's
    gradient in step(), and puts the answer where the gradient was. Parameters that are no layer (`left`) keep theirs.
    With torch.distributed every rank makes one, at the same place of the program, and calls step() alike.

    The constructor connects and opens the session. The rank joins at the first forward pass that has a gradient, the first
    step(), or in load_state_dict(), and then waits for all other ranks. One thread trains.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        *,
        session: str = "",
        method: Union[Method, str, None] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        exchange: str = "",
        process_group: Any = None,
        fold_bias: bool = True,
        skip: Sequence[str] = (),
        skip_types: Union[Type[nn.Module], Sequence[Type[nn.Module]]] = (),
        min_dim: int = 2,
        max_dim: int = 1 << 20,
        layer_methods: Optional[Mapping[str, Union[Method, str]]] = None,
        parameter_methods: Optional[Mapping[str, Union[Method, str]]] = None,
        embeddings: Union[Method, str, None] = None,
        experts: Union[Method, str, None] = None,
        replace: bool = False,
        overlap: bool = False,
        seed: int = 0,
        statistics: str = "",
        sketches: int = 0,
        inv_freq: int = 10,
        warmup_steps: int = 10,
        staleness_steps: int = 0,
        statistics_dtype: str = "f16",
        gradient_dtype: str = "f32",
        fallback: Optional[Mapping[str, Any]] = None,
        on_shard_loss: str = "WAIT",
        data_plane: str = "GRPC",
        plane_device: Optional[int] = None,
        connect_timeout: float = 10.0,
        rpc_timeout: float = 30.0,
        result_timeout: float = 120.0,
        join_timeout: float = 120.0,
        lease_timeout: float = 600.0,
        security: Security = Security(),
        traceparent: str = "",
    ) -> None:
        """Connects, opens the session and puts hooks into the model.

        Args:
            model: a plain module, one under fully_shard, or DistributedDataParallel itself rather than the module in it; each
                may be compiled.
            address: of the coordinator: host:port, or unix:/path/to/socket on its host; or "local": a server of this job's
                own, on this host alone, which the first rank starts and which ends with that process (precondor.server).
            session: a name of this training run's own; a local server needs none.
            method: of layers. None: muon for hidden linear layers and soap for others, for which make_optimizer() makes the
                optimizer; mkor if `optimizer` is another one, with exchange REPLAY or PULL_FACTORS, and with `fallback`.
            optimizer: where the learning rate is read, for the report and KL_CLIP. AMP needs it, or make_optimizer().
            exchange: "DIRECT" (the server averages what every rank sends; the default of a plain model), "DELEGATE" (the
                job averages, one rank sends each layer and passes the answer on; the default of DistributedDataParallel and
                of fully_shard), "REPLAY" or "PULL_FACTORS" (the job averages, every rank computes its answer).
            process_group: of torch.distributed; None: DDP's, or the default one.
            fold_bias: a bias becomes its weight's last column; False: it is left to the optimizer.
            skip: regular expressions; modules whose whole name matches one are left to the optimizer.
            skip_types, min_dim, max_dim: so are modules of these classes, and those whose longer side is not in this range.
            layer_methods: regular expression of whole layer names -> their method; the first that matches. Each has to match one.
            parameter_methods: of whole parameter names -> a method whose answers are whole updates: layers by gradients alone (docs/pytorch.md).
            embeddings: such a method for embeddings, tied weights too; "": the optimizer; None: so, and soap for tied ones without a `method`.
            experts: such a method for weights [experts, d_out, d_in]; "": the optimizer; None: `method`, where it is one of kron, soap, muon.
            replace: end a session of this name that is there, and begin anew.
            overlap: gradients leave during the backward pass. The step has one backward pass outside no_sync(), nothing
                touches gradients between it and step(), and each rank's gradients are its own: DIRECT. DDP then averages
                what is no layer, by its communication hook, of which it has no other.
            statistics: "" for what the method wants.
            plane_device: the CUDA device of this rank's own, with data_plane "COLLECTIVE" by NCCL; None: the model's, or 0.
            The others are SessionSpec's and Client's.

        Raises:
            UnavailableError: no server answers at the address.
            FailedPreconditionError: SPEC_MISMATCH: the session's name is taken, or the model or an option has changed.
            UnimplementedError: a model in parts but by fully_shard (FSDP1, tensor parallelism, DataParallel).
            InvalidArgumentError: an option, or a model without any layer.
        """
        if is_compiled(model) and not SUPPORTED:
            raise UnimplementedError(f"model: is compiled: needs torch 2.4 or later, got {torch.__version__}", "UNIMPLEMENTED")
        _layers.refuse_unknown(model)
        self._outer = model
        self._model, self._group, self._ddp = _group.of(model, process_group)
        sharded = _shards.refuse_unknown(self._model, self._group.size)
        self._optimizer = optimizer
        self._overlap = overlap
        self._recipe = _recipe.choose(method, embeddings, experts, exchange, fallback, optimizer)
        method = self._recipe.method
        choice = _layers.Choice(skip, skip_types, min_dim, max_dim, fold_bias, parameter_methods or {}, self._recipe.embeddings,
                                self._recipe.tied, self._recipe.experts)
        chosen = _layers.choose(self._model, choice)
        self._left = chosen.left
        self._slots = slots_of([matrix for _, matrix in chosen.matrices])
        if not self._slots:
            raise InvalidArgumentError(f"model: no layer to precondition; left to the optimizer: {self._left}",
                                       "INVALID_ARGUMENT")
        if sharded:
            _shards.refuse_whole([matrix for _, matrix in chosen.matrices])
        self._is_local = address == "local"
        if not session and not self._is_local:
            raise InvalidArgumentError("session: expected a name, got none", "INVALID_ARGUMENT")
        if self._is_local:
            address, unique = _local.start(self._group)
            session = session or unique
        self._spec = SessionSpec(
            name=session, layers=tuple(slot.layer for slot in self._slots), method=method, world_size=self._group.size,
            seed=seed, exchange=exchange or ("DELEGATE" if self._ddp or sharded else "DIRECT"),
            statistics=statistics_of(method, statistics), sketches=sketches, inv_freq=inv_freq,
            warmup_steps=warmup_steps, staleness_steps=staleness_steps, statistics_dtype=statistics_dtype,
            gradient_dtype=gradient_dtype, fallback=dict(fallback or {}), on_shard_loss=on_shard_loss,
            layer_methods=_layers.exceptions(
                [slot.layer for slot in self._slots], self._recipe.layer_methods(layer_methods, chosen), statistics,
                chosen.by_gradient),
            data_plane=data_plane)
        check_options(self._spec, sharded=sharded, overlap=overlap, several=self._ddp or self._group.size > 1)
        self._rest = rest_of(model) if overlap and self._ddp else None
        self._kinds, self._methods = kinds_of(self._spec), methods_of(self._spec)
        self._clips = {place: float(clip) for place, clip in clip_of(self._spec).items()}
        self._averages = not self._ddp and not sharded and self._group.size > 1
        self._shards = _shards.Shards(self._group, self._slots) if sharded else None
        self._worker: Optional[Worker] = None
        self._exchange: Optional[Exchange] = None
        self._reporter: Optional[Reporter] = None
        self._address, self._security = address, security
        self._step = 0
        self._pairs: Dict[int, Pair] = {}
        self._wanted: FrozenSet[int] = frozenset()  # places that this step takes statistics of
        self._holding = 0  # contexts of no_sync that are entered
        self._arrived: Set[int] = set()  # overlap: parameters whose gradient is there
        self._handles: List[Any] = []
        self._taps: List[Tap] = []
        self._switch = Switch()
        self._tapped = False  # compiled code has been seen
        self._missed: Optional[PrecondorError] = None  # of this step
        self._made = False  # a step, since the attached optimizer's last
        self._unwatched = 0  # contexts of unwatched that are entered
        self._warned: Set[int] = set()  # places of layers
        self._last: Dict[str, float] = {}
        self._closed = False
        self._client: Client = self._group.check(
            lambda: Client(address, connect_timeout=connect_timeout, rpc_timeout=rpc_timeout, security=security,
                           traceparent=traceparent,
                           result_timeout=result_timeout, join_timeout=join_timeout, lease_timeout=lease_timeout,
                           plane_device=_device.first_of(self._model) if plane_device is None else plane_device))
        if replace:
            self._group.check(lambda: self._group.rank == 0 and self._client.close_session(session))
        self._session: Session = self._group.check(lambda: self._client.open_session(self._spec))
        self._is_new = any(self._group.gather(self._session.created))
        if self._rest is not None:
            self._rest.begin(parameter for slot in self._slots for parameter in slot.matrix.parameters())
        self._watch(chosen)
        self._guarded = guard_hooks()
        _open.add(self)

    # --- what it is -----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> Tuple[Layer, ...]:
        """In the session's order."""
        return tuple(self._spec.layers)

    @property
    def left(self) -> Dict[str, str]:
        """By name of a parameter that is left to the optimizer, why."""
        return dict(self._left)

    @property
    def spec(self) -> SessionSpec:
        """The session's description."""
        return self._spec

    @property
    def step_number(self) -> int:
        """Of the step that comes next, from 0."""
        return self._step

    @property
    def mode(self) -> str:
        """"SECOND_ORDER" or "FIRST_ORDER", of the step that comes next."""
        if self._worker is None:
            return "SECOND_ORDER"
        return self._worker.mode(self._step)

    @property
    def checkpoint_due(self) -> bool:
        """True after a step() when a snapshot of the servers goes with a checkpoint that is saved after optimizer.step()."""
        return self._snapshot_id() != 0

    def metrics(self) -> Dict[str, float]:
        """Flat numbers for a logger or a progress bar: step (finished ones), second_order (1 or 0, of the next), of the last
        step preconditioned, identity, skipped (layers) and step_seconds, and Worker.metrics()' bytes and reconnects."""
        traffic = {} if self._worker is None else self._worker.metrics()
        return {"step": self._step, "second_order": float(self.mode == "SECOND_ORDER"), **self._last, **traffic}

    def device_plane(self) -> Dict[str, Any]:
        """How many gradients stayed on their CUDA device ("in_ring") or were copied from it by the client ("over_socket"), and
        the "reason" why the last one that did not stay went through the host (docs/cuda.md)."""
        return {"in_ring": 0, "over_socket": 0, "reason": ""} if self._exchange is None else self._exchange.device_plane()

    def data_plane_status(self) -> str:
        """Empty while gradients go the way of data_plane, or wait for it; otherwise why they go over gRPC until the job's
        next epoch (docs/collective.md). metrics() has what communicators have carried."""
        return "" if self._worker is None else self._worker.data_plane_status()

    # --- a step -----------------------------------------------------------------------------------------------------------

    def step(self, loss: Union[float, torch.Tensor, None] = None, *, samples: int = 1,
             learning_rate: Optional[float] = None, scaler: Optional[Any] = None) -> StepResult:
        """Puts the preconditioned gradient in the place of every layer's. Once an optimizer step, on every rank.

        Call it after the last backward pass and before optimizer.step(). A layer without a usable gradient on some rank
        (unused, infinite) has .grad None afterwards, and so do all of the optimizer in a skipped step: optimizers leave them.

        Args:
            loss: a number, or a tensor of one; reported for metrics and the fallback. None: not known.
            samples: the weight of this rank's loss and, but with DDP, of its gradients, where batches differ in size.
            learning_rate: None: that of the optimizer's first group.
            scaler: AMP's GradScaler, of a model whose layers are all the optimizer's. Gradients are unscaled here, or,
                but with a plain model on several ranks, have been by scaler.unscale_(optimizer).

        Raises:
            DeadlineExceededError: the servers were gone for longer than the timeouts.
            AbortedError: the job rolled back, or another rank failed. After an error begin again from a checkpoint.
            FailedPreconditionError: a layer's parameter has been replaced in the model.
            DataLossError: in REPLAY and PULL_FACTORS, when the ranks' factors are no longer the same.
            A step is reported beside the next one, which raises its error.
        """
        began = time.monotonic()
        loss, samples = number_of(loss), count_of(samples)
        self._recipe.check_optimizer()
        self._join()
        _layers.check_present(self._model, (slot.matrix for slot in self._slots))
        self._reporter.wait()
        rate = rate_of(learning_rate, self._optimizer, bool(self._clips))
        if self._exchange.any_sent() and (scaler is not None or samples != 1):
            raise InvalidArgumentError("overlap: gradients have left, so that neither scaler nor samples can be used",
                                       "INVALID_ARGUMENT")
        loss_scale, finite = unscale(scaler, self._optimizer, self._slots, self._group, self._averages, self._shards is not None)
        self._average(samples)
        mode = self.mode
        self._exchange.collect(self._step)
        for slot in reversed(self._slots):
            if not self._exchange.is_sent(slot):
                self._send(slot, finite=finite, loss_scale=loss_scale, samples=samples)
        answers = self._receive()
        scale = self._scale(answers, rate)
        self._store(answers, scale)
        if not finite:
            for parameter in optimized(self._optimizer):
                parameter.grad = None
        self._reporter.report(self._step, loss, samples, rate or 0.0, finite)
        result = StepResult(self._step, mode,
                            {slot.layer.name: answers[slot.place].decision for slot in self._slots if slot.place in answers},
                            not finite, scale)
        self._begin(self._step + 1)
        self._made = True
        self._last = {kind.lower(): sum(decision == kind for decision in result.decisions.values())
                      for kind in ("PRECONDITIONED", "IDENTITY")}
        self._last["skipped"] = sum(decision == "SKIP" for decision in result.decisions.values())
        self._last["step_seconds"] = time.monotonic() - began
        return result

    def param_groups(self, weight_decay: float = 0.01) -> List[Dict[str, Any]]:
        """Of the model's parameters, for BaseOptimizer: layers of methods whose answers are whole updates (docs/methods), apart
        from all others; matrices with weight decay, biases and other vectors without."""
        self._recipe.needs_optimizer = False
        whole = {parameter for slot in self._slots if traits_of(self._methods[slot.place]).whole_updates
                 for parameter in slot.matrix.parameters()}
        return _optimizer.groups_of(self._model, whole, weight_decay, self._recipe.embedding_scale)

    def make_optimizer(self, lr: float, *, weight_decay: float = 0.01, **options: Any) -> _optimizer.BaseOptimizer:
        """BaseOptimizer of param_groups(), AdamW where no answer is a whole update; options: betas, eps. Its rate is reported."""
        options = self._recipe.optimizer_options(options)
        self._optimizer = _optimizer.BaseOptimizer(self.param_groups(weight_decay), lr, **options)
        return self._optimizer

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on optimizer.step() begins with step(), unless one has been made since the last: the loop needs no line for
        it. The loss is reported where optimizer.step(closure) gives it. With a GradScaler, or to report the loss, call
        step(loss, scaler=scaler) yourself.

        Raises:
            UnimplementedError: torch before 2.0. InvalidArgumentError: LBFGS, or an optimizer that does not train every layer.
        """
        def before(loss: Any) -> None:
            if not self._made:
                self.step(loss)
            self._made = False

        parameters = [parameter for slot in self._slots for parameter in slot.matrix.parameters()]
        self._handles.append(_optimizer.attach(optimizer, parameters, before))
        self._optimizer = self._optimizer or optimizer
        self._made = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Round every backward pass of a step but the last, with `overlap`, DDP, whose no_sync it enters, or fully_shard, whose
        set_requires_gradient_sync it calls."""
        outer = original(self._outer)
        with contextlib.ExitStack() as stack:
            if self._ddp:
                stack.enter_context(outer.no_sync())
            elif self._shards is not None:
                stack.enter_context(_shards.without_sync(outer))
            self._holding += 1
            try:
                yield
            finally:
                self._holding -= 1

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Around passes that are not the step's: torch.autograd.grad of a penalty or an attack, losses that only measure.
        Neither a forward nor a backward pass in it counts in the statistics."""
        self._unwatched += 1
        on, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._unwatched -= 1
            self._switch.on = on

    def discard(self) -> None:
        """Forgets the statistics of the backward passes since the last step, of a batch that is given up or tried again. The
        gradients are the caller's to zero.

        Raises:
            FailedPreconditionError: with overlap, when gradients have left already.
        """
        if self._exchange is not None and self._exchange.any_sent():
            raise FailedPreconditionError(f"discard: gradients of step {self._step} have left", "FAILED_PRECONDITION",
                                          "UNSPECIFIED", "Without overlap they leave in step() alone")
        self._begin(self._step)

    # --- checkpoints and the end --------------------------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """What load_state_dict needs: the step, and the number of the servers' snapshot where checkpoint_due.

        Small, and the same on every rank. Take it after optimizer.step() and before the next forward pass, and save the
        model's and the optimizer's beside it. Waits until the servers have all that was sent, so that a job killed at any
        instant can begin with it.
        """
        self._flush()
        return make_state(self._spec, self._step, self._snapshot_id())

    def load_state_dict(self, state: Mapping[str, Any], *, snapshot_paths: Sequence[str] = (), exact: bool = True,
                        precondorctl: str = "precondorctl") -> None:
        """Joins at the step of a state_dict(). On every rank, before the first forward pass or step.

        The servers' factors have to be those of that step. They are when the job has done no step since, or with
        `snapshot_paths`.

        Args:
            snapshot_paths: data directories of the shards, from which rank 0 restores the snapshot that goes with the state
                first (`precondorctl snapshot restore`), for the ranks of this job. They must be copies, or of servers that do not run.
            exact: False: go on with the factors that there are, of a later step or none.
            precondorctl: the program.

        Raises:
            InvalidArgumentError: no state of this session's layers, or without a snapshot.
            FailedPreconditionError: with `exact`, when the factors are not those of the step.
        """
        if self._worker is not None:
            raise FailedPreconditionError("load_state_dict: this rank has joined already", "FAILED_PRECONDITION",
                                          "UNSPECIFIED", "Call it before the first forward pass")
        check_state(state, self._spec)
        step = state["step"]
        if snapshot_paths:
            self._group.check(lambda: self._group.rank == 0 and restore_snapshot(
                state, snapshot_paths, self._address, self._security, precondorctl, self._group.size))
        elif self._is_new and step > 0 and exact:
            # Otherwise the next attempt would find it, and take its factors for the run's.
            self._group.check(lambda: self._group.rank == 0 and self._session.close())
            raise FailedPreconditionError(
                f"session {self._spec.name}: the servers have no factors of it", "FAILED_PRECONDITION", "UNSPECIFIED",
                "Give snapshot_paths, or go on with fresh ones: exact=False")
        self._join(step, resumes=True)
        later = self._worker.rollback_step
        if exact and not all(self._group.gather(later is None or later < step)):
            self._leave()
            raise FailedPreconditionError(
                f"session {self._spec.name}: the job has been beyond step {step}, and the factors are of a later step",
                "FAILED_PRECONDITION", "UNSPECIFIED",
                "Give snapshot_paths of a snapshot that goes with the checkpoint, or go on with the factors as they are: "
                "exact=False")

    def close(self, *, end_session: bool = False) -> None:
        """Takes the hooks out and ends the connection. The session stays, to go on with from a checkpoint, unless
        end_session, which all ranks give: then the servers forget its factors once every rank is here. The first call
        counts."""
        if self._closed:
            return
        self._closed = True
        self._switch.on = False
        for handle in self._handles:
            handle.remove()
        for tap in self._taps:
            tap.leave()
        if self._rest is not None:
            self._rest.end()
        try:
            if end_session:
                self._flush()
                self._group.gather(None)
                if self._group.rank == 0:
                    self._session.close()
        finally:
            self._leave()
            if self._is_local and self._group.size == 1:  # no other process uses it
                with contextlib.suppress(PrecondorError):
                    self._session.close()
            self._client.close()

    def __enter__(self) -> "Preconditioner":
        return self

    def __exit__(self, kind: Any, *unused: object) -> None:
        self.close(end_session=kind is None)

    # --- the inside ---------------------------------------------------------------------------------------------------------

    def _watch(self, chosen: _layers.Chosen) -> None:
        slots: Dict[_layers.Matrix, List[Slot]] = {}
        for slot in self._slots:
            slots.setdefault(slot.matrix, []).append(slot)
        for module, matrix in chosen.matrices:
            own = slots[matrix]
            if module is not None:
                self._handles.append(right_after_forward(module, TappedHook(
                    lambda module, inputs, output, own=own: self._on_forward(own, inputs, output),
                    lambda x, grad, own=own: self._on_tap(own, x, grad), self._switch)))
            if self._overlap:
                for parameter in matrix.parameters():
                    self._handles.append(after_accumulation(
                        parameter, lambda own=own, parameter=parameter: self._on_gradient(own, parameter)))
        for attention, matrices in chosen.attentions.items():
            tap = Tap(matrices, lambda matrix, x, output, around: self._on_call(slots[matrix], x, output, around))
            self._taps.append(tap)
            self._handles.append(attention.register_forward_pre_hook(Hook(tap.enter)))
            self._handles.append(after_forward(attention, tap.leave))

    def _join(self, first_step: int = 0, resumes: bool = False) -> None:
        if self._worker is not None:
            return
        if self._shards is None:  # which has others while a forward pass is made
            _layers.check_present(self._model, (slot.matrix for slot in self._slots))
        if not self._is_new and not resumes:
            raise from_status(
                "FAILED_PRECONDITION", "UNSPECIFIED",
                f"session {self._spec.name} is there already, with factors of another run. Load that run's checkpoint "
                f"(load_state_dict), choose another name, or begin anew with replace=True")
        self._worker = self._session.join(self._group.rank, first_step)
        # DDP writes its buckets back to the gradients at the end of the backward pass, when answers may have come.
        self._exchange = Exchange(self._worker, self._group, self._slots, in_place=self._rest is None, shards=self._shards)
        self._reporter = Reporter(self._worker)
        self._begin(first_step)

    def _begin(self, step: int) -> None:
        if self._reporter is not None:
            self._reporter.directive_for(step)  # or ranks could follow directives of several ages, and have other graphs
        self._guarded = self._guarded or guard_hooks()
        self._step = step
        self._pairs = {}
        self._missed = None
        self._arrived = set()
        self._wanted = frozenset(slot.place for slot in self._slots
                                 if self._worker is not None and self._worker.needs_statistics(step, slot.place))
        self._switch.on = self._worker is None or bool(self._wanted)

    def _on_forward(self, slots: Sequence[Slot], inputs: Tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return
        if not inputs:
            self._warn(slots[0], "its module was called with keywords alone; no statistics of such calls")
            return
        self._on_call(slots, inputs[0], output)

    def _on_call(self, slots: Sequence[Slot], x: torch.Tensor, output: torch.Tensor, around: Tuple[int, int] = (0, 0)) -> None:
        """A call with the weight, or with its rows but for some before and behind them."""
        if not self._wants(slots):
            return
        # Under autocast the layer itself works on a copy in its own type, and its input may be written over.
        step, x = self._step, x.detach().to(output.dtype)
        version, inputs = x._version, [x]

        def on_backward(unused: Any, grads: Tuple[Optional[torch.Tensor], ...]) -> None:
            if not inputs or self._unwatched:  # a graph that is kept counts once
                return
            x = inputs.pop()
            if x._version == version:
                self._on_backward(step, slots, x, grads[0], around)
            else:
                self._warn(slots[0], "the input of its module was written over before the backward pass; no statistics of "
                                     "such calls")

        # On the node and not the tensor: an operation in place after the module leaves the node as it is.
        output.grad_fn.register_hook(on_backward)

    def _wants(self, slots: Sequence[Slot]) -> bool:
        """Whether the passes that are being made count in statistics of these layers."""
        if self._unwatched or self._closed:
            return False
        self._join()
        self._reporter.check_process()
        return slots[0].place in self._wanted

    def _on_tap(self, slots: Sequence[Slot], x: torch.Tensor, grad: torch.Tensor) -> None:
        """A backward pass of a call in a compiled graph."""
        self._tapped = True
        if self._wants(slots):
            self._on_backward(self._step, slots, x, grad, (0, 0))

    @torch.no_grad()
    def _on_backward(self, step: int, slots: Sequence[Slot], x: torch.Tensor, grad: Optional[torch.Tensor],
                     around: Tuple[int, int]) -> None:
        if grad is None or grad.numel() == 0 or step != self._step or self._worker is None:
            return
        if any(around):
            grad = nn.functional.pad(grad, around)  # nothing comes from outputs that are not made
        matrix = slots[0].matrix
        samples = matrix.samples(grad)
        with torch.autocast(grad.device.type, enabled=False):  # a backward pass may be in it
            rows = list(matrix.rows(x, grad))
            if not rows:
                self._warn(slots[0], f"its module made {list(grad.shape)} of {list(x.shape)}, which is not its product; no "
                                     "statistics of such calls")
            for slot, (a, g) in zip(slots, rows):
                pair = self._pairs.get(slot.place)
                if pair is None:
                    pair = self._pairs[slot.place] = Pair(self._worker, step, slot, self._kinds[slot.place])
                pair.add(a, g, samples)

    def _on_gradient(self, slots: Sequence[Slot], parameter: nn.Parameter) -> None:
        if self._holding or self._worker is None:
            return
        self._arrived.add(id(parameter))
        if self._exchange.is_sent(slots[0]):
            raise FailedPreconditionError(
                f"layer {slots[0].layer.name}: a second backward pass in step {self._step}, whose gradient has left",
                "FAILED_PRECONDITION", "UNSPECIFIED",
                "With overlap put every backward pass of a step but the last into no_sync()")
        if all(id(one) in self._arrived for one in slots[0].matrix.parameters()):
            for slot in slots:
                self._send(slot, finite=True, loss_scale=1.0, samples=1)

    def _send(self, slot: Slot, *, finite: bool, loss_scale: float, samples: int) -> None:
        pair = self._pairs.get(slot.place)
        if pair is None and finite and slot.place in self._wanted:
            self._miss(slot)
        self._exchange.send(self._step, slot, pair, finite=finite, loss_scale=loss_scale, samples=samples)

    def _receive(self) -> Dict[int, Answer]:
        """The step's answers, for which others wait too; at a statistic step every rank raises what one of them missed."""
        def receive() -> Dict[int, Answer]:
            answers = self._exchange.receive(self._step)
            if self._missed is not None:
                raise self._missed
            return answers

        return self._group.check(receive) if self._wanted else receive()

    def _miss(self, slot: Slot) -> None:
        """Warns of a layer that has a gradient and was not called; an error where a graph may have lost the call."""
        if slot.place in self._warned or not slot.matrix.has_gradient() or \
                not bool(_shards.local(slot.matrix.weight.grad).any()):
            return
        if self._tapped or is_compiled(self._outer):
            self._missed = self._missed or FailedPreconditionError(
                f"layer {slot.layer.name}: it has a gradient, but step {self._step}, which takes statistics, saw no call of it",
                "FAILED_PRECONDITION", "UNSPECIFIED",
                "nn.MultiheadAttention is seen outside compiled code alone; what else calls its weight and not its module, skip= "
                "leaves out")
            return
        self._warn(slot, "it has a gradient, but no forward pass of its module in this step had a backward pass. There are no "
                         "statistics of it, and its gradient stays as it is. If its weight is used by something else than its "
                         "module, skip= leaves it out")

    def _warn(self, slot: Slot, what: str) -> None:
        """Once of a layer: the first reason mostly explains the others."""
        if slot.place not in self._warned:
            self._warned.add(slot.place)
            warnings.warn(f"layer {slot.layer.name}: {what}")

    def _average(self, samples: int) -> None:
        """What neither DDP nor the server averages."""
        if not self._averages:
            return
        by_server = {id(parameter) for slot in self._slots for parameter in slot.matrix.parameters()
                     if self._spec.exchange == "DIRECT"}
        self._group.average_gradients([parameter for parameter in self._model.parameters()
                                       if parameter.requires_grad and id(parameter) not in by_server], samples)

    def _scale(self, answers: Mapping[int, Answer], rate: Optional[float]) -> float:
        clipped = [place for place in self._clips if place in answers and answers[place].decision == "PRECONDITIONED"]
        if not clipped:
            return 1.0
        return kl_clip_scale([answers[place].inner_product for place in clipped], rate, self._clips[clipped[0]])

    @torch.no_grad()
    def _store(self, answers: Mapping[int, Answer], scale: float) -> None:
        for slot in self._slots:
            value, slot.value = slot.value, None
            answer = answers.get(slot.place)
            if answer is None or answer.decision == "SKIP":
                continue
            factor = scale if slot.place in self._clips and answer.decision == "PRECONDITIONED" else 1.0
            if self._shards is not None:
                self._shards.store(slot.place, factor)
                continue
            if factor != 1.0:
                value.mul_(factor)
            if not slot.matrix.has_gradient():  # this rank has none, and got the others'
                continue
            if value is slot.buffer:
                slot.matrix.store(slot.group, slot.parts)
        for slot in self._slots:
            if slot.place in answers and answers[slot.place].decision == "SKIP":
                for parameter in slot.matrix.parameters():
                    parameter.grad = None

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._reporter.close()
        self._worker = None

    def _snapshot_id(self) -> int:
        """Of the servers' snapshot as of the step that comes next; 0: none."""
        directive = None if self._worker is None else self._reporter.directive_for(self._step)
        return directive.snapshot_id if directive is not None and 0 < directive.snapshot_at == self._step else 0

    def _flush(self) -> None:
        if self._worker is None:
            return
        self._reporter.wait()
        try:
            self._worker.flush()
        except InvalidArgumentError as error:  # it has counted as an abstention, and the job goes on
            warnings.warn(f"the server refused statistics: {error.message}")
