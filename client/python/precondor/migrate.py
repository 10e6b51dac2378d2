# SPDX-License-Identifier: Apache-2.0
"""Converts arguments of other libraries' optimizers and preconditioners to those of Precondor. docs/use/migrate.md lists the
remaining differences.

Each function takes the arguments of the library's constructor by their names and returns keyword arguments::

    pre = Preconditioner(model, address, session="run-7", **migrate.kaisa(model, rows=64, damping=0.003, inv_update_steps=10))

Those of optimizers whose updates a method replaces return two: of Preconditioner, and of its make_optimizer::

    arguments, optimizer_arguments = migrate.soap(lr=0.003, precondition_frequency=10)
    pre = Preconditioner(model, "local", **arguments)
    optimizer = pre.make_optimizer(**optimizer_arguments)

An argument with another meaning here, or that the servers do not support, raises InvalidArgumentError, which has the
reason and what to do; so does a name that the library does not have. Arguments that only choose how fast the library
computes are accepted and ignored. An absent argument has the library's default and not Precondor's, except for
learning rates in kaisa, mkor and distributed_kron. Modules that the library does not know are left to the optimizer.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

from ._errors import InvalidArgumentError
from ._options import Selection, Statistics
from ._session import Method

if TYPE_CHECKING:
    from torch import nn

__all__ = ["distributed_kron", "distributed_shampoo", "heavyball_soap", "kaisa", "kron_torch", "mkor", "muon", "soap"]

Both = Tuple[Dict[str, Any], Dict[str, Any]]  # arguments of Preconditioner, and of its make_optimizer

_OWN_OPTIMIZER = "The optimizer stays yours: make it, and call pre.step(loss) before optimizer.step()"
_CHAIN = "Give it to precondor.optax.kron, or chain it behind: optax.add_decayed_weights(...), optax.scale_by_learning_rate(...)"
_NO_FUNCTIONS = "Servers call no function: "
_FIRST_NUMBER = _NO_FUNCTIONS + "give the number that it begins with"
_SCHEDULE = _NO_FUNCTIONS + "after migrate, set the method's option to a schedule's text, such as exponential(0.01, 0.99, 0.001)"
_PROBABILITY = _NO_FUNCTIONS + ("for another precond_update_prob_schedule, set max_update_probability, min_update_probability, "
                                "update_flat_steps and update_decay in the options of the method that migrate returns")
_SPECS = "Leave it out: the servers hold the factors, and mesh says which devices have the gradients"
_SCALER = "Give it to each step: pre.step(loss, scaler=scaler)"
_VECTORS = "Vectors are left to the optimizer"
_SCHEDULER = "Leave it out, and give the optimizer a scheduler of torch.optim.lr_scheduler"
_PLAIN_SOAP = "Leave it out: the servers compute SOAP as published"


class _Argument(NamedTuple):
    """An argument of a library: its default, the method's option that it becomes ("": none), and the function that reads it."""

    default: Any
    option: str
    read: "Callable[[_LibraryCall, str, Any], Any]"


def _any(default: Any, option: str = "") -> _Argument:
    return _Argument(default, option, lambda have, name, value: value)


_NOTHING = _any(None)  # an argument that does nothing here


def _flag(default: bool, option: str = "") -> _Argument:
    return _Argument(default, option, lambda have, name, value: bool(value))


def _number(default: Optional[float], option: str = "", instead: str = _FIRST_NUMBER, none: bool = False) -> _Argument:
    """`instead` says what to do in place of a function; `none`: None is allowed, and sets no option."""
    def read(have: _LibraryCall, name: str, value: Any) -> Optional[float]:
        if value is None and none:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            have.refuse(name, "a number", instead if callable(value) else "")
        return float(value)

    return _Argument(default, option, read)


