# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a Preconditioner: its parameter groups, a hook that calls the preconditioner before its step, and warnings of
steps that train badly."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
from torch import nn
from torch.optim.adamw import adamw

from .._errors import InvalidArgumentError, check_number, invalid
from ._hooks import is_tracing
from ._layers import has_gradient
from ._sharded import local, settle

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FUSED_ON = ("cuda",)
# Attributes by which wrappers hold an optimizer: of accelerate, DeepSpeed and Lightning, of torch, of SAM and Lookahead.
_WRAPPED = ("optimizer", "optim", "base_optimizer")


class BaseOptimizer(torch.optim.Optimizer):
    """torch's AdamW; in groups with plain=True w <- (1 - lr weight_decay) w - lr grad, for layers whose answers are whole
    updates.

    weight_decay is 0.01 for groups that give none. A group's lr_scale multiplies its lr, also if a scheduler sets it. A few
    kernels of torch update a whole group. Preconditioner.make_optimizer makes one with the groups of a model.

    Raises:
        InvalidArgumentError: An option is no number, or is out of range.
    """

    _before_update: Optional[Callable[[], None]] = None  # these are not part of copies
    is_scaled = False  # whether a GradScaler steps it
    of_default = False  # its groups are those of the default's methods

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01) -> None:
        for what, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_number(what, value, 0.0, math.inf)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise invalid("betas", "two numbers", betas)
        for place, beta in enumerate(betas):
            check_number(f"betas[{place}]", beta, 0.0, 1.0)
        # With `fused`, load_state_dict moves the steps to the devices of their parameters.
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, plain=False, lr_scale=1.0, fused=True))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        self.is_scaled = True  # GradScaler.step asks before it unscales
        return False

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Returns the result of `closure`, if one is given.

        Raises:
            InvalidArgumentError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._before_update is not None and not is_tracing():
            self._before_update()
        trained_by_group = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        sparse = next((p for trained in trained_by_group for p in trained if p.grad.layout != torch.strided), None)
        if sparse is not None:
            raise InvalidArgumentError(
                f"optimizer.step(): expected dense gradients, got a {sparse.grad.layout} one of a parameter {list(sparse.shape)}",
                "INVALID_ARGUMENT", "UNSPECIFIED", "Use sparse=False, or give the parameter an optimizer such as SparseAdam")
        for group, trained in zip(self.param_groups, trained_by_group):
            if not trained:
                continue
            settle(trained)
            rate, decay = float(group["lr"]) * group["lr_scale"], group["weight_decay"]
            if group["plain"]:
                weights = [local(p) for p in trained]
                factor = 1 - rate * decay
                # On a CPU torch multiplies by a tensor several times as fast as by a number, and with equal results in f32.
                if factor != 1.0:
                    fast = all(one.is_cpu and one.dtype == torch.float32 for one in weights)
                    torch._foreach_mul_(weights, torch.tensor(factor, dtype=torch.float32, device="cpu") if fast else factor)
                torch._foreach_add_(weights, [local(p.grad) for p in trained], alpha=-rate)
                for p in trained:
                    if p not in self.state:  # torch.distributed.checkpoint refuses some parameters with state and some without
                        self.state[p]["plain"] = torch.zeros((), dtype=torch.float32, device=p.device)
                continue
            rows = [self._row_of(p) for p in trained]
            for fused in (True, False):
                chosen = [row for row in rows if _can_fuse(row) == fused]
                if chosen:
                    weights, grads, means, squares, steps = map(list, zip(*chosen))
                    # capturable: a step on a GPU is not waited for.
                    adamw(weights, grads, means, squares, [], steps, fused=fused, foreach=not fused,
                          capturable=not fused and all(one.is_cuda for one in steps), lr=rate, beta1=group["betas"][0],
                          beta2=group["betas"][1], eps=group["eps"], weight_decay=decay, amsgrad=False, maximize=False,
                          has_complex=any(one.is_complex() for one in weights))
        return loss

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state of this class or of torch's AdamW. Groups stay plain or not, as they are.

        Raises:
            InvalidArgumentError: The state is of other methods: other groups are plain.
        """
        own, saved = self.param_groups, state_dict["param_groups"]
        for place, (group, other) in enumerate(zip(own, saved)):
            if other.get("plain", group["plain"]) != group["plain"]:
                raise InvalidArgumentError(
                    f"optimizer.load_state_dict(): group {place}: expected plain={group['plain']}, got {other['plain']}: the state is of "
                    "other methods, whose answers are not like these", "INVALID_ARGUMENT", "UNSPECIFIED",
                    "Load the model alone, or give the Preconditioner the methods of the saved run")
        kept = [{name: group[name] for name in ("plain", "lr_scale")} for group in own]
        super().load_state_dict(state_dict)
        for group, fields in zip(self.param_groups, kept):  # torch takes the saved groups, and AdamW's have neither
            for name, value in fields.items():
                group.setdefault(name, value)

    def expect_preconditioner(self) -> None:
        """Makes the next step warn if no Preconditioner watches it. A step with zeros, which only makes the state, does not."""
        self._before_update = self._warn_if_alone

    def _warn_if_alone(self) -> None:
        if any(bool(local(p.grad).any()) for group in self.param_groups if group["plain"] for p in group["params"] if p.grad is not None):
            self._before_update = None
            warnings.warn("optimizer.step(): no Preconditioner was given this optimizer of make_optimizer. Without one its layers have plain "
                          "gradient descent: make one with optimizer=, or give the trainer the PrecondorCallback")

    def _row_of(self, p: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns this rank's part of the parameter, of its gradient and of its moments, and its step."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return local(p), local(p.grad), *(local(state[moment]) for moment in _MOMENTS), state["step"]


def _can_fuse(row: Sequence[torch.Tensor]) -> bool:
    """Returns whether torch's fused kernels take the tensors. They look at no strides. On a CPU their rounding depends on an
    element's place, so that a part of a tensor would not get what the whole one does."""
    return all(one.is_contiguous() and one.is_floating_point() and one.device.type in _FUSED_ON for one in row)


