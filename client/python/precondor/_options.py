# SPDX-License-Identifier: Apache-2.0
"""Groups of options: Selection, Statistics and Fallback of a run, ClientOptions and Security of a client.

Each is a frozen dataclass, and raises InvalidArgumentError, which names the field, for a value of another type. The servers
check ranges and names when the session is opened.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Mapping, Optional, Sequence, Type, Union

from ._errors import check_bool, check_mapping, check_number, check_text, check_whole, expect_instance, invalid
from ._session import Fallback, Method, as_method, compile_pattern, expect_whole_updates

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ClientOptions", "Fallback", "Security", "Selection", "Statistics"]

_MOST_COUNT = (1 << 31) - 1

@dataclasses.dataclass(frozen=True)
class Selection:
    """The modules and parameters of a PyTorch model that are layers. All others are left to the optimizer.

    Attributes:
        skip_types: A class of modules, or several, that are no layers.
        min_dim: Least length of a layer's longer side.
        max_dim: Greatest length of a layer's longer side; a longer one is usually a vocabulary.
        fold_bias: A bias is the last column of its layer's weight. False: the optimizer trains it.
        embeddings: Method of the weights of embeddings, tied ones included, whose answers are whole updates ("kron",
            "soap", "muon"). "": the optimizer trains them. None: the optimizer, but without Preconditioner's `method`
            "soap" for tied weights.
        experts: Such a method of stacks of experts, weights [experts, d_out, d_in]. "": the optimizer trains them.
            None: Preconditioner's `method`, if its answers are whole updates.
        blocks: Number of equal blocks of outputs, or the outputs of each, by regular expressions of whole layer names; the first
            match counts. Each block is a layer of its own, NAME.group0 and so on. 1: the layer stays whole.

    Raises:
        InvalidArgumentError: skip_types has something else than classes, a length is no number of at least 0, fold_bias is no
            bool, a method is unknown or has answers that are no whole updates, or blocks are neither numbers nor lists of them.
    """

    skip_types: Union[Type["nn.Module"], Sequence[Type["nn.Module"]]] = ()
    min_dim: int = 2
    max_dim: int = 1 << 20
    fold_bias: bool = True
    embeddings: Union[Method, str, None] = None
    experts: Union[Method, str, None] = None
    blocks: Mapping[str, Union[int, Sequence[int]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = self.skip_types if isinstance(self.skip_types, (list, tuple, set, frozenset)) else (self.skip_types,)
        for kind in kinds:
            if not isinstance(kind, type):
                raise invalid("selection.skip_types", "classes of modules", kind)
        object.__setattr__(self, "skip_types", tuple(kinds))
        for name in ("min_dim", "max_dim"):
            check_number(f"selection.{name}", getattr(self, name), 0.0)
        check_bool("selection.fold_bias", self.fold_bias)
        for name in ("embeddings", "experts"):
            method, what = getattr(self, name), f"selection.{name}"
            if method not in (None, ""):
                expect_whole_updates(what, as_method(method, what))
        for pattern, blocks in check_mapping("selection.blocks", self.blocks).items():
            compile_pattern("selection.blocks", pattern)
            for size in blocks if isinstance(blocks, (list, tuple)) and blocks else [blocks]:
                check_whole(f"selection.blocks: {pattern!r}", size, 1, _MOST_COUNT)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the layers' inputs and output gradients: their kind, and the steps at which they are sent.

    Attributes:
        kind: "SIGNED" (sketches), "MEAN", "PER_WORKER_MEAN" or "COVARIANCE". "": the method's default.
        mean_positions: A row of a convolution counts 1/positions, as in kfac-pytorch, and not 1.
        sketches: Number of SIGNED vectors of a rank. 0: ceil(16 / ranks).
        inv_freq: Statistics are sent at each step that is a multiple of this number, at least 1.
        warmup_steps: Statistics are also sent at the first steps, of this number.
        dtype: Type on the wire: "f32", "f16" or "bf16".

    Raises:
        InvalidArgumentError: A field has another type, or inv_freq is 0. From Preconditioner: an unknown kind or dtype.
    """

    kind: str = ""
    mean_positions: bool = False
    sketches: int = 0
    inv_freq: int = 10
    warmup_steps: int = 10
    dtype: str = "f16"

    def __post_init__(self) -> None:
        for name in ("kind", "dtype"):
            check_text(f"statistics.{name}", getattr(self, name))
        check_bool("statistics.mean_positions", self.mean_positions)
        for name, least in (("sketches", 0), ("inv_freq", 1), ("warmup_steps", 0)):
            check_whole(f"statistics.{name}", getattr(self, name), least, _MOST_COUNT)


