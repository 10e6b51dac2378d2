# SPDX-License-Identifier: Apache-2.0
"""Chooses which parameters of a model are layers of a session, and converts their rows and gradients to matrices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
from torch import nn

from .._errors import FailedPreconditionError, InvalidArgumentError, UnimplementedError
from .._session import Layer, LayerMethod, Method, as_method, by_pattern, compile_pattern, expect_whole_updates
from .._options import Selection

# (rows of the input without the 1 of a bias, rows of the output's gradient), both [n, d], of one group.
Rows = Tuple[torch.Tensor, torch.Tensor]

# Kinds of weights, by which _recipe.TABLE chooses how they are trained.
HIDDEN, END, CONVOLUTION = "hidden linear layer", "linear layer at an end", "convolution"
# Hidden too: of one of the two alone; with so few outputs that a factor of the inputs costs more than all else, or an expert's own.
SCORES, NARROW = "queries or keys", "linear layer of an expert or of few outputs"
# These are layers by their gradients alone, or the optimizer trains them.
EXPERT, GATE, TIED = "stack of experts", "gates of a recurrent module", "embedding that another module shares"
WORDS, NORMED, TABLE = "embedding of words", "embedding before a norm", "embedding"
# Its class is neither torch's nor registered.
UNKNOWN = "matrix of an unknown module"
# Parameters that parameter_methods makes layers, and those of no kind.
NAMED, OTHER = "parameter_methods", "other"


def has_gradient(parameter: nn.Parameter) -> bool:
    """Returns whether the parameter has a gradient. A frozen parameter may still have an old one, which does not
    count."""
    return parameter.requires_grad and parameter.grad is not None


class Matrix:
    """A module's weight, with its bias if that is folded in, as one layer, or as one layer for each of `groups`: the groups of a
    convolution, the gates of a recurrent module, or blocks of outputs.

    Attributes:
        d_out, d_in: Sides of one layer, of the largest block.
        sizes: d_out of each group.
        axis: Dimension of the weight along which the groups lie. A bias has no other.
        seen: Columns of the inputs and of the outputs in this rank's calls of a linear layer, if they are not all.
        has_lookups: The rows are those of an embedding or an expert: a step changes only rows that have a gradient.
        kind: One of the kinds above.
        method: A method that needs gradients alone; None: its module's calls are observed.
    """

    axis = 0
    has_lookups = False
    kind = HIDDEN
    method: Optional[Method] = None
    seen: Optional[Tuple[int, int]] = None

    def __init__(self, name: str, weight: nn.Parameter, bias: Optional[nn.Parameter], groups: int = 1) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.d_out = weight.shape[0] // groups
        self.sizes: Sequence[int] = [self.d_out] * groups
        self.d_in = weight.shape[1:].numel() + (bias is not None)

    @property
    def groups(self) -> int:
        return len(self.sizes)

    def divide(self, blocks: Union[int, Sequence[int]]) -> None:
        """Makes each block of outputs a layer. There are `blocks` equal ones, or one of each size. Raises InvalidArgumentError unless
        they are the outputs of a matrix."""
        if blocks == self.groups == 1:
            return
        outputs = self.weight.shape[self.axis]
        sizes = list(blocks) if isinstance(blocks, (list, tuple)) else [outputs // blocks] * int(blocks)
        if type(self) not in (Matrix, Transposed) or self.weight.dim() != 2 or sum(sizes) != outputs or min(sizes) < 2:
            raise InvalidArgumentError(
                f"selection.blocks: layer {self.name}: expected sizes of at least 2 with the sum {outputs}, or how many equal ones, of a "
                f"matrix, got {blocks} of {list(self.weight.shape)}", "INVALID_ARGUMENT")
        self.sizes, self.d_out = sizes, max(sizes)

    def range_of(self, group: int, length: int) -> Tuple[int, int]:
        """Returns the first index of a group, and the number of its indices, along an axis of this length."""
        whole = sum(self.sizes)
        return length * sum(self.sizes[:group]) // whole, length * self.sizes[group] // whole

    def layers(self) -> List[Layer]:
        shape = tuple(self.weight.shape[1:])
        dims = () if self.bias is not None or len(shape) == 1 else (self.d_out, *shape)
        names = [self.name] if self.groups == 1 else [f"{self.name}.group{group}" for group in range(self.groups)]
        return [Layer(name, d_out, self.d_in, self.bias is not None, dims) for name, d_out in zip(names, self.sizes)]

    def parameters(self) -> List[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def rows(self, x: torch.Tensor, grad: torch.Tensor) -> Iterator[Rows]:
        """Yields the rows of each group from the module's input `x` and the gradient `grad` of its output. Yields
        nothing if their shapes are not those of a product with the weight."""
        inputs, outputs = self.seen or (self.d_in - (self.bias is not None), sum(self.sizes))
        if x.shape == (*grad.shape[:-1], inputs) and grad.shape[-1] == outputs:
            sizes = outputs if self.groups == 1 else self.sizes  # blocks have equal inputs
            for part in grad.reshape(-1, outputs).split(sizes, 1):
                yield x.reshape(-1, inputs), part

    def samples(self, grad: torch.Tensor) -> int:
        """Returns the number of samples over which the loss is a mean: every row is one."""
        return grad[..., 0].numel()

    def has_gradient(self) -> bool:
        return has_gradient(self.weight)

    def in_place(self, group: int) -> Optional[torch.Tensor]:
        """Returns the gradient's own memory as [d_out, d_in], if it has the layout of an answer; otherwise None."""
        grad = self.weight.grad
        if self.bias is not None or grad.dtype != torch.float32 or not grad.is_contiguous():
            return None
        return self._of_group(grad.detach(), group).view(-1, self.d_in)

    def split(self, matrix: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Returns the parts of matrix [d_out, d_in]: the weight's, in the weight's shape, and the bias'."""
        columns = self.d_in - (self.bias is not None)
        weight = matrix[:, :columns].view(-1, *self.weight.shape[1:])
        return weight, None if self.bias is None else matrix[:, -1]

    def pairs(self, group: int, parts: Tuple[torch.Tensor, Optional[torch.Tensor]]) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """Returns the gradients of weight and bias, if it has one, each with its part from split()."""
        weight, bias = parts
        pairs = [(self._of_group(self.weight.grad, group), weight)]
        if bias is not None and has_gradient(self.bias):
            pairs.append((self._of_group(self.bias.grad, group), bias))
        return pairs

    def clear(self, parts: Tuple[torch.Tensor, Optional[torch.Tensor]]) -> None:
        """Sets the part of a bias without a gradient to zeros."""
        if parts[1] is not None and not has_gradient(self.bias):
            parts[1].zero_()

    def _of_group(self, grad: torch.Tensor, group: int) -> torch.Tensor:
        if len(self.sizes) == 1:
            return grad
        axis = min(self.axis, grad.dim() - 1)
        return grad.narrow(axis, *self.range_of(group, grad.shape[axis]))


class Transposed(Matrix):
    """A weight [d_in, d_out], or [d_in, d_out / kernel, kernel], by which rows are multiplied: x weight."""

    axis = 1

    def __init__(self, name: str, weight: nn.Parameter, bias: Optional[nn.Parameter], groups: int = 1) -> None:
        super().__init__(name, weight, bias, groups)
        self.d_out = weight.shape[1:].numel()
        self.sizes = [self.d_out] * groups
        self.d_in = weight.shape[0] // groups + (bias is not None)

    def layers(self) -> List[Layer]:
        dims = () if self.weight.dim() == 2 else (*self.weight.shape[1:], self.d_in)
        return [dataclasses.replace(layer, shape=dims) for layer in super().layers()]

    def in_place(self, group: int) -> Optional[torch.Tensor]:
        return None

    def split(self, matrix: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        columns = self.d_in - (self.bias is not None)
        weight = matrix[:, :columns].T.unflatten(1, (-1, *self.weight.shape[2:]))
        return weight, None if self.bias is None else matrix[:, -1]


class Experts(Matrix):
    """A weight [experts, d_out, d_in], or with the last two sides exchanged: one layer for each expert.

    An expert without a row in a step has no gradient in that step, and stays as it is.
    """

    has_lookups = True

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        super().__init__(name, weight, None, weight.shape[0])
        self.d_out, self.d_in = weight.shape[1:]
        self.sizes = [self.d_out] * self.groups

    def layers(self) -> List[Layer]:
        return [Layer(f"{self.name}.expert{expert}", self.d_out, self.d_in) for expert in range(self.groups)]

    def split(self, matrix: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        return matrix[None], None


def _patches(x: torch.Tensor, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Returns one row of x [batch, channels, ...] for each position of the kernel, in the order of positions. Columns
    are in the order of a weight's row."""
    if len(kernel) < 3:
        if len(kernel) == 1:
            x = x[:, :, None]
        kernel, dilation, stride = ((1, *value)[-2:] for value in (kernel, dilation, stride))
        patches = nn.functional.unfold(x, kernel, dilation=dilation, stride=stride)  # [batch, columns, places]
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])
    for axis, (k, d, s) in enumerate(zip(kernel, dilation, stride), 2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    axes = range(2, 2 + len(kernel))
    patches = x.permute(0, *axes, 1, *(axis + len(kernel) for axis in axes))
    return patches.reshape(-1, patches.shape[1 + len(kernel):].numel())


def _pixels(x: torch.Tensor) -> torch.Tensor:
    """Returns one row of x [batch, channels, ...] for each position."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


class Convolution(Matrix):
    """Conv1d, Conv2d and Conv3d. A row is a patch, with the layout of torch's unfold."""

    def __init__(self, name: str, module: nn.Module, bias: Optional[nn.Parameter]) -> None:
        super().__init__(name, module.weight, bias, module.groups)
        self._module = module
        self._kernel = tuple(module.weight.shape[2:])
        self._axes = len(self._kernel)

    def rows(self, x: torch.Tensor, grad: torch.Tensor) -> Iterator[Rows]:
        module = self._module
        if grad.dim() == self._axes + 1:  # without a batch dimension
            x, grad = x[None], grad[None]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = nn.functional.pad(x.to(torch.float32), self._padding(), mode=mode)
        dilation, stride = self._along(module.dilation), self._along(module.stride)
        places = [(size - d * (k - 1) - 1) // s + 1 for size, k, d, s in zip(x.shape[2:], self._kernel, dilation, stride)]
        if x.shape[1] != self.weight.shape[1] * self.groups or grad.shape != (len(x), self.weight.shape[0], *places):
            return
        patches = _patches(x, self._kernel, dilation, stride)
        yield from zip(patches.chunk(self.groups, 1), _pixels(grad).chunk(self.groups, 1))

    def _along(self, value: Union[int, Sequence[int]]) -> Tuple[int, ...]:
        return (value,) * self._axes if isinstance(value, int) else tuple(value)

    def _padding(self) -> Sequence[int]:
        """Returns the module's current padding for torch's pad: before and behind the last axis, and so on to the
        first."""
        padding = self._module.padding
        if self._module.padding_mode != "zeros":
            return self._module._reversed_padding_repeated_twice  # the module's forward pass reads only this
        if padding == "same":
            rims = [d * (k - 1) for d, k in zip(self._along(self._module.dilation), self._kernel)]
            return [one for rim in reversed(rims) for one in (rim // 2, rim - rim // 2)]
        return [one for one in reversed(self._along(0 if padding == "valid" else padding)) for _ in range(2)]

    def samples(self, grad: torch.Tensor) -> int:
        return grad.shape[0] if grad.dim() == self._axes + 2 else 1


class TransposedConvolution(Transposed):
    """ConvTranspose1d, 2d and 3d. Rows are the positions of x, and for each the positions of the output's gradient that
    it reaches. The bias is no column of the weight."""

    axis = 0

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module.weight, None, module.groups)
        self._module = module

    def rows(self, x: torch.Tensor, grad: torch.Tensor) -> Iterator[Rows]:
        module, kernel = self._module, self.weight.shape[2:]
        if grad.dim() == self.weight.dim() - 1:  # without a batch dimension
            x, grad = x[None], grad[None]
        if x.dim() != self.weight.dim() or x.shape[1] != self.weight.shape[0] or \
                grad.shape[:2] != (len(x), self.weight.shape[1] * self.groups):
            return
        reach = [(size - 1) * s + d * (k - 1) + 1 for size, k, d, s in zip(x.shape[2:], kernel, module.dilation, module.stride)]
        # Positions beyond `reach` belong to output_padding, and no input reaches them.
        rims = [one for size, p, end in reversed(list(zip(grad.shape[2:], module.padding, reach)))
                for one in (p, end - p - size)]
        patches = _patches(nn.functional.pad(grad.to(torch.float32), rims), kernel, module.dilation, module.stride)
        yield from zip(_pixels(x).chunk(self.groups, 1), patches.chunk(self.groups, 1))

    def samples(self, grad: torch.Tensor) -> int:
        return grad.shape[0] if grad.dim() == self.weight.dim() else 1


@dataclasses.dataclass
class Chosen:
    """The result of choose().

    Attributes:
        matrices: In the session's order, each with the module whose calls are observed; None for an attention's
            projection and for a layer by its gradients alone.
        attentions: Attentions with the matrices that they use.
        others: Reasons why the other parameters are left to the optimizer, by name.
        kinds: Kinds of embeddings, experts and matrices of recurrent modules, layers or not, by parameter.
        frozen: Matrices that are no layers only because they are frozen, by name.
    """

    matrices: List[Tuple[Optional[nn.Module], Matrix]]
    attentions: Dict[nn.MultiheadAttention, List[Matrix]]
    others: Dict[str, str]
    kinds: Dict[nn.Parameter, str] = dataclasses.field(default_factory=dict)
    frozen: Dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)

    def other_frozen(self, model: nn.Module) -> Dict[str, nn.Parameter]:
        """Returns what else is frozen now, by name."""
        return {name: parameter for name, parameter in model.named_parameters()
                if not parameter.requires_grad and plain_name(name) not in self.frozen}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The user's choice of layers.

    Attributes:
        skip: Regular expressions of whole module names.
        selection: The classes, sizes and biases.
        parameter_methods: Methods by regular expressions of whole names of parameters that are no layers.
        by_kind: The recipe's methods by kind of weight. A kind without one is a layer only in a module that is called.
        divides_fused: The recipe's method of hidden layers learns faster if projections that are known as fused are divided.
    """

    skip: Sequence[str]
    selection: Selection
    parameter_methods: Mapping[str, Union[Method, str]] = dataclasses.field(default_factory=dict)
    by_kind: Mapping[str, Method] = dataclasses.field(default_factory=dict)
    divides_fused: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.skip, str):
            raise InvalidArgumentError(f"skip: expected several regular expressions, got the text {self.skip!r}",
                                       "INVALID_ARGUMENT", "UNSPECIFIED", f"Write [{self.skip!r}]")
        for pattern in self.skip:
            compile_pattern("skip", pattern)
        for pattern, method in self.parameter_methods.items():
            compile_pattern("parameter_methods", pattern)
            expect_whole_updates(f"parameter_methods: {pattern!r}", as_method(method, f"parameter_methods: {pattern!r}"))

    def of_module(self, name: str, module: nn.Module, weight: Optional[nn.Parameter]) -> str:
        """Returns why a weight is left to the optimizer, "" if its module gives no reason."""
        if any(re.fullmatch(pattern, name) for pattern in self.skip):
            return "skip"
        if isinstance(module, self.selection.skip_types):
            return "skip_types"
        if weight is None:
            return "its weight is made from other parameters"
        if not weight.is_floating_point():
            return f"of {weight.dtype}"
        return "" if weight.requires_grad else "frozen"

    def divided(self, matrix: Matrix) -> Matrix:
        """Returns the matrix, divided into the user's blocks if there are any for its name."""
        blocks = next((blocks for pattern, blocks in self.selection.blocks.items() if re.fullmatch(pattern, matrix.name)), None)
        if blocks is not None:
            matrix.divide(blocks)
        return matrix

    def of_size(self, matrix: Matrix) -> str:
        """Returns why a matrix is left to the optimizer, "" if its size gives no reason."""
        sides = sorted((matrix.d_out, matrix.d_in))
        if sides[0] < 2:
            return "a side of 1"
        least, most = self.selection.min_dim, self.selection.max_dim
        if not least <= sides[1] <= most:
            return f"its longer side of {sides[1]} is not in [{least}, {most}]"
        return ""


def _refuse_unmatched(model: nn.Module, skip: Sequence[str]) -> None:
    """Raises InvalidArgumentError for a pattern that no module matches which has parameters, or has no modules in it."""
    names = [plain_name(name) for name, module in model.named_modules()
             if module._parameters or next(module.children(), None) is None]
    for pattern in skip:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise InvalidArgumentError(f"skip: no module with parameters of its own has a whole name that {pattern!r} matches; there are "
                                       f"{names}", "INVALID_ARGUMENT", "UNSPECIFIED",
                                       "For the modules inside another, write its name and \\..*")


def plain_name(name: str) -> str:
    """Returns a module's name without the parts that compilation and checkpointing add."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)", "", name).lstrip(".")


# Attributes that wrappers give to parameters in whose place they hold parts, or a flat tensor.
_DIVIDED_BY = {"ds_id": "DeepSpeed's ZeRO-3", "_fsdp_flattened": "FullyShardedDataParallel", "_is_flat_param": "FullyShardedDataParallel"}


def refuse_unknown(model: nn.Module) -> None:
    """Raises UnimplementedError for a model whose modules are not called, or are called with other weights than their
    own, and InvalidArgumentError for a parameter without a shape."""
    found = [(f"model{'.' + name if name else ''} is a {base.__name__}") for name, module in model.named_modules()
             for base in type(module).__mro__ if base.__name__ in ("FullyShardedDataParallel", "DataParallel")]
    found += [f"parameter {name} is divided by {by}" for name, parameter in model.named_parameters()
              for attribute, by in _DIVIDED_BY.items() if hasattr(parameter, attribute)]
    if found:
        raise UnimplementedError(found[0], "UNIMPLEMENTED", "UNSPECIFIED",
                                 "Use fully_shard or DistributedDataParallel (docs/use/limits.md#parallel-training)")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgumentError(f"parameter {name} has no shape yet: run the model once before",
                                       "INVALID_ARGUMENT")


Entries = List[Tuple[Mapping[str, Any], str, Any]]  # of modules' dictionaries, by which a model has its modules and parameters


def check_present(model: nn.Module, matrices: Iterable[Matrix], known: Entries) -> Entries:
    """Raises FailedPreconditionError for a layer with a parameter that the model no longer has. `known` is the result of the last call,
    or is empty: a model with these entries has not changed."""
    if known and all(entries.get(name) is one for entries, name, one in known):
        return known
    found: Entries = []
    seen, modules = {id(model)}, [model]
    while modules:
        module = modules.pop()
        for entries in (module._parameters, module._modules):
            found += [(entries, name, one) for name, one in entries.items()]
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    held = {id(one) for _, _, one in found}
    for matrix in matrices:
        if not held.issuperset(map(id, matrix.parameters())):
            raise FailedPreconditionError(
                f"layer {matrix.name}: a parameter of it is no longer the model's, and has no gradient to precondition",
                "FAILED_PRECONDITION", "UNSPECIFIED",
                "Make Preconditioner after whatever replaces parameters: an assignment to a module, "
                "load_state_dict(assign=True), weight_norm")
    return found


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# In the last part of names of embeddings of something else than words. Numbers behind that part do not count.
_NO_WORDS = re.compile(r"(^|[._]|(?<=[a-z])(?=[A-Z]))(?i:pos(itions?|itional|emb)?|wpe|relative|token_?type|segments?)(?![a-z])"
                       r"[^.]*(\.\d+)*$")
# In the last part of names of linear layers that make queries or keys, and nothing else.
_SCORES = re.compile(r"(^|_)((?P<query>w?q|quer(y|ies))|w?k|keys?)(_?(a|b|proj(ection)?|lin(ear)?|layer|dense|head|global))*$", re.IGNORECASE)
_ADAPTER = re.compile(r"\.lora_[AB]\.[^.]*$")
_MOST_INPUTS_AN_OUTPUT = 4
_MOST_TYPES = 4
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LISTS = (nn.ParameterList, nn.ParameterDict)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# Classes of linear layers, by name and module; the values are those of _registered.
_LINEAR = {("Linear", "torch.nn.modules.linear"): False, ("Linear", "torch_geometric.nn.dense.linear"): False,
           ("Conv1D", "transformers.pytorch_utils"): True}
# Classes that users have registered; the value is True for x weight and False for x weight'.
_registered: Dict[Type[nn.Module], bool] = {}


def register_layer(module_type: Type[nn.Module], *, transposed: bool = False) -> None:
    """Makes layers of modules of a class, and of its subclasses. Call it before you make a Preconditioner.

    nn.Linear, torch's convolutions, transformers' Conv1D and PyTorch Geometric's Linear are layers without it.

    Args:
        module_type: A class whose modules compute x weight' + bias, with `weight` [d_out, d_in]. x, [..., d_in], is
            their first argument. `bias` may be None or missing.
        transposed: The modules compute x weight + bias, with `weight` [d_in, d_out].

    Raises:
        InvalidArgumentError: module_type is no class of modules.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise InvalidArgumentError(f"register_layer: expected a class of modules, got {module_type!r}", "INVALID_ARGUMENT")
    _registered[module_type] = transposed


def _product_of(module: nn.Module) -> Optional[bool]:
    """Returns True if a module computes x weight, False if it computes x weight', and None if it computes something
    else."""
    for base in type(module).__mro__:
        known = _registered.get(base, _LINEAR.get((base.__name__, base.__module__)))
        if known is not None:
            return known
    return None


def _weights_of(module: nn.Module) -> Sequence[Tuple[str, str, str]]:
    """Returns (suffix of the layer's name, weight, bias) for each weight of a module that could be a layer."""
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED_CONVOLUTIONS) or _product_of(module) is not None:
        return [("", "weight", "bias")]
    if not isinstance(module, nn.MultiheadAttention):
        return []
    if module.in_proj_weight is not None:
        return [(".in_proj", "in_proj_weight", "in_proj_bias")]
    return [(f".{one}_proj", f"{one}_proj_weight", "") for one in "qkv"]


def _kinds_of(model: nn.Module) -> Dict[nn.Parameter, Tuple[str, str, nn.Module]]:
    """Returns the weights of embeddings, stacks of experts, recurrent and unknown modules, each with its kind, its module's name and the
    module.

    A stack is a weight [experts, d_out, d_in]. The name or the class of its module, or its own name, must contain "expert". Weights of
    layers of another kind are left out. An embedding is one of words if its name says nothing else, or if it has the width of one, to
    which it is added. Beside tied words there are none: a table of their width is one before a norm or any other.
    """
    named = [(plain_name(name), module) for name, module in model.named_modules()]
    others = {parameter for _, module in named if not isinstance(module, EMBEDDINGS) for parameter in module._parameters.values()}
    tables = [(name, module) for name, module in named if isinstance(module, EMBEDDINGS) and module._parameters.get("weight") is not None]
    shared = {module.weight.shape[1] for _, module in tables if module.weight in others}
    # A table of types says that the model is like BERT.
    has_types = any(module.weight.shape[0] <= _MOST_TYPES and module.weight.shape[1] in shared for _, module in tables)
    normed = {id(table) for module in model.modules()
              if shared and (has_types or _is_of_embeddings_and_norms(module)) for table in module.children()}
    widths = {module.weight.shape[1] for name, module in tables if not shared and not _NO_WORDS.search(name)}
    found: Dict[nn.Parameter, Tuple[str, str, nn.Module]] = {}
    for name, module in named:
        is_other = _weights_of(module) or isinstance(module, nn.Bilinear) or type(module).__module__.startswith("torch.nn.utils.")
        for own, parameter in module._parameters.items():
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and own.startswith("weight_"):
                found[parameter] = GATE, name, module
            elif parameter is not None and parameter.dim() == 3 and parameter.shape[0] > 1 and not is_other and \
                    "expert" in f"{name}.{own} {type(module).__name__}".lower():
                found[parameter] = EXPERT, name, module
            elif parameter is not None and parameter.dim() == 2 and not is_other and (
                    isinstance(module, _LISTS) or not type(module).__module__.startswith("torch.nn.")):
                found[parameter] = UNKNOWN, name, module
    for name, module in tables:
        width = module.weight.shape[1]
        is_normed = width in shared and id(module) in normed
        kind = TIED if module.weight in others else NORMED if is_normed else WORDS if width in widths else TABLE
        found[module.weight] = kind, name, module
    return found


def _is_of_embeddings_and_norms(module: nn.Module) -> bool:
    """Returns whether all parameters of a module are tables of embeddings and vectors, and it has both."""
    others = [parameter for one in module.modules() if not isinstance(one, EMBEDDINGS) for parameter in one._parameters.values()
              if parameter is not None]
    return bool(others) and all(parameter.dim() == 1 for parameter in others)


def _uses(model: nn.Module) -> Dict[int, int]:
    """Returns the number of modules that have each parameter, by its id."""
    uses: Dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _matrix_of(choice: Choice, name: str, module: nn.Module, weight: nn.Parameter, bias: Optional[nn.Parameter],
               uses: Mapping[int, int]) -> Tuple[Optional[Matrix], str]:
    """Returns the matrix, or None and the reason why there is none."""
    if uses[id(weight)] > 1:
        return None, "tied: several modules have it"
    foldable = choice.selection.fold_bias and bias is not None and bias.requires_grad and uses[id(bias)] == 1
    folded = bias if foldable else None
    if isinstance(module, _CONVOLUTIONS):
        matrix: Matrix = Convolution(name, module, folded)
    elif isinstance(module, _TRANSPOSED_CONVOLUTIONS):
        matrix = TransposedConvolution(name, module)
    else:
        matrix = (Transposed if _product_of(module) else Matrix)(name, weight, folded)
    reason = choice.of_size(choice.divided(matrix))
    return (None if reason else matrix), reason


def choose(model: nn.Module, choice: Choice) -> Chosen:
    """Chooses the layers of a model, in the order of its modules."""
    _refuse_unmatched(model, choice.skip)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    uses = _uses(model)
    chosen = Chosen([], {}, {})
    # modules that are not called, with the attention that uses their weights
    users: Dict[nn.Module, nn.MultiheadAttention] = {}
    for name, module in ((plain_name(name), module) for name, module in model.named_modules()):
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        reasons = {id(parameter): f"a parameter of {type(module).__name__}" for parameter in own}
        if isinstance(module, nn.MultiheadAttention):
            users.update({module: module, module.out_proj: module})
        user = users.get(module)
        for suffix, weight_name, bias_name in _weights_of(module):
            weight, bias = (module._parameters.get(one) for one in (weight_name, bias_name))
            matrix, reason = None, choice.of_module(name, user or module, weight)
            if not reason:
                matrix, reason = _matrix_of(choice, (name or type(module).__name__) + suffix, module, weight, bias, uses)
            for parameter in own if weight is None else (weight, bias):
                if parameter is not None:
                    apart = "a bias that is not folded in" if parameter.requires_grad else "frozen"
                    reasons[id(parameter)] = reason or apart
            if matrix is None:
                continue
            for parameter in matrix.parameters():
                del reasons[id(parameter)]
            chosen.matrices.append((module if user is None else None, matrix))
            if user is not None:
                chosen.attentions.setdefault(user, []).append(matrix)
        chosen.others.update({names[id(one)]: reasons[id(one)] for one in own if id(one) in reasons})
    _set_kinds(model, chosen)
    if choice.divides_fused:
        _divide_fused(model, choice, chosen)
    _add_by_gradient(model, choice, chosen)
    there = [matrix.name for _, matrix in chosen.matrices]
    for pattern in choice.selection.blocks:
        if not any(re.fullmatch(pattern, name) for name in there):
            raise InvalidArgumentError(f"selection.blocks: no layer's whole name matches {pattern!r}; there are {there}", "INVALID_ARGUMENT")
    return chosen


def _divide_fused(model: nn.Module, choice: Choice, chosen: Chosen) -> None:
    """Divides projections to queries, keys and values as transformers' Phi-3 has them, unless the user has said how."""
    attentions = {plain_name(name): module for name, module in model.named_modules()}
    for _, matrix in chosen.matrices:
        of, _, own = matrix.name.rpartition(".")
        head, keys = (getattr(attentions.get(of), one, None) for one in ("head_dim", "num_key_value_heads"))
        if own != "qkv_proj" or head is None or keys is None or any(re.fullmatch(one, matrix.name) for one in choice.selection.blocks):
            continue
        sizes = [matrix.d_out - 2 * head * keys, head * keys, head * keys]
        if type(matrix) is Matrix and min(sizes) > 1:
            matrix.divide(sizes)


def _add_by_gradient(model: nn.Module, choice: Choice, chosen: Chosen) -> None:
    """Sets `kinds` and `frozen`. Adds matrices for which `choice` has a method to the layers: by the first match of parameter_methods,
    or by kind."""
    found = _kinds_of(model)
    chosen.kinds = {parameter: kind for parameter, (kind, _, _) in found.items()}
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    unused = set(choice.parameter_methods)
    for name in list(chosen.others):
        parameter = parameters[name]
        pattern = next((one for one in choice.parameter_methods if re.fullmatch(one, name)), None)
        kind, of, module = found.get(parameter, ("", "", None))
        method = choice.by_kind.get(kind) if pattern is None else as_method(choice.parameter_methods[pattern])
        if method is None and kind not in ("", UNKNOWN):
            chosen.others[name] = kind if parameter.requires_grad else "frozen"
        elif method is None and chosen.others[name] == "frozen" and parameter.dim() > 1:  # a module's own
            chosen.frozen[name] = parameter
        if method is None or parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        gates = max(1, parameter.shape[0] // module.hidden_size) if kind == GATE else 1  # each of as many rows
        matrix = Experts(name, parameter) if kind == EXPERT else Matrix(name, parameter, None, gates)
        reason = choice.of_size(choice.divided(matrix)) if parameter.requires_grad else "frozen"
        if pattern is None:
            reason = choice.of_module(of, module, parameter) or reason
        if isinstance(module, EMBEDDINGS):
            matrix.has_lookups = True
            if module.sparse:
                reason = "its gradients are sparse"
        if reason:
            chosen.others[name] = reason
            if reason == "frozen":
                chosen.frozen[name] = parameter
            continue
        unused -= {pattern}
        del chosen.others[name]
        matrix.kind, matrix.method = kind if pattern is None else NAMED, method
        chosen.matrices.append((None, matrix))
    if unused:
        raise InvalidArgumentError(f"parameter_methods: no matrix that is left to the optimizer has a name that {min(unused)!r} "
                                   f"matches; left are {chosen.others}", "INVALID_ARGUMENT")


def _split(name: str) -> Tuple[str, Optional["re.Match[str]"]]:
    """Returns the name of the module around a linear layer, or around the one that it adapts, and the match of _SCORES."""
    of, _, own = _ADAPTER.sub("", name).rpartition(".")
    return of, _SCORES.search(own)


def _set_kinds(model: nn.Module, chosen: Chosen) -> None:
    """Sets the kinds of convolutions, of hidden layers that get no factor, and of linear layers that are not hidden: with an output for
    each row of an embedding of words, or first or last of a model without one."""
    rows = {module.weight.shape[0] for name, module in model.named_modules()
            if isinstance(module, EMBEDDINGS) and not _NO_WORDS.search(plain_name(name))}
    weights = [id(parameter) for parameter in model.parameters() if parameter.dim() > 1]
    outer = weights[-1:] if rows else weights[:1] + weights[-1:]
    linear = [matrix for _, matrix in chosen.matrices if not isinstance(matrix, (Convolution, TransposedConvolution))]
    widths = {matrix.d_in - (matrix.bias is not None) for matrix in linear}
    names = [plain_name(name) for name, _ in model.named_modules()] + [matrix.name for matrix in linear]
    with_queries = {of for of, found in map(_split, names) if found and found["query"]}
    for _, matrix in chosen.matrices:
        of, scores = _split(matrix.name)
        is_outer, columns, outputs = id(matrix.weight) in outer, matrix.d_in - (matrix.bias is not None), sum(matrix.sizes)
        if matrix not in linear:
            matrix.kind = CONVOLUTION
        # A hidden layer may have as many outputs as there are words.
        elif outputs in rows and (outputs not in widths or is_outer and outputs != columns) if rows else is_outer:
            matrix.kind = END
        # Without queries beside them, more keys than inputs are hidden units, as in RWKV's feed-forward layers.
        elif scores and (of in with_queries or outputs <= columns and not _ADAPTER.search(matrix.name)):
            matrix.kind = SCORES
        elif columns > _MOST_INPUTS_AN_OUTPUT * outputs or "expert" in matrix.name.lower():
            matrix.kind = NARROW


def exceptions(matrices: Iterable[Matrix], methods: Mapping[str, Union[Method, str]], statistics: str) -> Tuple[LayerMethod, ...]:
    """Returns SessionSpec.layer_methods: the methods of layers by their gradients alone, and for others that of the first pattern of
    `methods` that matches a layer's whole name."""
    by_gradient: Dict[str, LayerMethod] = {}
    others: List[Optional[Layer]] = []
    for matrix in matrices:
        for layer in matrix.layers():
            if matrix.method is not None:
                before = by_gradient.get(repr(matrix.method))
                by_gradient[repr(matrix.method)] = LayerMethod(matrix.method, (*(before.layers if before else ()), len(others)))
            others.append(None if matrix.method is not None else layer)
    return tuple(by_gradient.values()) + by_pattern(others, methods, statistics)