class StepWatch:
    """Warns of steps that train badly, once of each kind: steps of the preconditioner and of optimizers that do not alternate,
    answers that were changed before the optimizer's step, frozen weights that are trained, gradients that are not finite, and
    calls without statistics.

    Attributes:
        ended: The preconditioner is closed, and makes no more steps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], frozen: Mapping[str, nn.Parameter], other_frozen: Mapping[str, nn.Parameter],
                 held: contextlib.ExitStack) -> None:
        """`held` ends the watch when it is closed."""
        self._parameters = parameters  # of the layers
        self._frozen = frozen  # matrices that would be layers, when layers were chosen, by name
        self._other_frozen = other_frozen  # what else was frozen then
        self._left_out: Dict[str, nn.Parameter] = {}  # of this, what a watched optimizer does not train
        self._given: Set[Union[str, int]] = set()  # kinds, and indexes of layers
        self._steps = 0  # of the preconditioner
        self._lacks_gradients = self._lacks_steps = False  # warned of
        self._sees_updates = False  # whether an optimizer's step was ever seen: compiled ones are not
        self._awaits_update = False  # whether one has to come before the preconditioner's next step
        self._updates: List[nn.Parameter] = []  # that a watched optimizer trains by whole updates
        self._answer: Optional[Tuple[nn.Parameter, int]] = None  # one of these, and the version of its gradient, the answer
        self._norm: Optional[torch.Tensor] = None  # of this answer, if a GradScaler may unscale it
        self._is_scaled: Callable[[], bool] = lambda: False  # whether one may step the watched optimizer: asked until it is known
        self._held = held
        self.ended = False
        held.callback(setattr, self, "ended", True)

    def before_step(self, lacks_statistics: bool) -> None:
        """Called at the beginning of Preconditioner.step(). lacks_statistics: the step takes some, and had calls that give none."""
        self._steps += 1
        if self._awaits_update:
            self.once("update", "Preconditioner: step() follows a step() without an optimizer.step() between, so that it preconditions "
                                "answers again. With micro-batches call it once, after the last one's backward pass")
        if lacks_statistics:
            self.once("functional", "Preconditioner: calls under torch.func (grad, vmap and the like), and with other weights than the "
                                    "module's own (functional_call), give no statistics. Gradients of layers without other calls stay as "
                                    "they are")
        if not self._lacks_gradients and any(one.requires_grad for one in self._parameters) and \
                not any(has_gradient(one) for one in self._parameters):
            self._lacks_gradients = True
            _warn_of_order("Preconditioner: step() finds no layer with a gradient")
        thawed = [name for name, parameter in self._frozen.items() if has_gradient(parameter)]
        if thawed:
            self.once("thawed", f"Preconditioner: weights that were frozen when it was made are trained, but are no layers: "
                                f"{', '.join(thawed[:3])}. Make it and its optimizer anew after requires_grad has been set")
        left = [name for name, parameter in self._left_out.items() if has_gradient(parameter)]
        if left:
            self.once("left", f"Preconditioner: parameters that were frozen when its optimizer was made have gradients, and are in no group: "
                              f"{', '.join(left[:3])}. Make the optimizer anew after requires_grad has been set")

    def after_step(self, skipped: bool, scaler: Optional[Any]) -> None:
        """Called at the end of Preconditioner.step(scaler=scaler). The optimizer need not step if it was skipped."""
        self._awaits_update = self._sees_updates and not skipped
        # Clipping changes all gradients, even by a factor of 1. Views count the changes of all that they share with.
        self._answer = next(((one, local(one.grad)._version) for one in self._updates
                             if has_gradient(one) and not local(one.grad)._is_view()), None)
        # GradScaler leaves the version as it is.
        self._norm = local(self._answer[0].grad).norm() if self._answer is not None and scaler is None and self._is_scaled() else None

    def on_update(self) -> None:
        """Called in an optimizer's step."""
        self._sees_updates, self._awaits_update = True, False
        (parameter, version), self._answer = self._answer or (None, 0), None
        norm, self._norm = self._norm, None
        if parameter is not None and has_gradient(parameter) and local(parameter.grad)._version != version:
            self.once("changed", "optimizer.step(): gradients were changed since Preconditioner.step(), as clip_grad_norm_ does. They are "
                                 "whole updates, with norms in the hundreds, which clipping shrinks to almost nothing. Clip before "
                                 "Preconditioner.step()")
        elif norm is not None and has_gradient(parameter):
            self._is_scaled = lambda: False  # one look, for which a GPU is waited for, is enough
            if not torch.allclose(local(parameter.grad).norm(), norm, rtol=1e-3, atol=0):
                self.once("scaled", "GradScaler.step(): it divides the answers by the loss scale, because Preconditioner.step() has no "
                                    "scaler. Call step(loss, scaler=scaler)")

    def has_given(self, kind: Union[str, int]) -> bool:
        return kind in self._given

    def once(self, kind: Union[str, int], text: str) -> None:
        """Gives the first warning of a kind, or of a layer, by its index."""
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(text)

    def watch(self, optimizer: BaseOptimizer) -> None:
        """Watches the optimizer's steps. One without gradients, or with zeros, which only makes its state, may be alone."""
        self._updates = [one for group in optimizer.param_groups if group["plain"] for one in group["params"]]
        own = parameters_of(optimizer)
        self._left_out = {name: parameter for name, parameter in self._other_frozen.items() if parameter not in own}
        weak = weakref.ref(optimizer)  # `held` keeps this object, and the optimizer may keep the preconditioner
        self._is_scaled = lambda: getattr(weak(), "is_scaled", False)
        seen = 0

        def before_update() -> None:
            nonlocal seen
            self.on_update()
            alone, seen = seen == self._steps and not self.ended, self._steps
            if alone and not self._lacks_steps and any(has_gradient(one) and bool(local(one.grad).any()) for one in self._parameters):
                self._lacks_steps = True
                _warn_of_order("optimizer.step(): no Preconditioner.step() since the one before: gradients are not preconditioned")

        optimizer._before_update = before_update

    def follow(self, optimizer: Any) -> None:
        """Watches a BaseOptimizer, and follows the steps of one of another kind, if it has torch's hooks."""
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, BaseOptimizer):
            self.watch(optimizer)
        elif hasattr(optimizer, "_optimizer_step_post_hooks"):
            self._held.callback(optimizer.register_step_post_hook(lambda *unused: self.on_update()).remove)