@dataclasses.dataclass(frozen=True)
class Security:
    """Files with which a client verifies servers and identifies itself. Each is read again when it changes.

    docs/operate/security.md says how to make them. They apply to host:port addresses; a unix: address needs none.

    Attributes:
        tls_ca: Certificates (PEM) of the authorities that sign the servers' certificates. Empty means connections in
            plaintext.
        tls_cert: This client's certificate, for servers that require one.
        tls_key: The key of tls_cert.
        token_file: File with one line, the bearer token that the client sends with every call.

    Each is a str or a path object. Raises InvalidArgumentError for anything else.
    """

    tls_ca: Union[str, "os.PathLike[str]"] = ""
    tls_cert: Union[str, "os.PathLike[str]"] = ""
    tls_key: Union[str, "os.PathLike[str]"] = ""
    token_file: Union[str, "os.PathLike[str]"] = ""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            path = os.fspath(value) if isinstance(value, os.PathLike) else value
            if not isinstance(path, str):
                raise invalid(f"Security: {name}", "a path, \"\" for none", value)
            object.__setattr__(self, name, path)


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    """How a process calls the servers: time-outs in seconds, security, and what it does at the start.

    Attributes:
        connect_timeout: Until a server's first answer.
        rpc_timeout: For one control call.
        result_timeout: From the submission of a gradient to its answer.
        join_timeout: Until all ranks have joined.
        lease_timeout: How long a step waits for the coordinator at the end of the lease.
        security: Files for all connections, also those to shards. None: no files.
        traceparent: W3C Trace Context that the client sends (docs/operate/monitoring.md). "": a trace of the client's own.
        replace: For Preconditioner: end an existing session of this name, and begin again.
        local_memory: For Preconditioner with the address "local": bytes that a shard may take, such as "24GiB", or a share of
            what its GPU has free. None: a share of 0.5; on the CPU 8 GiB.

    Raises:
        InvalidArgumentError: A time is negative or no number, or a field has another type. From Preconditioner:
            local_memory does not suit the address or the device.
    """

    connect_timeout: float = 10.0
    rpc_timeout: float = 30.0
    result_timeout: float = 120.0
    join_timeout: float = 120.0
    lease_timeout: float = 600.0
    security: Optional[Security] = None
    traceparent: str = ""
    replace: bool = False
    local_memory: Union[float, str, None] = None

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "rpc_timeout", "result_timeout", "join_timeout", "lease_timeout"):
            check_number(f"client.{name}", getattr(self, name), 0.0)
        if self.security is not None and not isinstance(self.security, Security):
            raise invalid("client.security", "a precondor.Security", self.security, "Security(tls_ca=...) has the file of the authorities")
        check_text("client.traceparent", self.traceparent)
        check_bool("client.replace", self.replace)

    def for_calls(self) -> ClientOptions:
        """Returns these options without those that concern Preconditioner alone."""
        return dataclasses.replace(self, replace=False, local_memory=None)


def check_for_calls(what: str, options: ClientOptions) -> ClientOptions:
    """Returns `options`. Raises InvalidArgumentError if they are no ClientOptions, or set what concerns Preconditioner alone."""
    if expect_instance(what, options, ClientOptions) != options.for_calls():
        raise invalid(what, "replace and local_memory with their defaults: they are for Preconditioner", options)
    return options