def _count(default: int, option: str = "", least: int = 1) -> _Argument:
    def read(have: _LibraryCall, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            have.refuse(name, f"a whole number from {least}", "Steps that have statistics are the same all through a session"
                        if callable(value) else "")
        return int(value)

    return _Argument(default, option, read)


def _betas(*default: float) -> _Argument:
    def read(have: _LibraryCall, name: str, value: Any) -> Tuple[float, float]:
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(isinstance(one, (int, float)) for one in value):
            have.refuse(name, "two numbers", "")
        return float(value[0]), float(value[1])

    return _Argument(default, "", read)


def _name(default: Any, names: Union[Sequence[str], Mapping[str, str]], option: str = "", do: str = "") -> _Argument:
    """`names`: those that are allowed, in upper case, as texts or values of an enum, or the option's value of each."""
    def read(have: _LibraryCall, name: str, value: Any) -> str:
        text = str(getattr(value, "name", value)).upper()
        if text not in names:
            have.refuse(name, ("one of " if len(names) > 1 else "") + ", ".join(names), do)
        return names[text] if isinstance(names, Mapping) else text

    return _Argument(default, option, read)


def _only(default: Any, do: str) -> _Argument:
    """An argument of which the default alone is supported."""
    def read(have: _LibraryCall, name: str, value: Any) -> Any:
        if value is not None if default is None else (tuple(value) if isinstance(value, list) else value) != default:
            have.refuse(name, "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default), do)
        return value

    return _Argument(default, "", read)


def _f32(why: str) -> _Argument:
    def read(have: _LibraryCall, name: str, value: Any) -> None:
        if value is not None and "float32" not in str(value):
            have.refuse(name, "float32, or none", why)

    return _Argument(None, "", read)


_KAISA = {
    "factor_update_steps": _count(1), "inv_update_steps": _count(1), "damping": _number(0.001, "damping", _SCHEDULE),
    "factor_decay": _number(0.95, "factor_decay", _SCHEDULE), "kl_clip": _number(0.001, "scaling_clip", _SCHEDULE, none=True),
    "compute_method": _name("EIGEN", ("EIGEN", "INVERSE"), "form"), "compute_eigenvalue_outer_product": _flag(True),
    "skip_layers": _any(None), "grad_scaler": _only(None, _SCALER), "factor_dtype": _f32("Factors are kept in f32"),
    "inv_dtype": _f32("Decompositions are kept in f32"), "grad_worker_fraction": _any("MEM_OPT"),
    "assignment_strategy": _name("COMPUTE", ("COMPUTE",), do="The coordinator places layers by what they cost to compute"),
    "colocate_factors": _only(True, "Both factors of a layer are on one shard"),
    "lr": _NOTHING,  # the optimizer's rate is read
    **dict.fromkeys(("accumulation_steps", "allreduce_bucket_cap_mb", "symmetry_aware", "update_factors_in_hook", "loglevel"), _NOTHING)}
_MKOR = {
    "inv_freq": _count(10), "warmup_steps": _count(0, least=0), "half_precision": _flag(True), "clipping_value": _number(100.0, "clip"),
    "sgd_layers": _any(()), "grad_scale": _only(1.0, _SCALER), "optimizer": _only(None, _OWN_OPTIMIZER),
    # The optimizer ignores the first two, and uses .95 and .05.
    **dict.fromkeys(("stat_decay", "stabilization_factor", "measure_time", "backend", "grad_accum_steps"), _NOTHING)}
_BOTH_KRONS = {
    "b1": _number(0.9, "momentum"), "preconditioner_update_probability": _number(None, "max_update_probability", _PROBABILITY, none=True),
    "max_size_triangular": _count(8192, "max_size_triangular", least=0), "min_ndim_triangular": _count(2, "min_ndim_triangular", least=0),
    "memory_save_mode": _name(None, ("NONE", "ONE_DIAG", "ALL_DIAG"), "memory_save_mode"),
    "mu_dtype": _f32("Momentum is kept in f32, in the servers' memory"),
    "precond_dtype": _f32("Factors are kept in f32, in the servers' memory")}
_DISTRIBUTED_KRON = {
    **_BOTH_KRONS, "preconditioner_lr": _number(0.1, "precondition_lr"), "preconditioner_init_scale": _number(1.0, "init_scale"),
    "scanned_layers": _any(None), "merge_small_dims": _flag(True, "merge_small_dims"),
    "target_merged_dim_size": _count(4096, "target_merged_dim_size"), "partition_grads_into_blocks": _flag(True),
    "block_size": _count(256, "block_size"), "learning_rate": _only(None, _CHAIN), "weight_decay": _only(0.0, _CHAIN),
    "weight_decay_mask": _only(None, _CHAIN), "params_partition_specs": _only(None, _SPECS),
    "preconditioner_partition_spec": _only(None, _SPECS),
    # Products are always in f32.
    **dict.fromkeys(("precond_update_precision", "precond_grads_precision", "lax_map_scanned_layers", "lax_map_batch_size"), _NOTHING)}
_KRON_TORCH = {
    **_BOTH_KRONS, "lr": _number(0.0003), "weight_decay": _number(0.0), "precond_lr": _number(0.1, "precondition_lr"),
    "precond_init_scale": _number(1.0, "init_scale"), "merge_dims": _flag(True, "merge_small_dims"),
    "momentum_into_precond_update": _only(True, "Factors learn from the momentum")}
_MUON = {
    "lr": _number(0.001), "weight_decay": _number(0.1), "momentum": _number(0.95, "momentum"), "nesterov": _flag(True, "nesterov"),
    "ns_coefficients": _only((3.4445, -4.775, 2.0315), "The servers iterate with these"), "eps": _number(1e-7, "epsilon"),
    "ns_steps": _count(5, "ns_steps"),
    "adjust_lr_fn": _name(None, {"NONE": "ORIGINAL", "ORIGINAL": "ORIGINAL", "MATCH_RMS_ADAMW": "MATCH_RMS_ADAMW"}, "scale",
                          "For layers with at least as many outputs as inputs it is ORIGINAL")}
_BOTH_SOAPS = {
    "lr": _number(0.003), "betas": _betas(0.95, 0.95), "shampoo_beta": _number(-1.0), "eps": _number(1e-8, "epsilon"),
    "weight_decay": _number(0.01), "precondition_frequency": _count(10, "refresh_interval"),
    "max_precond_dim": _count(10000, "max_factor_dim", least=0), "precondition_1d": _only(False, _VECTORS),
    "normalize_grads": _only(False, _PLAIN_SOAP), "correct_bias": _only(True, _PLAIN_SOAP)}
_SOAP = {
    **_BOTH_SOAPS, "data_format": _NOTHING,  # it acts with merge_dims alone
    "merge_dims": _only(False, "It makes vectors of small matrices. For convolutions, set merge_small_dims in the options of the method "
                               "that migrate returns")}
_HEAVYBALL = {
    **_BOTH_SOAPS, "betas": _betas(0.9, 0.95), "shampoo_beta": _number(0.95), "precondition_frequency": _count(2, "refresh_interval"),
    "max_precond_dim": _count(2048, "max_factor_dim", least=0), "merge_dims": _flag(True, "merge_small_dims"),
    "warmup_steps": _only(0, _SCHEDULER), "storage_dtype": _f32("Moments are kept in f32"),
    "gradient_clipping": _only(None, "Clip gradients before pre.step(loss)"), "update_clipping": _only(None, "Servers clip no updates"),
    "orig_shapes": _only(None, "Leave it out: Preconditioner knows the shapes of parameters in parts"),
    **dict.fromkeys(("ecc", "param_ecc"), _only(None, "State and weights are kept in f32")),
    **dict.fromkeys(("cautious_weight_decay", "caution", "mars", "palm", "split", "use_precond_schedule", "precond_grad_accum",
                     "stochastic_schedule"), _only(False, _PLAIN_SOAP)),
    # The first three act with mars, palm and a schedule alone.
    **dict.fromkeys(("mars_gamma", "beta2_scale", "precond_scheduler", "multi_tensor", "foreach", "compile_step", "promote"), _NOTHING)}
_DISTRIBUTED_SHAMPOO = {
    "lr": _number(0.01), "betas": _betas(0.9, 1.0), "beta3": _number(-1.0), "epsilon": _number(1e-12, "epsilon"),
    "weight_decay": _number(0.0), "weight_decay_type": _name("DECOUPLED", ("DECOUPLED",), do="make_optimizer() decouples it"),
    "max_preconditioner_dim": _number(1024), "start_preconditioning_step": _count(-1, least=-1),
    "precondition_frequency": _only(1, "Roots of the first gradient alone, with this epsilon, diverge: set refresh_interval and an epsilon "
                                       "of 1e-6 in the options of the method that migrate returns, or take migrate.soap"),
    "distributed_config": _any(None),
    "use_bias_correction": _only(True, "Servers correct both means"), "iterate_averaging_config": _only(None, "Average the weights yourself"),
    "grafting_config": _only(None, "Leave it out, and find a rate anew; or take migrate.soap, whose updates have Adam's size by themselves"),
    "preconditioner_config": _any(None),
    **dict.fromkeys(("use_pin_memory", "shampoo_pt2_compile_config", "shampoo_runtime_config", "concurrency_config"), _NOTHING)}


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
    have = _LibraryCall("kaisa", arguments, _KAISA)
    every, inverse = have["factor_update_steps"], have["inv_update_steps"]
    if inverse % every != 0:
        have.refuse("inv_update_steps", f"a multiple of factor_update_steps, {every}",
                    "A decomposition is made in a step that has statistics")
    prediv = have["compute_method"] == "EIGEN" and have["compute_eigenvalue_outer_product"]
    return {"method": have.method("kfac", prediv=prediv, inv_update_steps=inverse // every, row_scale=float(rows), stagger=False,
                                  scaling="NONE" if have["kl_clip"] is None else "KL_CLIP"), **_exchange_of(have),
            "statistics": Statistics("COVARIANCE", mean_positions=True, inv_freq=every, warmup_steps=0, dtype="f32"),
            "skip": _skipped_by_search(have, "skip_layers", model) + _not_known(model, subclasses=True)}


def mkor(model: "nn.Module", **arguments: Any) -> Dict[str, Any]:
    """Converts arguments of the MKOR authors' optimizer for precondor.torch.Preconditioner.

    The result has their recursion (rule REFERENCE). `method="mkor"` alone has Precondor's default rule, which trains
    better. Raises InvalidArgumentError if an argument cannot be converted.
    """
    have = _LibraryCall("mkor", arguments, _MKOR, unknown=_OWN_OPTIMIZER)
    half = have["half_precision"]
    return {"method": have.method("mkor", rule="REFERENCE", representation="DENSE", storage="F16" if half else "F32", gamma=0.95),
            "statistics": Statistics("MEAN", inv_freq=have["inv_freq"], warmup_steps=have["warmup_steps"], dtype="f16" if half else "f32"),
            "skip": _names_of(have, "sgd_layers", model) + _not_known(model, subclasses=False)}


def distributed_kron(**arguments: Any) -> Dict[str, Any]:
    """Converts arguments of distributed_kron's kron and scale_by_kron for precondor.optax.scale_by_precondor.

    precondor.optax.kron takes those of kron and calls this. Momentum and factors are kept in f32. kron has diagonal
    factors for vectors and scalars; here they have Adam, with b1. Raises InvalidArgumentError if an argument cannot be
    converted.
    """
    have = _LibraryCall("distributed_kron", arguments, _DISTRIBUTED_KRON)
    blocks = {} if have["partition_grads_into_blocks"] else {"block_size": 0}
    return {"method": have.method("kron", **blocks, **_constant_probability(have)), "b1": have["b1"],
            "scanned_layers": have["scanned_layers"]}


def kron_torch(**arguments: Any) -> Both:
    """Converts arguments of kron_torch's Kron, for all of a model's matrices. Raises InvalidArgumentError if one cannot be converted."""
    have = _LibraryCall("kron_torch", arguments, _KRON_TORCH)
    probability = _constant_probability(have) or {"update_flat_steps": 501.0}  # its schedule counts gradients from 0, and the servers' from 1
    return _of_all_matrices(have, have.method("kron", **probability))


def muon(**arguments: Any) -> Both:
    """Converts arguments of torch.optim.Muon, for the linear layers; `skip` leaves some of them to AdamW.

    Raises InvalidArgumentError if an argument cannot be converted.
    """
    from torch import nn  # migrate serves JAX too

    have = _LibraryCall("muon", arguments, _MUON)
    return ({"method": have.method("muon"), "selection": Selection(fold_bias=False, skip_types=nn.modules.conv._ConvNd)},
            {"lr": have["lr"], "weight_decay": have["weight_decay"]})


def soap(**arguments: Any) -> Both:
    """Converts arguments of SOAP, the authors' optimizer, for all of a model's matrices.

    Raises InvalidArgumentError if an argument cannot be converted.
    """
    return _soap_of(_LibraryCall("soap", arguments, _SOAP), merge_small_dims=False)


def heavyball_soap(**arguments: Any) -> Both:
    """Converts arguments of HeavyBall's SOAP, and of ForeachSOAP before version 3, for all of a model's matrices.

    Raises InvalidArgumentError if an argument cannot be converted.
    """
    return _soap_of(_LibraryCall("heavyball_soap", arguments, _HEAVYBALL))


def distributed_shampoo(**arguments: Any) -> Both:
    """Converts arguments of DistributedShampoo (PyTorch's, of facebookresearch/optimizers), for all of a model's matrices.

    Raises InvalidArgumentError if an argument cannot be converted.
    """
    have = _LibraryCall("distributed_shampoo", arguments, _DISTRIBUTED_SHAMPOO)
    momentum, decay = have["betas"]
    if decay == 1.0:
        have.refuse("betas", "a second number below 1", "Factors are means and not sums: give a decay, such as 0.99")
    if have["beta3"] not in (-1.0, momentum):
        have.refuse("beta3", "-1, or betas[0]", "Leave it out")
    if have["epsilon"] > 1e-8:
        have.refuse("epsilon", "at most 1e-8", "Here it is a share of the largest eigenvalue: set epsilon in the options of the method that "
                                               "migrate returns")
    if have["start_preconditioning_step"] not in (-1, 1):
        have.refuse("start_preconditioning_step", "-1", "Roots are computed at the first gradient: begin with a lower rate")
    config = have["preconditioner_config"]
    if config is not None and type(config).__name__ not in ("RootInvShampooPreconditionerConfig",
                                                            "EigendecomposedShampooPreconditionerConfig"):
        have.refuse("preconditioner_config", "a RootInvShampooPreconditionerConfig, or none",
                    "For eigenvalue correction take migrate.soap, for spectral descent migrate.muon")
    for field in ("inverse_exponent_override", "use_trace_scaling", "drop_weighting_factor_on_gsquare"):
        if getattr(config, field, None):
            have.refuse("preconditioner_config", f"one without {field}", "Roots are those of the publication")
    return _of_all_matrices(have, have.method(
        "soap", rule="SHAMPOO", refresh_interval=1, momentum=momentum, covariance_decay=decay,
        max_factor_dim=int(min(have["max_preconditioner_dim"], 1 << 20)),  # inf: no limit
        merge_small_dims=getattr(have["distributed_config"], "target_parameter_dimensionality", 1) != math.inf))


class _LibraryCall:
    """The given arguments of a library's constructor, with the library's defaults for the others, as a table reads them."""

    def __init__(self, library: str, given: Mapping[str, Any], table: Mapping[str, _Argument], unknown: str = "") -> None:
        self._library = library
        for name in given:
            if name not in table:
                raise InvalidArgumentError(f"{library}: {name}: expected one of {', '.join(sorted(table))}", "INVALID_ARGUMENT",
                                           "UNSPECIFIED", unknown)
        self._given = {name: given.get(name, argument.default) for name, argument in table.items()}
        self._values = {name: argument.read(self, name, self._given[name]) for name, argument in table.items()}
        self._options = {argument.option: self._values[name] for name, argument in table.items()
                         if argument.option and self._values[name] is not None}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def method(self, method: str, **options: Any) -> Method:
        """Returns the method with the options that the arguments become, and with `options`."""
        return Method(method, {**self._options, **options})

    def refuse(self, name: str, expected: str, do: str) -> NoReturn:
        raise InvalidArgumentError(f"{self._library}: {name}: expected {expected}, got {self._given[name]!r}", "INVALID_ARGUMENT",
                                   "UNSPECIFIED", do)


def _constant_probability(have: _LibraryCall) -> Dict[str, float]:
    """Returns the option that holds an update probability constant; otherwise both packages and servers have the default schedule."""
    probability = have["preconditioner_update_probability"]
    return {} if probability is None else {"min_update_probability": probability}


def _soap_of(have: _LibraryCall, **options: Any) -> Both:
    betas, own = have["betas"], have["shampoo_beta"]
    method = have.method("soap", momentum=betas[0], second_moment_decay=betas[1], covariance_decay=betas[1] if own < 0 else own, **options)
    return _of_all_matrices(have, method, betas=betas, eps=have["eps"])


def _of_all_matrices(have: _LibraryCall, method: Method, **optimizer: Any) -> Both:
    """Returns the arguments for an optimizer of all of a model's matrices; its vectors have AdamW here."""
    return ({"method": method, "selection": Selection(fold_bias=False, embeddings=method)},
            {"lr": have["lr"], "weight_decay": have["weight_decay"], **optimizer})


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
