# SPDX-License-Identifier: Apache-2.0
"""Exchanges one step's data of a rank with the servers: sends statistics and gradients, receives answers and, in
DELEGATE, passes them on to the other ranks."""

from __future__ import annotations

import dataclasses
from typing import AbstractSet, Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from .._client import Future, Worker, kl_clip_scale, lost_since, results, send_all, warn_of_lost_updates
from .._errors import AbortedError, DataLossError, FailedPreconditionError, InvalidArgumentError, PrecondorError
from .._session import Layer, SessionSpec, delegate_of, traits_of
from . import _device
from ._buckets import GradientFill
from ._group import Group
from ._layers import Matrix, has_gradient
from ._pieces import LINE, Gathering, Parts
from ._statistics import Covariance, Vectors
from ._tensor_parallel import Joined, Split, join

_DECISIONS = ("PRECONDITIONED", "IDENTITY", "SKIP")
_FAILED = -1.0
_RUN, _RUN_ELEMENTS = 8, 1 << 18  # layers that are copied by one call and share a message, if they are small


@dataclasses.dataclass
class Slot:
    """One layer of the session: its index and the buffer of its gradient."""

    place: int
    layer: Layer
    matrix: Matrix
    group: int
    buffer: Optional[torch.Tensor] = None  # f32 [d_out, d_in]
    on_device: bool = False  # the buffer is in the memory of the weight's CUDA device, not in host memory
    parts: Any = None  # the buffer's parts, from Matrix.split
    array: Optional[np.ndarray] = None  # the buffer, if it is in host memory
    value: Optional[torch.Tensor] = None  # this step's answer
    # With has_lookups: bool [d_out, 1], rows of this step's gradient that are all zeros.
    untouched: Optional[torch.Tensor] = None
    split: Optional[Split] = None  # under tensor parallelism
    delegate: int = 0  # rank that sends the gradient in DELEGATE; known with the session
    sends: bool = True  # whether this rank sends the gradient; known with the session

    def use(self, buffer: torch.Tensor, on_device: bool) -> None:
        self.buffer, self.on_device, self.parts = buffer, on_device, self.matrix.split(buffer)
        self.array = None if on_device else buffer.numpy()


@dataclasses.dataclass
class Answer:
    decision: str
    inner_product: float
    updates_lost: int = 0  # see StepResult
    reason: str = ""  # of the decision; known to the rank that sent the gradient


class Pair:
    """Statistics of both sides of one layer at one step."""

    def __init__(self, worker: Worker, step: int, slot: Slot, kind: str, mean_positions: bool) -> None:
        rank = None if slot.split is None else slot.split.first

        def side(name: str, ones: bool) -> Union[Covariance, Vectors]:
            if kind == "COVARIANCE":
                return Covariance(ones)
            if kind != "SIGNED":
                return Vectors(None, ones)
            sketch = worker.sketch(step, slot.place, name, rank)
            return Vectors(sketch.signs, ones, lambda first, rows: sketch.sums(first, rows, ones))

        self._a = side("input", slot.layer.has_bias)
        self._g = side("output", False)
        self._samples, self._mean_positions = 0, mean_positions

    def add(self, a: torch.Tensor, g: torch.Tensor, samples: int) -> None:
        scale = samples / len(a) if self._mean_positions else 1.0  # a convolution has a row for each position of a sample
        self._a.add(a, scale)
        self._g.add(g, scale)
        self._samples += samples

    def finish(self, loss_scale: float) -> Tuple[torch.Tensor, torch.Tensor, int]:
        """Returns both sides and the number of rows."""
        return self._a.finish(1.0), self._g.finish(self._samples / loss_scale), self._a.rows


