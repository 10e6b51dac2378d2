# SPDX-License-Identifier: Apache-2.0
"""What is known of a model whose parameters are divided among the ranks: by fully_shard (FSDP2), by tensor parallelism,
or by both. torch's DTensor describes the parts."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, List, Sequence, Tuple

import torch
from torch import nn

from .._errors import InvalidArgumentError, UnimplementedError
from ._layers import Matrix

_WHOLE = (torch.Tensor, nn.Parameter)


def is_sharded(tensor: torch.Tensor) -> bool:
    # The types first: it takes longer to find that an attribute is missing.
    return type(tensor) not in _WHOLE and hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the tensor, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor, or this rank's part of it, is in memory. It is not where a transformation of torch.func (grad,
    vmap and the like), or is_grads_batched, computes with it."""
    try:
        local(tensor.detach()).data_ptr()
    except RuntimeError:
        return False
    return True


def modules_of(model: nn.Module) -> List[Any]:
    """Returns the modules with which fully_shard has been called."""
    return [module for module in model.modules() if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)]


def tensor_placements(parameter: torch.Tensor, under_fsdp: bool) -> Sequence[Any]:
    """Returns the placements of a parameter that are not those of fully_shard, which come first."""
    if not is_sharded(parameter):
        return ()
    if not under_fsdp:
        return parameter.placements
    return parameter.placements[2 if parameter.placements[0].is_replicate() else 1:]


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Brings gradients to the places of their parameters. Tensor parallelism alone may leave sums of which each rank has a
    term. Collective, if there are any."""
    for parameter in parameters:
        if is_sharded(parameter) and parameter.grad is not None and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _across(mesh: Any) -> Tuple[int, ...]:
    """Returns the ranks with this one's coordinate in the last dimension of the mesh, ascending."""
    return tuple(sorted(mesh.mesh[..., mesh.get_coordinate()[-1]].flatten().tolist()))


def refuse_unknown(model: nn.Module, world_size: int) -> bool:
    """Returns whether the model's parameters are divided. Raises UnimplementedError if parts are not those of one model
    whose gradients are averages already."""
    sharded = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    # In a model with both, fully_shard alone divides what tensor parallelism leaves whole: across its groups.
    across = {_across(one.device_mesh) for one in sharded.values() if one.device_mesh.size() == world_size} \
        if modules_of(model) else set()
    for name, parameter in sharded.items():
        mesh = parameter.device_mesh
        if mesh.size() == world_size or tuple(sorted(mesh.mesh.flatten().tolist())) in across:
            continue
        raise UnimplementedError(
            f"parameter {name} is on a mesh of {mesh.size()} ranks, of a job of {world_size}", "UNIMPLEMENTED", "UNSPECIFIED",
            "The mesh of fully_shard, of tensor parallelism, or of both together has to be the ranks of process_group, and with both "
            "fully_shard has to have all parameters; DistributedDataParallel does not go with them")
    return bool(sharded)


def refuse_whole(model: nn.Module, matrices: Sequence[Matrix]) -> None:
    """Raises InvalidArgumentError for a layer outside fully_shard while others are under it, because nothing averages
    its gradient."""
    if not modules_of(model):
        return
    for matrix in matrices:
        if not all(is_sharded(parameter) for parameter in matrix.parameters()):
            raise InvalidArgumentError(
                f"layer {matrix.name}: expected a parameter under fully_shard, as others are", "INVALID_ARGUMENT", "UNSPECIFIED",
                "Call fully_shard with the whole model too, before Preconditioner; or leave the layer out: skip=")


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes only accumulate gradients."""
    modules = modules_of(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