def _warn_of_order(what: str) -> None:
    warnings.warn(f"{what}. The order of a step is loss.backward(), Preconditioner.step(loss), optimizer.step()")


def groups_of(model: nn.Module, whole_updates: Set[nn.Parameter], weight_decay: float,
              scales: Mapping[nn.Parameter, float]) -> List[Dict[str, Any]]:
    """Returns groups of the trainable parameters. Matrices have weight decay; biases and other vectors have none.

    Args:
        model: The model.
        whole_updates: Parameters of layers whose answers are whole updates.
        weight_decay: For matrices.
        scales: lr_scale of parameters that are not in `whole_updates`, if it is not 1.
    """
    groups: Dict[Tuple[bool, bool, float], Dict[str, Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            plain, decays = parameter in whole_updates, parameter.dim() > 1
            scale = 1.0 if plain else scales.get(parameter, 1.0)
            group = groups.setdefault((plain, decays, scale), {"params": [], "weight_decay": decays * weight_decay, "plain": plain,
                                                               "lr_scale": scale})
            group["params"].append(parameter)
    return list(groups.values())


def check_optimizer(what: str, optimizer: Any) -> None:
    """Raises InvalidArgumentError if the argument is no optimizer, and nothing that stands for one."""
    if isinstance(optimizer, type) or not isinstance(getattr(optimizer, "param_groups", None), (list, tuple)):
        raise invalid(what, "a torch.optim.Optimizer", optimizer)


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside wrappers, such as accelerate's, that trains all their parameters; or the argument."""
    for name in _WRAPPED:
        inner = getattr(optimizer, name, None)
        if inner is not optimizer and hasattr(inner, "param_groups") and parameters_of(inner) >= parameters_of(optimizer):
            return unwrapped(inner)
    return optimizer


def parameters_of(optimizer: Any) -> Set[nn.Parameter]:
    """Returns the parameters that the optimizer trains."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a step, with zeros as gradients and a rate of 0, is that of torch.distributed.checkpoint, which makes the
    state of an optimizer that has none."""
    return not optimizer.state and all(float(group.get("lr", 0.0)) == 0.0 for group in optimizer.param_groups) and \
        not any(bool(local(one.grad).any()) for one in parameters_of(optimizer) if one.grad is not None)


# Handles of optimizers that are attached. An optimizer has one: a notebook's cell that runs again attaches it anew.
_attached: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = weakref.WeakKeyDictionary()


def attach(optimizer: Any, parameters: Sequence[nn.Parameter], step: Callable[[Any], None]) -> Any:
    """Makes optimizer.step() call step(loss) first, or after its closure if it has one, in the place of what an earlier call has
    attached. Returns a handle with remove().

    The loss is the result of the closure, or None. The optimizer, or the one inside its wrapper, must train all of
    `parameters`.

    Raises:
        InvalidArgumentError: No optimizer, LBFGS, one that does not train every layer, or a wrapper that has a GradScaler, or
            whose optimizer is not to be found.
    """
    check_optimizer("attach", optimizer)
    if getattr(getattr(optimizer, "scaler", None), "is_enabled", lambda: False)():
        raise InvalidArgumentError("attach: the optimizer's wrapper has a GradScaler, whose scale the statistics would have",
                                   "INVALID_ARGUMENT", "UNSPECIFIED", "Call step(loss, scaler=...) before its step")
    optimizer = unwrapped(optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidArgumentError(f"attach: expected a torch.optim.Optimizer, got a {type(optimizer).__name__} without its step hooks",
                                   "INVALID_ARGUMENT", "UNSPECIFIED", "Attach the optimizer inside; or call step() before its step()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("attach: LBFGS makes several backward passes a step; expected one", "INVALID_ARGUMENT")
    if not parameters_of(optimizer).issuperset(parameters):
        raise InvalidArgumentError("attach: expected an optimizer that trains every layer", "INVALID_ARGUMENT", "UNSPECIFIED",
                                   "Leave out layers that it does not train: skip=; or call step() yourself")

    def before(unused: Any, arguments: Tuple[Any, ...], options: Dict[str, Any]) -> Optional[Tuple[Any, Dict[str, Any]]]:
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            if not _only_makes_state(optimizer):
                step(None)
            return None

        def both() -> Any:
            loss = closure()
            step(loss)
            return loss

        return arguments[:1], {**options, "closure": both}

    earlier = _attached.pop(optimizer, None)
    if earlier is not None:
        earlier.remove()
    _attached[optimizer] = handle = optimizer.register_step_pre_hook(before)
    return handle