class Exchange:
    """Sends a step's contributions and receives its answers. One step at a time. send() may be called during the
    backward pass."""

    def __init__(self, worker: Worker, group: Group, slots: Sequence[Slot], in_place: bool = True,
                 pieces: Union[Gathering, Parts, None] = None, averages: bool = False,
                 own_servers: bool = False) -> None:
        """Makes the exchange of one worker.

        Args:
            worker: The rank's worker.
            group: The job's ranks.
            slots: The session's layers.
            in_place: Gradients may be sent from, and answers written to, their own memory if its layout allows it.
            pieces: For a model whose parameters are divided: Parts in SHARDED, Gathering in DELEGATE.
            averages: The servers average the ranks' own gradients, of a plain model.
            own_servers: The servers are those of a LocalServer.
        """
        self._worker = worker
        self._group = group
        self._slots = slots
        self._in_place = in_place
        self._pieces = pieces
        self._own_servers = own_servers
        self._delegates = worker.spec.exchange == "DELEGATE" and (group.size > 1 or pieces is not None)
        self.updates_lost: Dict[str, int] = {}  # of the last step; see StepResult
        self.unused = GradientFill(group, [one for slot in slots for one in slot.matrix.parameters()], averages)
        self.versions: Dict[int, int] = {}  # factor_version of the last answer, by index of the layer
        self._lost_before: Mapping[str, int] = {}  # all that this rank knew of at the last step
        # DELEGATE: for each rank the decision, product, lost updates and version of its layers, then their values
        self._flat: List[torch.Tensor] = []
        self._told_servers = False
        self._unshared: Dict[str, int] = {}  # DELEGATE: lost updates that the other ranks have not been told of
        self._why_host = ""  # why the last gradient that left its device was copied to the host here
        # With several ranks in DIRECT, each rank's gradient touches other rows.
        self._ranks_differ = group.size > 1 and worker.spec.exchange == "DIRECT"
        has_factors = worker.spec.exchange in ("REPLAY", "PULL_FACTORS")
        self._agreement = Agreement(worker, group, [slot.layer for slot in slots]) if has_factors and group.size > 1 else None
        self._futures: Dict[int, Future] = {}
        self._sent: set = set()
        self._part: Tuple[int, bool] = (-1, False)  # a step, and takes_part() of it
        self._placed = False  # whether this step's _flat has been placed
        self._heights = {slot.place: worker.spec.sketches if kind == "SIGNED" else 1
                         for slot, kind in zip(slots, kinds_of(worker.spec)) if slot.split is not None}
        self._joined: Dict[int, Optional[Joined]] = {}  # this step's statistics of layers with `split`
        for slot in slots:
            slot.delegate, slot.sends = delegate_of(worker.spec, slot.place), worker.sends_gradient(slot.place)
        if self._delegates:
            self._make_flat(None)

    def state(self, factors: bool) -> Dict[str, Any]:
        """Returns what a checkpoint needs besides the session. factors: it has them too, with their versions."""
        known = [] if factors else [self.versions.get(slot.place, 0) for slot in self._slots]
        return {**({"factor_versions": known} if any(known) else {}), **({"unused": True} if self.unused.fills else {})}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what state() returned."""
        self.versions.update(enumerate(state.get("factor_versions", ())))
        self.unused.fills = bool(state.get("unused", False))

    def is_sent(self, slot: Slot) -> bool:
        return slot.place in self._sent

    def any_sent(self) -> bool:
        return bool(self._sent)

    def check_sent(self, overlap: bool, needs_all: bool) -> None:
        """Checks the gradients that have left before the step's send() for the rest: with `overlap` there may be some.

        Raises:
            FailedPreconditionError: Those of a step that was interrupted, whose answers would be taken for this one's.
            InvalidArgumentError: The step needs all gradients before one leaves, and some have left.
        """
        if self._sent and not overlap:
            raise FailedPreconditionError("step(): the call before it did not end, and its gradients have left", "FAILED_PRECONDITION",
                                          "UNSPECIFIED", "Begin again from a checkpoint, with a new Preconditioner")
        if self._sent and needs_all:
            raise InvalidArgumentError("overlap: gradients have left, so that neither scaler nor samples can be used", "INVALID_ARGUMENT")

    def takes_part(self, step: int) -> bool:
        """Returns whether the servers answer this step. If not, the job's averaged gradients are the answers."""
        if self._part[0] != step:
            self._part = step, self._worker.mode(step) == "SECOND_ORDER" or self._worker.spec.exchange == "DIRECT"
        return self._part[1]

    def device_plane(self) -> Dict[str, Any]:
        """Returns WorkerStatus.device_plane, with the reason if gradients are copied to the host here before they are
        sent."""
        use = self._worker.status().device_plane
        return {**use, "reason": self._why_host or use["reason"]}

    def collect(self, step: int, pairs: Mapping[int, Pair], loss_scale: float, wanted: AbstractSet[int]) -> None:
        """Collects the gradients and the statistics that ranks have in parts. Call it before a step's first send().

        Args:
            step: The step.
            pairs: This rank's statistics, by index of the layer.
            loss_scale: The loss scale that they have.
            wanted: Indexes of the layers whose statistics the step takes.
        """
        if self._pieces is not None and self.takes_part(step):
            if self._delegates:
                self._place_flat()
            self._pieces.collect()
        splits = {slot.place: slot.split for slot in self._slots
                  if slot.split is not None and slot.place in wanted}
        if splits:
            self._joined = join(self._group, splits, self._heights, self._finish(pairs, splits, loss_scale))

    def send(self, step: int, slots: Sequence[Slot], pairs: Mapping[int, Pair], *, wanted: AbstractSet[int], finite: bool,
             loss_scale: float, samples: int, more: bool = False) -> None:
        """Sends statistics of the slots that are in `wanted`, and the gradients that this rank sends. With `more`, other slots or
        receive() follow at once."""
        takes_part = self.takes_part(step)
        self._sent.update(slot.place for slot in slots)
        loads = takes_part and finite and not isinstance(self._pieces, Parts)
        own = [slot.place for slot in slots if slot.place in wanted and slot.split is None]
        statistics = self._finish(pairs, own, loss_scale) if finite else {}
        for run in _runs(slots if wanted else [slot for slot in slots if slot.sends]):
            arrays = self._load([slot for slot in run if slot.sends and slot.matrix.has_gradient()]) if loads else {}
            if not wanted and len(arrays) == len(run):
                gradients = [(place, array, array) for place, array in arrays.items()]
                self._futures.update(zip(arrays, send_all(self._worker, step, gradients, samples, more)))
                continue
            for slot in run:
                if slot.place in wanted:
                    joined = slot.split is not None
                    self._send_statistics(step, slot, self._joined.pop(slot.place, None) if joined else statistics.get(slot.place))
                if takes_part and slot.sends:
                    self._futures[slot.place] = self._send_gradient(step, slot, arrays.get(slot.place), finite, samples, more)

    def _send_gradient(self, step: int, slot: Slot, array: Optional[np.ndarray], finite: bool, samples: int, more: bool) -> Future:
        worker = self._worker
        if array is not None:
            return worker.precondition(step, slot.place, array, samples, out=array, more=more)
        if not finite or not slot.matrix.has_gradient():
            slot.value = slot.untouched = None
            return worker.abstain_gradient(step, slot.place)
        if isinstance(self._pieces, Parts):
            return self._pieces.send(worker, step, slot)
        weight = slot.matrix.weight
        return worker.precondition(
            step, slot.place, _device.matrix(slot.value), samples, device=_device.ordinal(weight), stream=_device.stream(weight))

    def receive(self, step: int) -> Dict[int, Answer]:
        """Waits for all answers and returns them by index of the layer, with slot.value set where an answer is to be
        stored. If one fails, raises on every rank."""
        answers: Dict[int, Answer] = {}
        failure: Optional[PrecondorError] = None
        self._share_untouched()
        try:
            # The answer to the last gradient is usually the last one, so that this thread wakes up only a few times.
            places = list(reversed(self._futures))
            for place, result in zip(places, results([self._futures[place] for place in places])):
                answers[place] = Answer(result.decision, result.inner_product, reason=result.reason)
                self.versions[place] = result.factor_version
        except PrecondorError as error:
            failure = error
        if self._worker.mode(step) == "FIRST_ORDER":
            self.versions.clear()  # no answer needs the factors of an earlier one
        self._futures = {}
        self._sent = set()
        self._placed = False
        self._keep_untouched(answers)
        status = self._worker.status()
        lost, self._lost_before = lost_since(self._lost_before, status.lost_updates), status.lost_updates
        if self._delegates:
            self._unshared = {name: lost.get(name, 0) + self._unshared.get(name, 0) for name in {**lost, **self._unshared}}
            if self.takes_part(step):
                answers = self._share(answers, failure)
                lost.update(self._lost_by_others(answers))
                self._unshared = {}
        if self._agreement is not None and self.takes_part(step):
            self._agreement.check(step, failure is not None)
        if failure is not None:
            raise failure
        # A warning that is raised as an error comes after all collectives of the step.
        self.updates_lost = lost
        warn_of_lost_updates(self._worker.spec.name, lost)
        if answers and not self._told_servers:
            self._told_servers = True
            _device.tell_servers(self.device_plane(), (slot.matrix.weight for slot in self._slots), self._group.rank == 0, self._own_servers)
        return answers

    def _lost_by_others(self, answers: Mapping[int, Answer]) -> Dict[str, int]:
        own = {slot.place for slot in self._owned(self._group.rank)}
        return {slot.layer.name: answers[slot.place].updates_lost for slot in self._slots
                if slot.place in answers and slot.place not in own and answers[slot.place].updates_lost > 0}

    def _share_untouched(self) -> None:
        """Determines which rows of embeddings and experts have no gradient on any rank. Called before a rank waits for
        answers, so that no rank waits here for one whose answers do not arrive."""
        slots = [slot for slot in self._slots if slot.matrix.has_lookups]
        if not self._ranks_differ or not slots:
            return
        if self._futures:
            next(iter(self._futures.values())).ready()  # sends gradients that wait for a next one
        touched = torch.zeros(sum(slot.layer.d_out for slot in slots), dtype=torch.bool, device="cpu")
        sizes = [slot.layer.d_out for slot in slots]
        known = [(part, slot.untouched[:, 0]) for part, slot in zip(touched.split(sizes), slots) if slot.untouched is not None]
        for device in {flags.device for _, flags in known}:  # one copy for each device, because there are many experts
            of_device = [(part, flags) for part, flags in known if flags.device == device]
            flags = (~torch.cat([flags for _, flags in of_device])).cpu()
            for (part, _), own in zip(of_device, flags.split([len(part) for part, _ in of_device])):
                part.copy_(own)
        for slot, flags in zip(slots, self._group.any_of(touched).split(sizes)):
            slot.untouched = ~flags[:, None]

    def _keep_untouched(self, answers: Dict[int, Answer]) -> None:
        """Sets to zero the rows of answers that have no gradient on any rank in this step, because momentum would move
        them."""
        for slot in self._slots:
            if slot.matrix.has_lookups and slot.place in answers and slot.untouched is not None and slot.value is not None:
                slot.value.masked_fill_(slot.untouched.to(slot.value.device), 0.0)

    def _finish(self, pairs: Mapping[int, Pair], places: Iterable[int], loss_scale: float) -> Dict[int, Joined]:
        """Returns the statistics of those of these layers that have some."""
        finished = {place: pairs[place].finish(loss_scale) for place in places if place in pairs}
        sides = iter(_device.to_host([side for a, g, _ in finished.values() for side in (a, g)]))
        return {place: (next(sides), next(sides), rows) for place, (_, _, rows) in finished.items()}

    def _send_statistics(self, step: int, slot: Slot, statistics: Optional[Joined]) -> None:
        if statistics is not None:
            a, g, rows = statistics
            if np.isfinite(a).all() and np.isfinite(g).all():
                self._worker.send_statistics(step, slot.place, a, g, rows)
                return
        self._worker.abstain_statistics(step, slot.place)

    def _stays_on_device(self, slot: Slot) -> bool:
        """Returns whether the worker takes the gradient from a CUDA device's memory."""
        if self._delegates:
            self._place_flat()
            return slot.on_device
        if self._pieces is not None:
            return False
        device = _device.ordinal(slot.matrix.weight)
        return device is not None and self._takes_from(slot, device)

    def _takes_from(self, slot: Slot, device: int) -> bool:
        why_not = self._worker.device_plane_status(slot.place, device)
        self._why_host = why_not or self._why_host
        return not why_not

    def _load(self, slots: Sequence[Slot]) -> Dict[int, np.ndarray]:
        """Sets slot.value to the gradient's own memory, or to the buffer with a copy. Returns the arrays of those in host memory, by
        index of the layer."""
        arrays: Dict[int, np.ndarray] = {}
        copies: List[Tuple[torch.Tensor, torch.Tensor]] = []
        awaited: List[torch.Tensor] = []
        for slot in slots:
            on_device, weight = self._stays_on_device(slot), slot.matrix.weight
            cuda, whole = _device.ordinal(weight) is not None, self._pieces is None
            may = whole and not self._delegates and self._in_place and (on_device or (not cuda and weight.device.type == "cpu"))
            there = slot.matrix.in_place(slot.group) if may else None
            if there is None and whole:
                if slot.buffer is None or slot.on_device != on_device:
                    buffer = _buffer(slot.layer.d_out * slot.layer.d_in, weight.device if on_device else None, cuda)
                    slot.use(buffer.view(slot.layer.d_out, slot.layer.d_in), on_device)
                slot.matrix.clear(slot.parts)
                copies += [(part, gradient) for gradient, part in slot.matrix.pairs(slot.group, slot.parts)]
                awaited += [weight] if cuda and not on_device else []
            slot.value = slot.buffer if there is None else there
            if not on_device:
                arrays[slot.place] = slot.array if there is None else there.numpy()
        _copy(copies)
        for weight in awaited:
            _device.synchronize(weight)
        for slot in slots:
            if slot.matrix.has_lookups:
                slot.untouched = ~slot.value.ne(0).any(1, keepdim=True)
        return arrays

    # --- DELEGATE -----------------------------------------------------------------------------------------------------

    def _owned(self, rank: int) -> List[Slot]:
        return [slot for slot in self._slots if slot.delegate == rank]

    def _place_flat(self) -> None:
        """Before the step's first gradient is loaded, moves the flat buffers to the device if the worker takes all of
        this rank's gradients from it, and otherwise to the host."""
        if self._placed:
            return
        self._placed = True
        devices = {_device.ordinal(slot.matrix.weight) for slot in self._slots}
        device = devices.pop()
        on_device = not devices and device is not None and all(
            self._takes_from(slot, device) for slot in self._owned(self._group.rank))
        if on_device != self._flat_on_device:
            self._make_flat(self._slots[0].matrix.weight.device if on_device else None)

    def _make_flat(self, device: Optional[torch.device]) -> None:
        """Makes the flat buffers in the memory of `device`; None: in host memory."""
        self._flat, self._flat_on_device = [], device is not None
        for rank in range(self._group.size) if self._pieces is None else [self._group.rank]:
            owned = self._owned(rank)
            sizes = [slot.layer.d_out * slot.layer.d_in for slot in owned]
            flat = _buffer(LINE * len(owned) + sum(sizes), device, self._group.device.type == "cuda").zero_()
            values = flat[LINE * len(owned):].split(sizes)
            for slot, value in zip(owned, values):
                slot.use(value.view(slot.layer.d_out, slot.layer.d_in), device is not None)
            self._flat.append(flat)

    def _share(self, own: Dict[int, Answer], failure: Optional[PrecondorError]) -> Dict[int, Answer]:
        """Returns every rank's answers, as their owner has them. Products are rounded to f32 on the owner too, so that
        all ranks scale alike."""
        lines: Dict[int, Sequence[float]] = {}
        own_lines = torch.tensor([self._line(slot, own.get(slot.place), failure) for slot in self._owned(self._group.rank)],
                                 dtype=torch.float32, device="cpu").view(-1, LINE)
        if self._pieces is not None:
            lines = self._pieces.distribute(own_lines)
        headers: List[Tuple[List[Slot], torch.Tensor]] = []
        for rank, flat in enumerate(self._flat if self._pieces is None else []):
            owned = self._owned(rank)
            if not owned:
                continue
            header = flat[:LINE * len(owned)].view(-1, LINE)
            if rank == self._group.rank:
                header.copy_(own_lines)
            self._group.broadcast(flat, rank)
            headers.append((owned, header))
        for owned, header in headers:  # the first one waits for the device, and for all broadcasts
            lines.update(zip([slot.place for slot in owned], header.tolist()))
        answers: Dict[int, Answer] = {}
        failed: Optional[int] = None
        for slot in self._slots:
            decision, product, updates_lost, version = lines[slot.place]
            if decision == _FAILED:
                failed = slot.delegate
                continue
            answers[slot.place] = Answer(_DECISIONS[int(decision)], product, int(updates_lost))
            self.versions[slot.place] = int(version)
            slot.value = slot.buffer
        if failed is not None and failure is None:
            raise AbortedError(f"rank {failed} has no answers to pass on", "ABORTED", "UNSPECIFIED",
                               "Its own exception says why; all ranks go back to one checkpoint")
        return answers

    def _line(self, slot: Slot, answer: Optional[Answer], failure: Optional[PrecondorError]) -> Tuple[float, float, float, float]:
        lost = float(self._unshared.get(slot.layer.name, 0))
        if failure is not None:
            return _FAILED, 0.0, lost, 0.0
        return float(_DECISIONS.index(answer.decision)), answer.inner_product, lost, float(self.versions.get(slot.place, 0))


