# SPDX-License-Identifier: Apache-2.0
"""Converts arguments of other libraries' preconditioners to those of Precondor. docs/use/migrate.md lists the remaining
differences.

Each function takes the arguments of the library's constructor by their names and returns keyword arguments::

    pre = Preconditioner(model, address, session="run-7", **migrate.kaisa(model, rows=64, damping=0.003, inv_update_steps=10))

An argument with another meaning here, or that the servers do not support, raises InvalidArgumentError, which has the
reason and what to do; so does a name that the library does not have. Arguments that only choose how fast the library
computes are accepted and ignored. An absent argument has the library's default and not Precondor's, except for
learning rates. Modules that the library does not know are left to the optimizer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, AbstractSet, Any, Dict, List, Mapping, NoReturn, Sequence

from ._errors import InvalidArgumentError
from ._options import Statistics
from ._session import Method

if TYPE_CHECKING:
    from torch import nn

__all__ = ["distributed_kron", "kaisa", "mkor"]

_OWN_OPTIMIZER = "The optimizer stays yours: make it, and call pre.step(loss) before optimizer.step()"
_CHAIN = "Give it to precondor.optax.kron, or chain it behind: optax.add_decayed_weights(...), optax.scale_by_learning_rate(...)"
_NO_FUNCTIONS = "Servers call no function: "
_SCHEDULE = _NO_FUNCTIONS + "after migrate, set the method's option to a schedule's text, such as exponential(0.01, 0.99, 0.001)"
_PROBABILITY = _NO_FUNCTIONS + ("for another precond_update_prob_schedule, set max_update_probability, min_update_probability, "
                                "update_flat_steps and update_decay in the options of the method that migrate.distributed_kron returns, and "
                                "give it to scale_by_precondor")
_SPECS = "Leave it out: the servers hold the factors, and mesh says which devices have the gradients"
_SCALER = "Give it to each step: pre.step(loss, scaler=scaler)"


def kaisa(model: "nn.Module", *, rows: int, **arguments: Any) -> Dict[str, Any]:
    """Converts arguments of kfac-pytorch's KFACPreconditioner for precondor.torch.Preconditioner.

    The rows of convolutions are divided by their number of positions (mean_positions), as kfac-pytorch does.

    Args:
        model: The model.
        rows: Number of rows over which a rank's loss is a mean, usually its batch (for a language model its tokens).
            Gradients of this mean are 1/rows of the rows' own. kfac-pytorch computes factors from them, and its damping
            is tuned for these factors. The number is for all layers: it is exact for linear layers that see `rows`
            rows.
        **arguments: Arguments of KFACPreconditioner.

    Raises:
        InvalidArgumentError: An argument cannot be converted.
    """
    have = _LibraryCall("kaisa", arguments, {
        "factor_update_steps": 1, "inv_update_steps": 1, "damping": 0.001, "factor_decay": 0.95, "kl_clip": 0.001,
        "compute_method": "EIGEN", "compute_eigenvalue_outer_product": True, "skip_layers": None, "grad_scaler": None,
        "factor_dtype": None, "inv_dtype": None, "grad_worker_fraction": "MEM_OPT", "assignment_strategy": "COMPUTE",
        "colocate_factors": True}, does_nothing={
        "lr",  # the optimizer's rate is read
        "accumulation_steps", "allreduce_bucket_cap_mb", "symmetry_aware", "update_factors_in_hook", "loglevel"})
    every = have.count("factor_update_steps")
    inverse = have.count("inv_update_steps")
    if inverse % every != 0:
        have.refuse("inv_update_steps", f"a multiple of factor_update_steps, {every}",
                    "A decomposition is made in a step that has statistics")
    form = have.name("compute_method", ("EIGEN", "INVERSE"))
    options: Dict[str, Any] = {
        "form": form, "prediv": form == "EIGEN" and bool(have["compute_eigenvalue_outer_product"]),
        "damping": have.number("damping", _SCHEDULE), "factor_decay": have.number("factor_decay", _SCHEDULE),
        "inv_update_steps": inverse // every, "row_scale": float(rows), "stagger": False}
    if have["kl_clip"] is None:
        options["scaling"] = "NONE"
    else:
        options.update(scaling="KL_CLIP", scaling_clip=have.number("kl_clip", _SCHEDULE))
    have.expect_none("grad_scaler", _SCALER)
    have.expect_f32("factor_dtype", "Factors are kept in f32")
    have.expect_f32("inv_dtype", "Decompositions are kept in f32")
    if have.name("assignment_strategy", ("COMPUTE", "MEMORY")) != "COMPUTE":
        have.refuse("assignment_strategy", "COMPUTE", "The coordinator places layers by what they cost to compute")
    if not have["colocate_factors"]:
        have.refuse("colocate_factors", "True", "Both factors of a layer are on one shard")
    return {"method": Method("kfac", options), **_exchange_of(have),
            "statistics": Statistics("COVARIANCE", mean_positions=True, inv_freq=every, warmup_steps=0, dtype="f32"),
            "skip": _skipped_by_search(have, "skip_layers", model) + _not_known(model, subclasses=True)}


def mkor(model: "nn.Module", **arguments: Any) -> Dict[str, Any]:
    """Converts arguments of the MKOR authors' optimizer for precondor.torch.Preconditioner.

    The result has their recursion (rule REFERENCE). `method="mkor"` alone has Precondor's default rule, which trains
    better. Raises InvalidArgumentError if an argument cannot be converted.
    """
    have = _LibraryCall("mkor", arguments, {
        "inv_freq": 10, "warmup_steps": 0, "half_precision": True, "clipping_value": 100.0, "sgd_layers": (), "grad_scale": 1.0,
        "optimizer": None}, does_nothing={
        "stat_decay", "stabilization_factor",  # the optimizer ignores them and uses .95 and .05
        "measure_time", "backend", "grad_accum_steps"}, unknown=_OWN_OPTIMIZER)
    have.expect_none("optimizer", _OWN_OPTIMIZER)
    if have["grad_scale"] != 1.0:
        have.refuse("grad_scale", "1", _SCALER)
    return {"method": Method("mkor", {
        "rule": "REFERENCE", "representation": "DENSE", "storage": "F16" if have["half_precision"] else "F32",
        "gamma": 0.95, "clip": have.number("clipping_value")}),
        "statistics": Statistics("MEAN", inv_freq=have.count("inv_freq"), warmup_steps=have.count("warmup_steps", least=0),
                                 dtype="f16" if have["half_precision"] else "f32"),
        "skip": _names_of(have, "sgd_layers", model) + _not_known(model, subclasses=False)}


def distributed_kron(**arguments: Any) -> Dict[str, Any]:
    """Converts arguments of distributed_kron's kron and scale_by_kron for precondor.optax.scale_by_precondor.

    precondor.optax.kron takes those of kron and calls this. Momentum and factors are kept in f32. kron has diagonal
    factors for vectors and scalars; here they have Adam, with b1. Raises InvalidArgumentError if an argument cannot be
    converted.
    """
    have = _LibraryCall("distributed_kron", arguments, {
        "b1": 0.9, "preconditioner_update_probability": None, "max_size_triangular": 8192, "min_ndim_triangular": 2,
        "memory_save_mode": None, "preconditioner_lr": 0.1, "preconditioner_init_scale": 1.0, "scanned_layers": None, "merge_small_dims": True, "target_merged_dim_size": 4096,
        "partition_grads_into_blocks": True, "block_size": 256, "learning_rate": None, "weight_decay": 0.0,
        "weight_decay_mask": None, "mu_dtype": None, "precond_dtype": None, "params_partition_specs": None,
        "preconditioner_partition_spec": None}, does_nothing={
        "precond_update_precision", "precond_grads_precision",  # always f32
        "lax_map_scanned_layers", "lax_map_batch_size"})
    have.expect_none("learning_rate", _CHAIN)
    have.expect_none("weight_decay_mask", _CHAIN)
    have.expect_none("params_partition_specs", _SPECS)
    have.expect_none("preconditioner_partition_spec", _SPECS)
    have.expect_f32("mu_dtype", "Momentum is kept in f32, in the servers' memory")
    have.expect_f32("precond_dtype", "Factors are kept in f32, in the servers' memory")
    if have["weight_decay"] != 0.0:
        have.refuse("weight_decay", "0", _CHAIN)
    mode = have["memory_save_mode"]
    options: Dict[str, Any] = {
        "variant": "TRIANGULAR", "momentum": have.number("b1"), "precondition_lr": have.number("preconditioner_lr"),
        "init_scale": have.number("preconditioner_init_scale"), "max_size_triangular": have["max_size_triangular"],
        "min_ndim_triangular": have["min_ndim_triangular"],
        "memory_save_mode": "NONE" if mode is None else have.name("memory_save_mode", ("ONE_DIAG", "ALL_DIAG")),
        "merge_small_dims": bool(have["merge_small_dims"]), "target_merged_dim_size": have["target_merged_dim_size"],
        "block_size": have["block_size"] if have["partition_grads_into_blocks"] else 0}
    if have["preconditioner_update_probability"] is not None:  # otherwise both have the default schedule
        probability = have.number("preconditioner_update_probability", _PROBABILITY)
        options.update(max_update_probability=probability, min_update_probability=probability)
    return {"method": Method("kron", options), "b1": have.number("b1"), "scanned_layers": have["scanned_layers"]}


class _LibraryCall:
    """The given arguments of a library's constructor, with the library's defaults for the others."""

    def __init__(self, library: str, given: Mapping[str, Any], defaults: Mapping[str, Any], does_nothing: AbstractSet[str],
                 unknown: str = "") -> None:
        self._library = library
        for name in given:
            if name not in defaults and name not in does_nothing:
                raise InvalidArgumentError(f"{library}: {name}: expected one of {', '.join(sorted([*defaults, *does_nothing]))}",
                                           "INVALID_ARGUMENT", "UNSPECIFIED", unknown)
        self._values = {**defaults, **{name: value for name, value in given.items() if name in defaults}}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def refuse(self, name: str, expected: str, do: str) -> NoReturn:
        raise InvalidArgumentError(f"{self._library}: {name}: expected {expected}, got {self[name]!r}", "INVALID_ARGUMENT",
                                   "UNSPECIFIED", do)

    def number(self, name: str, instead: str = _NO_FUNCTIONS + "give the number that it begins with") -> float:
        """Returns a number; `instead` says what to do in place of a function."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, "a number", instead if callable(value) else "")
        return float(value)

    def count(self, name: str, least: int = 1) -> int:
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(name, f"a whole number from {least}", "Steps that have statistics are the same all through a session"
                        if callable(value) else "")
        return value

    def name(self, name: str, names: Sequence[str]) -> str:
        """Returns the name of an enum's value, or a text in upper case, if it is one of `names`."""
        text = str(getattr(self[name], "name", self[name])).upper()
        if text not in names:
            self.refuse(name, f"one of {', '.join(names)}", "")
        return text

    def expect_none(self, name: str, do: str) -> None:
        if self[name] is not None:
            self.refuse(name, "none", do)

    def expect_f32(self, name: str, why: str) -> None:
        if self[name] is not None and "float32" not in str(self[name]):
            self.refuse(name, "float32, or none", why)


