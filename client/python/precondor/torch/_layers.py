# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are layers of a session, and how their rows and gradients become matrices."""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from .._session import Layer, LayerMethod, Method

# (rows of the input, without the 1 of a bias; rows of the output's gradient), both [n, d]; of one group.
Rows = Tuple[torch.Tensor, torch.Tensor]


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether the last backward pass reached it; one frozen since then may still have an old one."""
    return parameter.requires_grad and parameter.grad is not None


class Matrix:
    """A module's weight, with its bias where that is folded in, as one layer; of a convolution with groups, as many.

    d_out, d_in: of a layer. kernel: the dimensions of the weight behind its first two.
    """

    def __init__(self, name: str, weight: nn.Parameter, bias: Optional[nn.Parameter], groups: int = 1) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.groups = groups
        self.d_out = weight.shape[0] // groups
        self.d_in = weight[0].numel() + (bias is not None)

    def layers(self) -> List[Layer]:
        shape = tuple(self.weight.shape[1:])
        dims = () if self.bias is not None or len(shape) == 1 else (self.d_out, *shape)
        names = [self.name] if self.groups == 1 else [f"{self.name}.group{group}" for group in range(self.groups)]
        return [Layer(name, self.d_out, self.d_in, self.bias is not None, dims) for name in names]

    def parameters(self) -> List[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def rows(self, x: torch.Tensor, grad: torch.Tensor) -> Iterator[Rows]:
        """Of each group; x: what the module got; grad: the gradient of what it gave."""
        yield x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])

    def samples(self, grad: torch.Tensor) -> int:
        """Over which the loss is a mean: every row is one."""
        return grad[..., 0].numel()

    def has_gradient(self) -> bool:
        return has_gradient(self.weight)

    def in_place(self, group: int) -> Optional[torch.Tensor]:
        """The gradient's own memory [d_out, d_in], where it can be sent from and written to as it is."""
        grad = self.weight.grad
        if self.bias is not None or grad.device.type != "cpu" or grad.dtype != torch.float32 or not grad.is_contiguous():
            return None
        return grad.detach()[self._rows_of(group)].view(self.d_out, self.d_in)

    def load(self, group: int, out: torch.Tensor) -> None:
        """The gradient to f32 out [d_out, d_in]."""
        part = self._rows_of(group)
        columns = self.d_in - (self.bias is not None)
        out[:, :columns].copy_(self.weight.grad[part].reshape(self.d_out, columns), non_blocking=True)
        if self.bias is not None:
            out[:, -1] = self.bias.grad[part] if has_gradient(self.bias) else 0

    def store(self, group: int, value: torch.Tensor) -> None:
        """[d_out, d_in] to where the gradient came from."""
        part = self._rows_of(group)
        grad = self.weight.grad
        columns = self.d_in - (self.bias is not None)
        grad[part].copy_(value[:, :columns].reshape(grad[part].shape), non_blocking=True)
        if self.bias is not None and has_gradient(self.bias):
            self.bias.grad[part].copy_(value[:, -1], non_blocking=True)

    def _rows_of(self, group: int) -> slice:
        return slice(group * self.d_out, (group + 1) * self.d_out)


class Convolution(Matrix):
    """Conv1d and Conv2d: a row is a patch, as in precondor/convolution.h, whose layout is torch's unfold."""

    def __init__(self, name: str, module: nn.Module, bias: Optional[nn.Parameter]) -> None:
        super().__init__(name, module.weight, bias, module.groups)
        self._module = module
        self._axes = len(module.kernel_size)

    def rows(self, x: torch.Tensor, grad: torch.Tensor) -> Iterator[Rows]:
        module = self._module
        if grad.dim() == self._axes + 1:  # without a batch dimension
            x, grad = x[None], grad[None]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = nn.functional.pad(x.to(torch.float32), module._reversed_padding_repeated_twice, mode=mode)
        if self._axes == 1:
            x, grad = x[:, :, None], grad[:, :, None]
        along = [(1, *value)[-2:] for value in (module.kernel_size, module.dilation, module.stride)]
        patches = nn.functional.unfold(x, along[0], dilation=along[1], stride=along[2])  # [batch, columns, places]
        patches = patches.transpose(1, 2).reshape(-1, patches.shape[1])
        grad = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])
        yield from zip(patches.chunk(self.groups, 1), grad.chunk(self.groups, 1))

    def samples(self, grad: torch.Tensor) -> int:
        return grad.shape[0] if grad.dim() == self._axes + 2 else 1