def _runs(slots: Sequence[Slot]) -> Iterator[List[Slot]]:
    """Divides slots into runs of at most _RUN layers; with more than _RUN_ELEMENTS a layer is alone, so that it leaves while the next
    one is copied."""
    run: List[Slot] = []
    size = 0
    for slot in slots:
        elements = slot.layer.d_out * slot.layer.d_in
        if run and (len(run) == _RUN or size + elements > _RUN_ELEMENTS):
            yield run
            run, size = [], 0
        run.append(slot)
        size += elements
    if run:
        yield run


def _copy(copies: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies to the first tensor of each pair from the second one."""
    if copies:
        targets, sources = zip(*copies)
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _buffer(size: int, device: Optional[torch.device], pinned: bool) -> torch.Tensor:
    """Returns an f32 buffer on the device; None: in host memory."""
    if device is None and pinned:
        return _device.pinned(size)
    return torch.empty(size, dtype=torch.float32, device=device or "cpu")


def clip_of(spec: SessionSpec) -> Dict[int, str]:
    """Returns, by index of the layer, the option scaling_clip of each layer whose answers the trainer scales by
    KL_CLIP."""
    methods = {place: one.method for one in spec.layer_methods for place in one.layers}
    clips = {}
    for place in range(len(spec.layers)):
        method = methods.get(place, spec.method)
        scaling = method.options.get("scaling", traits_of(method).default_scaling)
        if scaling == "KL_CLIP":
            clips[place] = str(method.options.get("scaling_clip", 0.001))
    return clips


def make_pieces(spec: SessionSpec, group: Group, slots: Sequence[Slot]) -> Union[Gathering, Parts]:
    return Parts(group, slots) if spec.exchange == "SHARDED" else Gathering(group, slots)


def scale_of(clips: Mapping[int, float], answers: Mapping[int, Answer], rate: Optional[float]) -> float:
    """Returns the scale of the answers of the layers in `clips`, which KL_CLIP scales; 1 if there are none."""
    clipped = [place for place in clips if place in answers and answers[place].decision == "PRECONDITIONED"]
    if not clipped:
        return 1.0
    return kl_clip_scale([answers[place].inner_product for place in clipped], rate, clips[clipped[0]])


def store(slots: Sequence[Slot], answers: Mapping[int, Answer], clips: Mapping[int, float], scale: float,
          pieces: Union[Gathering, Parts, None], warn: Callable[[Slot, str], None]) -> None:
    """Writes a step's answers to the gradients. `scale` is that of the layers in `clips`. Warns of a bias that trains without its
    weight."""
    copies: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for slot in slots:
        value, slot.value = slot.value, None
        answer = answers.get(slot.place)
        if answer is None:
            continue
        if answer.decision == "SKIP":
            if not slot.matrix.has_gradient() and any(map(has_gradient, slot.matrix.parameters())):
                warn(slot, "its weight has no gradient, so that its bias, which has one, is not trained either. Make the Preconditioner "
                           "and its optimizer anew after requires_grad has been set")
            elif answer.reason and "abstained" not in answer.reason:
                warn(slot, f"the servers skip it, so that it is not trained: {answer.reason}")
            for parameter in slot.matrix.parameters():
                parameter.grad = None
            continue
        factor = scale if slot.place in clips and answer.decision == "PRECONDITIONED" else 1.0
        if pieces is not None:
            pieces.store(slot.place, factor)
            continue
        if factor != 1.0:
            value.mul_(factor)
        if slot.matrix.has_gradient() and value is slot.buffer:  # without one, the answer is for other ranks
            copies += slot.matrix.pairs(slot.group, slot.parts)
    _copy(copies)


def slots_of(matrices: Sequence[Matrix]) -> List[Slot]:
    slots: List[Slot] = []
    for matrix in matrices:
        for group, layer in enumerate(matrix.layers()):
            slots.append(Slot(len(slots), layer, matrix, group))
    return slots


def kinds_of(spec: SessionSpec) -> List[str]:
    kinds = [spec.statistics] * len(spec.layers)
    for one in spec.layer_methods:
        for place in one.layers:
            kinds[place] = one.statistics
    return kinds


def methods_of(spec: SessionSpec) -> List[str]:
    methods = [spec.method.name] * len(spec.layers)
    for one in spec.layer_methods:
        for place in one.layers:
            methods[place] = one.method.name
    return methods


_MOST_TURNS = 16  # reading factors takes about as long as an update


class Agreement:
    """Compares a part of the layers at every inv_freq-th step, and so all layers within at most 16 of these steps."""

    def __init__(self, worker: Worker, group: Group, layers: Sequence[Layer]) -> None:
        self._worker = worker
        self._group = group
        self._layers = layers
        self._turns = min(_MOST_TURNS, len(layers))

    def check(self, step: int, failed: bool) -> None:
        """Compares factors. Call it at the end of each step, on every rank, also on one that failed in the step.

        Raises:
            DataLossError: On every rank, if a layer's factors are not equal on all ranks.
            AbortedError: Another rank has failed.
        """
        turn, rest = divmod(step, self._worker.spec.inv_freq)
        if rest != 0:
            return
        places = range(turn % self._turns, len(self._layers), self._turns)
        # 62 bits, because range_of takes the maximum of each value and of its negative.
        own = [0 if failed else self._worker.factors_checksum(place) >> 2 for place in places]
        least, most = self._group.range_of([int(failed), *own])
        if failed:
            return
        if most[0]:
            raise AbortedError(f"step {step}: another rank has failed", "ABORTED", "UNSPECIFIED",
                               "Its own exception says why; all ranks go back to one checkpoint")
        for place, one, other in zip(places, least[1:], most[1:]):
            if one != other:
                raise DataLossError(
                    f"layer {self._layers[place].name}: step {step}: the ranks' factors are no longer the same, bit for bit",
                    "DATA_LOSS", "UNSPECIFIED",
                    "Their weights may have parted since a checkpoint of up to "
                    f"{self._turns * self._worker.spec.inv_freq} steps ago: begin all ranks again from an earlier one. Ranks on "
                    "several kinds of processors, or with several releases of OpenBLAS, round otherwise: exchange DELEGATE is "
                    "for them")