def _exchange_of(have: _LibraryCall) -> Dict[str, str]:
    """Returns the exchange for a grad_worker_fraction, which may be a number or a name, unless it is Preconditioner's own."""
    given = have["grad_worker_fraction"]
    name = getattr(given, "name", {0: "MEM_OPT", 1: "COMM_OPT"}.get(given, given))
    if name not in ("COMM_OPT", "MEM_OPT"):
        have.refuse("grad_worker_fraction", "COMM_OPT or 1, or MEM_OPT or 0", "Every rank has the decompositions, or none has")
    return {"exchange": "PULL_FACTORS"} if name == "COMM_OPT" else {}


def _skipped_by_search(have: _LibraryCall, argument: str, model: "nn.Module") -> List[str]:
    """Returns patterns of the modules whose name or class contains a match of one of the argument's patterns."""
    skipped: List[str] = []
    for pattern in have[argument] or ():
        found = [name for name, module in _inner(model).named_modules()
                 if not list(module.children()) and (re.search(pattern, name) or re.search(pattern, type(module).__name__))]
        if not found:
            have.refuse(argument, "patterns that a name or a class of the model's modules has a match of", f"{pattern!r} has none")
        skipped += found
    return [re.escape(name) for name in dict.fromkeys(skipped)]


def _names_of(have: _LibraryCall, argument: str, model: "nn.Module") -> List[str]:
    """Returns patterns of modules that are given as objects."""
    names = {id(module): name for name, module in _inner(model).named_modules()}
    for module in have[argument]:
        if id(module) not in names:
            have.refuse(argument, "modules of the model", "")
    return [re.escape(names[id(module)]) for module in have[argument]]


def _not_known(model: "nn.Module", subclasses: bool) -> List[str]:
    """Returns patterns of the modules that have parameters of their own and are neither Linear nor Conv2d (nor, with
    `subclasses`, one of their subclasses)."""
    def known(kind: type) -> bool:
        return any(one.__name__ in ("Linear", "Conv2d") for one in (kind.__mro__ if subclasses else (kind,)))

    return [re.escape(name) for name, module in _inner(model).named_modules()
            if name and not known(type(module)) and any(True for _ in module.parameters(recurse=False))]


def _inner(model: "nn.Module") -> "nn.Module":
    """Returns the model without the wrappers of DistributedDataParallel and the compiler, whose modules have the names
    that Preconditioner uses."""
    while True:
        inner = getattr(model, "_orig_mod", model.module if type(model).__name__ == "DistributedDataParallel" else model)
        if inner is model:
            return model
        model = inner