@dataclasses.dataclass
class Chosen:
    """The modules whose output is watched, with their matrices; why each other parameter is left to the optimizer."""

    matrices: Dict[nn.Module, Matrix]
    left: Dict[str, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """skip: regular expressions of whole module names; skip_types: classes; of a layer's longer side."""

    skip: Sequence[str]
    skip_types: Sequence[Type[nn.Module]]
    min_dim: int
    max_dim: int
    fold_bias: bool

    def __post_init__(self) -> None:
        for pattern in self.skip:
            compile_pattern("skip", pattern)

    def reason_to_leave(self, name: str, module: nn.Module) -> str:
        if any(re.fullmatch(pattern, name) for pattern in self.skip):
            return "skip"
        if isinstance(module, tuple(self.skip_types)):
            return "skip_types"
        if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            return f"a parameter of {type(module).__name__}"
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is made from other parameters"
        if not weight.requires_grad:
            return "frozen"
        return ""

    def reason_of_size(self, matrix: Matrix) -> str:
        sides = sorted((matrix.d_out, matrix.d_in))
        if sides[0] < 2:
            return "a side of 1"
        if not self.min_dim <= sides[1] <= self.max_dim:
            return f"its longer side of {sides[1]} is not in [{self.min_dim}, {self.max_dim}]"
        return ""


def compile_pattern(what: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidArgumentError(f"{what}: expected a regular expression, got {pattern!r}: {error}",
                                   "INVALID_ARGUMENT") from None


def refuse_sharded(model: nn.Module) -> None:
    """UnimplementedError for models whose parameters are not whole on every rank, or whose modules are not called."""
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in ("FullyShardedDataParallel", "FSDPModule", "DataParallel", "OptimizedModule"):
                raise UnimplementedError(
                    f"model{'.' + name if name else ''} is a {base.__name__}", "UNIMPLEMENTED", "UNSPECIFIED",
                    "Preconditioner takes a plain model or DistributedDataParallel, where every rank has all of every "
                    "weight and Python calls every module; docs/pytorch.md says what works with what")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "FlatParameter") or hasattr(parameter, "device_mesh"):
            raise UnimplementedError(
                f"parameter {name} is a sharded {type(parameter).__name__}", "UNIMPLEMENTED", "UNSPECIFIED",
                "FSDP and tensor parallelism are not supported: every rank needs all of every weight")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgumentError(f"parameter {name} has no shape yet: run the model once before",
                                       "INVALID_ARGUMENT")


def choose(model: nn.Module, choice: Choice) -> Chosen:
    """The layers of a model, in the order of its modules."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    uses: Dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    matrices: Dict[nn.Module, Matrix] = {}
    left: Dict[str, str] = {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not own:
            continue
        reason = choice.reason_to_leave(name, module)
        matrix = None
        if not reason and uses[id(module.weight)] > 1:
            reason = "tied: several modules have it"
        if not reason:
            bias = module.bias if choice.fold_bias else None
            if bias is not None and (not bias.requires_grad or uses[id(bias)] > 1):
                bias = None
            kind = Matrix if isinstance(module, nn.Linear) else Convolution
            source = module.weight if kind is Matrix else module
            matrix = kind(name or type(module).__name__, source, bias)
            reason = choice.reason_of_size(matrix)
        if reason:
            left.update({names[id(parameter)]: reason for parameter in own})
            continue
        matrices[module] = matrix
        for parameter in own:
            if all(parameter is not one for one in matrix.parameters()):
                left[names[id(parameter)]] = "a bias that is not folded in"
    return Chosen(matrices, left)


def exceptions(layers: Sequence[Layer], methods: Mapping[str, Union[Method, str]], statistics: str) -> Tuple[LayerMethod, ...]:
    """SessionSpec.layer_methods for the first pattern that matches the whole of a layer's name."""
    places: Dict[str, List[int]] = {pattern: [] for pattern in methods}
    for place, layer in enumerate(layers):
        for pattern in methods:
            if compile_pattern("layer_methods", pattern).fullmatch(layer.name):
                places[pattern].append(place)
                break
    return tuple(
        LayerMethod(as_method(methods[pattern]), tuple(found), statistics_of(as_method(methods[pattern]), statistics))
        for pattern, found in places.items() if found)


def as_method(method: Union[Method, str]) -> Method:
    return Method(method) if isinstance(method, str) else method


def statistics_of(method: Method, statistics: str) -> str:
    """What the method wants where the user says nothing."""
    return statistics or ("MEAN" if method.name == "eva" else "SIGNED")
